"""Quantizers by name. Adding one is described in CONTRIBUTING.md."""

import torch

from kvquant_hf.quantizers.affine import AffineQuantizer
from kvquant_hf.quantizers.base import QuantizedGroups, Quantizer
from kvquant_hf.quantizers.codebook import CodebookQuantizer, TurboQuantizer
from kvquant_hf.quantizers.promoted import PromotedQuantizer
from kvquant_hf.quantizers.variance_normalized import VarianceNormalizedQuantizer
from kvquant_hf.spec import QuantSpec

QUANTIZERS: dict[str, type[Quantizer]] = {
    "affine": AffineQuantizer,
    "variance_normalized": VarianceNormalizedQuantizer,
    "turboquant": TurboQuantizer,
}


def quantizer_of(spec: QuantSpec, partners: torch.Tensor | None = None) -> Quantizer:
    """The quantizer of some settings; `partners` is for `PromotedQuantizer`."""
    if spec.levels != "uniform" and spec.method == "affine":
        return CodebookQuantizer(spec)
    return PromotedQuantizer(spec, partners) if spec.promoted else QUANTIZERS[spec.method](spec)


__all__ = [
    "QUANTIZERS",
    "AffineQuantizer",
    "CodebookQuantizer",
    "PromotedQuantizer",
    "QuantizedGroups",
    "Quantizer",
    "TurboQuantizer",
    "VarianceNormalizedQuantizer",
    "quantizer_of",
]
