"""Blocks of codes on their way into a store, and how a backend may lay them out."""

from typing import Protocol

import torch

from kvquant_hf.quantizers import QuantizedGroups
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rotation import rotate_bounded
from kvquant_hf.spec import QuantSpec

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


def split_blocks(states: torch.Tensor, length: int, slot: int, rotation: KeyRotation | None) -> torch.Tensor:
    """Keys or values `[B, H, n · L, D]` in blocks, `[B, H, n, L, D]`, float32.

    Args:
        states: As the model rotated them.
        length: Tokens in a block, `L`.
        slot: Where the first token lies in the sequence.
        rotation: The rotary embedding to undo, or `None`.
    """
    blocks = states.reshape(*states.shape[:2], -1, length, states.shape[3]).float()
    if rotation is None:
        return blocks
    cos, sin = rotation.block_tables(slot, blocks.shape[2], length, blocks.device)
    return rotation.apply(blocks, cos, sin, inverse=True)


def rows_of(blocks: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """What a quantizer gets of blocks `[B, H, n, L, D]`: rotated, and `[B, H, n, D, L]` for codes per channel."""
    blocks = rotate_bounded(blocks, spec.rotation, spec.channel_order)
    return blocks.transpose(-1, -2) if spec.granularity == "per_channel" else blocks


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
