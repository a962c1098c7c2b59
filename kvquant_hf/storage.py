"""Buffers of a cache layer: written-once blocks of codes, and exact tokens."""

from collections.abc import Callable
from typing import Any

import torch

from kvquant_hf.config import QuantSpec
from kvquant_hf.packing import PlanarLayout
from kvquant_hf.quantizers import QUANTIZERS, QuantizedGroups, Quantizer
from kvquant_hf.rotation import hadamard

TensorMap = Callable[[torch.Tensor], torch.Tensor]

# Buffers grow by this many tokens or blocks, or by a sixteenth of what they hold once that is more.
_EXACT_CHUNK = 32
_BLOCK_CHUNK = 4
_GROWTH_SHARE = 16


class BlockStore:
    """Blocks of `block_length` tokens of keys or of values, each quantized once when it is appended.

    Per-channel codes are stored `[B, H, N, D, bytes]` with the tokens of a channel side by side, per-token codes
    `[B, H, N, L, bytes]` with the channels of a token side by side; scales and zero points `[…, groups]` likewise.
    Unquantized blocks (16 bits) are `[B, H, N, L, D]` in the model's dtype.

    Args:
        spec: How the tensor is stored.
        block_length: Tokens in a block, `L`.
        head_dim: Size of a key or value vector, `D`.
        dtype: Dtype of the model's tensor.
    """

    def __init__(self, spec: QuantSpec, block_length: int, head_dim: int, dtype: torch.dtype) -> None:
        self.spec = spec
        self.block_length = block_length
        self.head_dim = head_dim
        self.dtype = dtype
        self.num_blocks = 0
        self.codes: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None
        self.zero_point: torch.Tensor | None = None
        # What a backend remembers about the stored tensors. Keys and values change together.
        self.memo: dict[str, Any] = {}
        self._quantizer: Quantizer | None = QUANTIZERS[spec.method](spec) if spec.is_quantized else None
        row_length = block_length if spec.granularity == "per_channel" else head_dim
        self.layout = PlanarLayout(spec.nbits, row_length) if spec.is_quantized else None

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
            self._rows(blocks), None if range_blocks is None else self._rows(range_blocks)
        )
        return EncodedBlocks(self.layout.pack(groups.codes), groups.scale, groups.zero_point)

    def _rows(self, blocks: torch.Tensor) -> torch.Tensor:
        if self.spec.rotation == "hadamard":
            blocks = hadamard(blocks)
        return blocks.transpose(-1, -2) if self.spec.granularity == "per_channel" else blocks

    def append(self, encoded: "EncodedBlocks", spare: bool = True) -> None:
        """Store encoded blocks after those present.

        Args:
            encoded: What `encode` returned.
            spare: Leave room for later blocks when the buffers have to grow.
        """
        self.memo.clear()
        count = encoded.codes.shape[2]
        needed = self.num_blocks + count
        room = max(_BLOCK_CHUNK, needed // _GROWTH_SHARE) - 1 if spare else 0
        for name in ("codes", "scale", "zero_point"):
            new = getattr(encoded, name)
            if new is None:
                continue
            buffer = getattr(self, name)
            if buffer is not None and buffer.dtype != new.dtype:  # only scales change, from float16 to float32
                widest = torch.promote_types(buffer.dtype, new.dtype)
                buffer, new = buffer.to(widest), new.to(widest)
            buffer = _with_capacity(buffer, new, self.num_blocks, needed, room)
            buffer[:, :, self.num_blocks : needed] = new
            setattr(self, name, buffer)
        self.num_blocks = needed

    # ---- reading -----------------------------------------------------------------------------------------------

    def read(self, first: int, last: int, *, undo_rotation: bool = True) -> torch.Tensor:
        """Values of the blocks `first … last - 1`.

        Args:
            first: First block.
            last: One past the last block.
            undo_rotation: Whether to undo the Hadamard rotation; a caller that leaves it in applies it elsewhere.

        Returns:
            `[B, H, last - first, L, D]`, float32 (the model's dtype for 16 bits).
        """
        assert self.codes is not None
        codes = self.codes[:, :, first:last]
        if self._quantizer is None or self.layout is None:
            return codes
        assert self.scale is not None
        zero_point = None if self.zero_point is None else self.zero_point[:, :, first:last]
        rows = self._quantizer.dequantize(self.layout.unpack(codes), self.scale[:, :, first:last], zero_point)
        blocks = rows.transpose(-1, -2) if self.spec.granularity == "per_channel" else rows
        return hadamard(blocks) if undo_rotation and self.spec.rotation == "hadamard" else blocks

    # ---- acting on everything stored ---------------------------------------------------------------------------

    def truncate(self, num_blocks: int) -> None:
        """Forget the blocks from `num_blocks` on."""
        self.memo.clear()
        self.num_blocks = min(self.num_blocks, num_blocks)
        if self.num_blocks == 0:
            self.codes = self.scale = self.zero_point = None

    def map(self, function: TensorMap) -> None:
        """Replace every stored tensor by what `function` makes of it (batch selection, device moves)."""
        self.memo.clear()
        for name in ("codes", "scale", "zero_point"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, function(tensor))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"memo": {}}  # addresses mean nothing in a copy

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes in use by `codes`, `scales` and `zero_points`, and `unused` ones."""
        parts = {"codes": 0, "scales": 0, "zero_points": 0, "unused": 0}
        for name, part in (("codes", "codes"), ("scale", "scales"), ("zero_point", "zero_points")):
            tensor = getattr(self, name)
            if tensor is not None:
                block = tensor[:, :, 0].numel() * tensor.element_size()
                parts[part] += block * self.num_blocks
                parts["unused"] += tensor.untyped_storage().nbytes() - block * self.num_blocks
        return parts

    def state(self) -> dict[str, torch.Tensor]:
        """The stored tensors, unused capacity cut off."""
        tensors = {"codes": self.codes, "scale": self.scale, "zero_point": self.zero_point}
        return {k: t[:, :, : self.num_blocks].contiguous() for k, t in tensors.items() if t is not None}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state` returned.

        Raises:
            ValueError: A tensor is missing or has a shape or dtype that the settings do not allow.
        """
        self._check_state(state)
        self.memo.clear()
        self.codes, self.scale, self.zero_point = (state.get(name) for name in ("codes", "scale", "zero_point"))
        self.num_blocks = 0 if self.codes is None else self.codes.shape[2]

    def _check_state(self, state: dict[str, torch.Tensor]) -> None:
        if not state:
            return
        expected = {"codes"}
        if self._quantizer is not None:
            expected |= {"scale"} if self.spec.symmetric else {"scale", "zero_point"}
        if set(state) != expected:
            raise ValueError(f"stored blocks must have the tensors {sorted(expected)}, got {sorted(state)}.")
        lead = state["codes"].shape[:3]
        per_channel = self.spec.granularity == "per_channel"
        rows, row = (self.head_dim, self.block_length) if per_channel else (self.block_length, self.head_dim)
        shapes = (
            {"codes": (rows, self.layout.num_bytes)} if self.layout else {"codes": (self.block_length, self.head_dim)}
        )
        groups = (rows, -(-row // self.spec.group_size))
        for name, tensor in state.items():
            shape = tuple(lead) + shapes.get(name, groups)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"stored `{name}` must have the shape {shape}, got {tuple(tensor.shape)}.")


class EncodedBlocks:
    """Packed blocks on their way into a `BlockStore`: `codes`, and `scale` and `zero_point` where there are any."""

    __slots__ = ("codes", "scale", "zero_point")

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None) -> None:
        self.codes, self.scale, self.zero_point = codes, scale, zero_point


