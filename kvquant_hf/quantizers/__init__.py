"""Quantizers by name. Adding one is described in CONTRIBUTING.md."""

from kvquant_hf.quantizers.affine import AffineQuantizer
from kvquant_hf.quantizers.base import QuantizedGroups, Quantizer
from kvquant_hf.quantizers.variance_normalized import VarianceNormalizedQuantizer

QUANTIZERS: dict[str, type[Quantizer]] = {
    "affine": AffineQuantizer,
    "variance_normalized": VarianceNormalizedQuantizer,
}

__all__ = ["QUANTIZERS", "AffineQuantizer", "QuantizedGroups", "Quantizer", "VarianceNormalizedQuantizer"]
