"""Quantizers by name. Adding one is described in CONTRIBUTING.md."""

from kvquant_hf.quantizers.affine import AffineQuantizer
from kvquant_hf.quantizers.base import QuantizedGroups, Quantizer

QUANTIZERS: dict[str, type[Quantizer]] = {"affine": AffineQuantizer}

__all__ = ["QUANTIZERS", "AffineQuantizer", "QuantizedGroups", "Quantizer"]
