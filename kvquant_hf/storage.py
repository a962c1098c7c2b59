"""Written-once blocks of codes."""

from dataclasses import replace
from typing import Any

import torch

from kvquant_hf.block_state import check_state
from kvquant_hf.blocks import PARTS, STATE_PARTS, BlockLayout, EncodedBlocks, rows_of
from kvquant_hf.buffers import GROWTH_SHARE, TensorMap, with_capacity
from kvquant_hf.packing import PlanarLayout
from kvquant_hf.quantizers import (
    Outliers,
    QuantizedGroups,
    Quantizer,
    join_codes,
    quantizer_of,
    split_codes,
)
from kvquant_hf.rotation import FOLDABLE, check_rotation, rotate_bounded
from kvquant_hf.spec import EXTRA_BITS, QuantSpec

_BLOCK_CHUNK = 4


class BlockStore:
    """Blocks of `block_length` tokens of keys or of values, each quantized once when it is appended.

    Per-channel codes are stored `[B, H, N, D, bytes]` with the tokens of a channel side by side, per-token codes
    `[B, H, N, L, bytes]` with the channels of a token side by side; scales and zero points `[…, groups]` likewise, one
    of them `[…, ⌈groups / n⌉]` where `n` groups share it; factors `[B, H, N, L]` (per-channel codes) or `[B, H, N, D]`
    (per-token codes). Of promoted channels the low two bits lie apart, `[B, H, N, P, L / 4]`, beside the channels'
    numbers `[B, H, N, P]`; of outliers places and values, `[B, H, N, K]` each. What 8-bit metadata is relative to is
    `[B, H, N, 1 + listed]`. Unquantized blocks (16 bits) are `[B, H, N, L, D]` in the model's dtype.

    Args:
        spec: How the tensor is stored.
        block_length: Tokens in a block, `L`.
        head_dim: Size of a key or value vector, `D`.
        dtype: Dtype of the model's tensor.
        own_layout: Layout of the backend that will read the blocks, `None` for the one described above. Blocks that it
            cannot take turn the whole store to the latter, for good.
        feedback: `[H, D, D]`: how errors of channels are made good in others (`QueryMoments.feedback`), `None` to
            round every number for itself. For per-channel codes.
        partners: `[D]`: channels that are promoted together, see `PromotedQuantizer`.
    """

    def __init__(
        self,
        spec: QuantSpec,
        block_length: int,
        head_dim: int,
        dtype: torch.dtype,
        own_layout: BlockLayout | None = None,
        feedback: torch.Tensor | None = None,
        partners: torch.Tensor | None = None,
    ) -> None:
        self.spec = spec
        check_rotation(spec, head_dim)
        self.partners = partners
        self.feedback = feedback if spec.is_quantized else None
        self.block_length = block_length
        self.head_dim = head_dim
        self.dtype = dtype
        self.num_blocks = 0
        self.codes: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None
        self.zero_point: torch.Tensor | None = None
        # What a backend remembers about the stored tensors. Keys and values change together.
        self.memo: dict[str, Any] = {}
        self.metadata: torch.Tensor | None = None
        self.factor: torch.Tensor | None = None
        self.extra: torch.Tensor | None = None
        self.promoted: torch.Tensor | None = None
        self.outlier_index: torch.Tensor | None = None
        self.outlier_value: torch.Tensor | None = None
        self.second_level: torch.Tensor | None = None
        self.own_layout = own_layout if spec.is_quantized else None
        self._left: BlockLayout | None = None
        self._quantizer: Quantizer | None = quantizer_of(spec, partners) if spec.is_quantized else None
        row_length = block_length if spec.granularity == "per_channel" else head_dim
        self.layout = PlanarLayout(spec.nbits, row_length) if spec.is_quantized else None
        self._extra_layout = PlanarLayout(EXTRA_BITS, row_length)

    # ---- writing -----------------------------------------------------------------------------------------------

    def encode(self, blocks: torch.Tensor, range_blocks: torch.Tensor | None = None) -> "EncodedBlocks":
        """Quantize and pack blocks without storing them, so that a failure leaves the store as it was.

        Args:
            blocks: `[B, H, n, L, D]`: float32 to be quantized, the model's dtype for 16 bits.
            range_blocks: Like `blocks`, what the ranges are fitted to where that differs.
        """
        if self._quantizer is None or self.layout is None:
            return EncodedBlocks(blocks.to(self.dtype), None, None)
        groups = self._quantizer.quantize(
            rows_of(blocks, self.spec),
            None if range_blocks is None else rows_of(range_blocks, self.spec),
            self.feedback,
        )
        return self._encoded(groups)

    def _encoded(self, groups: QuantizedGroups) -> EncodedBlocks:
        own = None if self.own_layout is None else self.own_layout.encode(groups)
        if own is None:
            return self._planar(groups)
        own.factor = groups.factor
        return own

    def _planar(self, groups: QuantizedGroups) -> EncodedBlocks:
        assert self.layout is not None
        codes, extra = groups.codes, None
        if groups.promoted is not None:
            codes, low = split_codes(codes, groups.promoted)
            extra = self._extra_layout.pack(low)
        packed, parameters = self.layout.pack(codes), (groups.scale, groups.zero_point)
        places, exact = groups.outliers or (None, None)
        return EncodedBlocks(
            packed, *parameters, None, groups.factor, extra, groups.promoted, places, exact, groups.second_level
        )

    def append(self, encoded: "EncodedBlocks", spare: bool = True) -> None:
        """Store encoded blocks after those present.

        Args:
            encoded: What `encode` returned.
            spare: Leave room for later blocks when the buffers have to grow.
        """
        self.memo.clear()
        if self.own_layout is not None and encoded.metadata is None:
            self.leave_own_layout()
        if self.own_layout is None and encoded.metadata is not None:  # encoded before its neighbours left the layout
            assert self._left is not None
            encoded = self._planar(self._unpacked(encoded, self._left))
        count = encoded.codes.shape[2]
        needed = self.num_blocks + count
        room = max(_BLOCK_CHUNK, needed // GROWTH_SHARE) - 1 if spare else 0
        for name in PARTS:
            new = getattr(encoded, name)
            if new is None:
                continue
            buffer = getattr(self, name)
            if buffer is not None and buffer.dtype != new.dtype:  # only parameters change, from float16 to float32
                widest = torch.promote_types(buffer.dtype, new.dtype)
                buffer, new = buffer.to(widest), new.to(widest)
            buffer = with_capacity(buffer, new, self.num_blocks, needed, room)
            buffer[:, :, self.num_blocks : needed] = new
            setattr(self, name, buffer)
        self.num_blocks = needed

    @property
    def has_left_own_layout(self) -> bool:
        """Whether blocks came that the backend's layout could not take."""
        return self._left is not None

    def leave_own_layout(self) -> None:
        """Pack what is stored the common way, for good; reading it gives the same values."""
        if self.own_layout is None:
            return
        self.memo.clear()
        groups = self._groups(0, self.num_blocks) if self.num_blocks else None
        self._left, self.own_layout = self.own_layout, None
        self._set(None if groups is None else self._planar(groups))

    def _set(self, encoded: "EncodedBlocks | None") -> None:
        for name in PARTS:
            setattr(self, name, None if encoded is None else getattr(encoded, name))

    # ---- reading -----------------------------------------------------------------------------------------------

    @property
    def folds_rotation(self) -> bool:
        """Whether there is a rotation that attention can take over from `read`."""
        return self.spec.is_quantized and self.spec.rotation in FOLDABLE

    def read(self, first: int, last: int, *, undo_rotation: bool = True) -> torch.Tensor:
        """Values of the blocks `first … last - 1`.

        Args:
            first: First block.
            last: One past the last block.
            undo_rotation: Whether to undo `spec.rotation`; a caller that leaves it in applies it elsewhere.

        Returns:
            `[B, H, last - first, L, D]`, float32 (the model's dtype for 16 bits).
        """
        assert self.codes is not None
        if self._quantizer is None:
            return self.codes[:, :, first:last]
        rows = self._quantizer.dequantize(self._groups(first, last))
        blocks = rows.transpose(-1, -2) if self.spec.granularity == "per_channel" else rows
        if not undo_rotation:
            return blocks
        return rotate_bounded(blocks, self.spec.rotation, self.spec.channel_order, inverse=True)

    def _groups(self, first: int, last: int) -> QuantizedGroups:
        """Codes and parameters of the blocks `first … last - 1`, rows as the quantizer made them."""
        assert self.codes is not None
        held = [None if (part := getattr(self, name)) is None else part[:, :, first:last] for name in PARTS[1:]]
        return self._unpacked(EncodedBlocks(self.codes[:, :, first:last], *held), self.own_layout)

    def _unpacked(self, blocks: EncodedBlocks, own_layout: BlockLayout | None) -> QuantizedGroups:
        """Codes and parameters of blocks in a backend's layout, or in the common one."""
        if own_layout is not None:
            return replace(own_layout.decode(blocks), factor=blocks.factor)
        assert self.layout is not None and blocks.scale is not None
        codes = self.layout.unpack(blocks.codes)
        if blocks.promoted is not None and blocks.extra is not None:
            codes = join_codes(codes, self._extra_layout.unpack(blocks.extra), blocks.promoted)
        outliers = None
        if blocks.outlier_index is not None and blocks.outlier_value is not None:
            outliers = Outliers(blocks.outlier_index, blocks.outlier_value)
        parameters = (blocks.scale, blocks.zero_point, blocks.factor)
        return QuantizedGroups(codes, *parameters, blocks.promoted, outliers, blocks.second_level)

    # ---- acting on everything stored ---------------------------------------------------------------------------

    def truncate(self, num_blocks: int) -> None:
        """Forget the blocks from `num_blocks` on."""
        self.memo.clear()
        self.num_blocks = min(self.num_blocks, num_blocks)
        if self.num_blocks == 0:
            self._set(None)

    def map(self, function: TensorMap) -> None:
        """Replace every stored tensor by what `function` makes of it (batch selection, device moves)."""
        self.memo.clear()
        for name in PARTS:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, function(tensor))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"memo": {}}  # addresses mean nothing in a copy

    def tensors(self) -> list[torch.Tensor]:
        """The buffers, unused capacity included."""
        return [tensor for name in PARTS if (tensor := getattr(self, name)) is not None]

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes in use by `codes`, `scales` (factors and outliers among them) and `zero_points`, and `unused` ones."""
        parts = {"codes": 0, "scales": 0, "zero_points": 0, "unused": 0}
        words = ("scales",) if self.spec.symmetric else ("scales", "zero_points")
        shares = {"codes": ("codes",), "scale": ("scales",), "zero_point": ("zero_points",), "metadata": words}
        shares |= {"factor": ("scales",), "promoted": ("scales",), "extra": ("codes",), "second_level": ("scales",)}
        shares |= {"outlier_index": ("scales",), "outlier_value": ("scales",)}
        for name in PARTS:
            tensor = getattr(self, name)
            if tensor is not None:
                block = tensor[:, :, 0].numel() * tensor.element_size()
                for part in shares[name]:
                    parts[part] += block * self.num_blocks // len(shares[name])
                parts["unused"] += tensor.untyped_storage().nbytes() - block * self.num_blocks
        return parts

    def state(self) -> dict[str, torch.Tensor]:
        """The stored tensors in the common layout, unused capacity cut off."""
        stored: BlockStore | EncodedBlocks = self
        if self.own_layout is not None and self.num_blocks:
            stored = self._planar(self._groups(0, self.num_blocks))
        tensors = {name: getattr(stored, name) for name in STATE_PARTS}
        return {k: t[:, :, : self.num_blocks].contiguous() for k, t in tensors.items() if t is not None}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state` returned.

        Raises:
            ValueError: A tensor is missing or has a shape or dtype that the settings do not allow.
        """
        check_state(state, self.spec, self.block_length, self.head_dim)
        self.memo.clear()
        self.num_blocks = state["codes"].shape[2] if state else 0
        if not state:
            self._set(None)
            return
        encoded = EncodedBlocks(
            state["codes"],
            state.get("scale"),
            state.get("zero_point"),
            factor=state.get("factor"),
            extra=state.get("extra"),
            promoted=state.get("promoted"),
            outlier_index=state.get("outlier_index"),
            outlier_value=state.get("outlier_value"),
            second_level=state.get("second_level"),
        )
        if self.own_layout is not None:
            encoded = self._encoded(self._unpacked(encoded, None))
            if encoded.metadata is None:
                self._left, self.own_layout = self.own_layout, None
        self._set(encoded)


def keep_layouts_alike(keys: BlockStore, values: BlockStore) -> None:
    """Turn both sides of a layer to the common layout if one had to leave its own: a kernel reads either, not both."""
    if keys.has_left_own_layout or values.has_left_own_layout:
        keys.leave_own_layout()
        values.leave_own_layout()
