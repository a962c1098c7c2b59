"""Blocks of codes on their way into a store, and how a backend may lay them out."""

from typing import Protocol

import torch

from kvquant_hf.quantizers import QuantizedGroups

# The tensors that blocks consist of; which of them there are depends on the layout and the settings.
PARTS = (
    "codes",
    "scale",
    "zero_point",
    "metadata",
    "factor",
    "extra",
    "promoted",
    "outlier_index",
    "outlier_value",
    "second_level",
)

# Those of the common layout, which files hold.
STATE_PARTS = tuple(name for name in PARTS if name != "metadata")


class EncodedBlocks:
    """Packed blocks on their way into a `BlockStore`.

    `codes`, with `scale` and `zero_point` where there are any, or with `metadata` in a layout that keeps both in one;
    `factor` where the method has one; `extra` and `promoted`, the low bits and the numbers of promoted channels, where
    there are any; `outlier_index` and `outlier_value` likewise of outliers; `second_level` where scales and zero
    points are bytes.
    """

    __slots__ = PARTS

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor | None,
        zero_point: torch.Tensor | None,
        metadata: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        extra: torch.Tensor | None = None,
        promoted: torch.Tensor | None = None,
        outlier_index: torch.Tensor | None = None,
        outlier_value: torch.Tensor | None = None,
        second_level: torch.Tensor | None = None,
    ) -> None:
        self.codes, self.scale, self.zero_point, self.metadata = codes, scale, zero_point, metadata
        self.factor, self.extra, self.promoted = factor, extra, promoted
        self.outlier_index, self.outlier_value, self.second_level = outlier_index, outlier_value, second_level


class BlockLayout(Protocol):
    """A backend's own way of laying out blocks; without one they are packed as `PlanarLayout` says.

    Factors are none of its business: they lie beside the blocks in any layout.
    """

    def encode(self, groups: QuantizedGroups) -> EncodedBlocks | None:
        """Blocks as the backend reads them, or `None` if it could not read these."""

    def decode(self, blocks: EncodedBlocks) -> QuantizedGroups:
        """The groups that `encode` was given, without their factors."""
