"""Quantizers by name. Adding one is described in CONTRIBUTING.md."""

import torch

from kvquant_hf.quantizers.affine import AffineQuantizer
from kvquant_hf.quantizers.base import Outliers, QuantizedGroups, Quantizer
from kvquant_hf.quantizers.byte_metadata import ByteMetadataQuantizer
from kvquant_hf.quantizers.codebook import CodebookQuantizer, TurboQuantizer
from kvquant_hf.quantizers.innerq import InnerQuantizer
from kvquant_hf.quantizers.nvfp4 import MicroscaledQuantizer
from kvquant_hf.quantizers.outliers import OutlierQuantizer, check_places, places_of
from kvquant_hf.quantizers.promoted import PromotedQuantizer, along, join_codes, split_codes
from kvquant_hf.quantizers.shared_groups import SharedGroupsQuantizer
from kvquant_hf.quantizers.turboquant_prod import TurboProdQuantizer
from kvquant_hf.quantizers.variance_normalized import VarianceNormalizedQuantizer
from kvquant_hf.spec import QuantSpec

QUANTIZERS: dict[str, type[Quantizer]] = {
    "affine": AffineQuantizer,
    "innerq": InnerQuantizer,
    "variance_normalized": VarianceNormalizedQuantizer,
    "turboquant": TurboQuantizer,
    "turboquant_prod": TurboProdQuantizer,
}


def quantizer_of(spec: QuantSpec, partners: torch.Tensor | None = None) -> Quantizer:
    """The quantizer of some settings; `partners` is for `PromotedQuantizer`."""
    if spec.shares:
        return SharedGroupsQuantizer(spec)
    if spec.outliers:
        return OutlierQuantizer(spec)
    if spec.has_second_level:
        uniform = spec.levels == "uniform"
        return ByteMetadataQuantizer(spec, partners) if uniform else MicroscaledQuantizer(spec)
    if spec.levels != "uniform" and spec.method == "affine":
        return CodebookQuantizer(spec)
    return PromotedQuantizer(spec, partners) if spec.promotes else QUANTIZERS[spec.method](spec)


__all__ = [
    "QUANTIZERS",
    "AffineQuantizer",
    "ByteMetadataQuantizer",
    "CodebookQuantizer",
    "InnerQuantizer",
    "MicroscaledQuantizer",
    "OutlierQuantizer",
    "Outliers",
    "PromotedQuantizer",
    "QuantizedGroups",
    "Quantizer",
    "SharedGroupsQuantizer",
    "TurboProdQuantizer",
    "TurboQuantizer",
    "VarianceNormalizedQuantizer",
    "along",
    "check_places",
    "join_codes",
    "places_of",
    "quantizer_of",
    "split_codes",
]