class ExactTokens:
    """Tokens kept as they came, in a buffer that grows in chunks and drops from the front.

    Args:
        limit: Tokens beyond which no spare room is made, or `None`.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.length = 0
        self.buffer: torch.Tensor | None = None

    def append(self, states: torch.Tensor) -> None:
        """Add tokens `[B, H, t, D]` at the end."""
        needed = self.length + states.shape[2]
        if self.buffer is not None and self.buffer.shape[2] >= needed:
            self.buffer.narrow(2, self.length, needed - self.length).copy_(states)
            self.length = needed
            return
        capacity = _chunk(needed) if self.limit is None else min(_chunk(needed), max(needed, self.limit))
        self.buffer = _with_capacity(self.buffer, states, self.length, needed, capacity - needed)
        self.buffer[:, :, self.length : needed] = states
        self.length = needed

    def replace(self, states: torch.Tensor) -> None:
        """Hold exactly the tokens `[B, H, t, D]`, copied; the buffer stays where it is if they fit into it."""
        if self.limit is None or self.buffer is None or self.buffer.shape[2] > self.limit:
            self.buffer = None
        self.length = 0
        self.append(states)

    def drop_front(self, count: int) -> None:
        """Forget the oldest `count` tokens."""
        assert self.buffer is not None
        kept = self.buffer[:, :, count : self.length].clone()
        self.length -= count
        self.buffer[:, :, : self.length] = kept

    def truncate(self, length: int) -> None:
        """Forget all but the oldest `length` tokens."""
        self.length = min(self.length, length)

    def view(self) -> torch.Tensor | None:
        """The tokens, `[B, H, length, D]`, a view of the buffer; `None` before the first."""
        return None if self.buffer is None else self.buffer[:, :, : self.length]

    def map(self, function: TensorMap) -> None:
        """Replace the buffer by what `function` makes of it."""
        if self.buffer is not None:
            self.buffer = function(self.buffer)

    def bytes_used(self) -> int:
        """Bytes of the tokens held."""
        tokens = self.view()
        return 0 if tokens is None else tokens.numel() * tokens.element_size()

    def bytes_held(self) -> int:
        """Bytes of the buffer."""
        return 0 if self.buffer is None else self.buffer.untyped_storage().nbytes()


def _chunk(length: int) -> int:
    chunk = max(_EXACT_CHUNK, length // _GROWTH_SHARE)
    return -(-length // chunk) * chunk


def _with_capacity(buffer: torch.Tensor | None, like: torch.Tensor, used: int, needed: int, room: int) -> torch.Tensor:
    """A buffer with place for `needed` entries on axis 2 that holds the first `used` of `buffer`."""
    if buffer is not None and buffer.shape[2] >= needed:
        return buffer
    shape = (*like.shape[:2], needed + room, *like.shape[3:])
    grown = torch.empty(shape, dtype=like.dtype, device=like.device)
    if buffer is not None:
        grown[:, :, :used] = buffer[:, :, :used]
    return grown


def storage_bytes(value: Any) -> int:
    """Bytes of the storage behind a tensor, which may be larger than the tensor; 0 for anything else."""
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


__all__ = ["BlockStore", "EncodedBlocks", "ExactTokens", "QuantizedGroups", "storage_bytes"]
