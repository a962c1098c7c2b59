"""What attention reads: a snapshot of a cache layer after an update."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvquant_hf.rope import KeyRotation
from kvquant_hf.rotation import rotate, unrotate
from kvquant_hf.storage import BlockStore
from kvquant_hf.window import ExactTokens

# Tokens dequantized at a time: large enough to amortize the calls, small enough to stay in a core's cache.
_TILE_TOKENS = 1024


class StaleViewError(RuntimeError):
    """A view was read after its cache layer had changed."""


@dataclass(frozen=True)
class Tile:
    """Consecutive tokens of a view, `first … last - 1`.

    Attributes:
        first: Slot of the first token.
        last: One past the slot of the last token.
        keys: `[B, H, last - first, D]`, rotated as the model rotates them; the rotation of post-RoPE keys by a
            Hadamard matrix is left in where `rotated_keys` says so.
        values: `[B, H, last - first, D_v]`; likewise with `rotated_values`.
        rotated_keys: Scores need the query in the Hadamard basis.
        rotated_values: Outputs are in the Hadamard basis.
    """

    first: int
    last: int
    keys: torch.Tensor
    values: torch.Tensor
    rotated_keys: bool = False
    rotated_values: bool = False


@dataclass(slots=True, eq=False)
class KVView:
    """Everything one attention call needs to read a layer: sinks, blocks of codes, residual window.

    Slots `0 … S-1` are exact (`sinks`), then come `num_blocks` blocks of `block_length` tokens, then the residual
    window. With left padding, `row_sinks` holds the first real tokens of each row, which lie at the slots
    `padding[r] … padding[r] + S - 1` and replace what the blocks say there.

    Attributes:
        kv_len: Tokens in all, `T`.
        query_length: Tokens of the update that made this view; its queries are theirs.
        backend: Configured backend.
        sinks: Keys and values `[B, H, ≤S, D]`, or `None`.
        key_store: Blocks of keys.
        value_store: Blocks of values.
        windows: Residual windows of keys and of values.
        window_length: Tokens in them now.
        rotation: How block keys have to be rotated after dequantization, or `None`.
        padding: Left padding of each row, `[B]`, int64, or `None` without any.
        row_sinks: Keys and values `[B, H, S, D]` where there is padding.
        num_sinks: Sink slots that are filled.
        epoch: Counter of the layer's changes, and its value now.
    """

    kv_len: int
    query_length: int
    backend: str
    key_store: BlockStore
    value_store: BlockStore
    sinks: tuple[torch.Tensor, torch.Tensor] | None
    windows: tuple[ExactTokens, ExactTokens]
    window_length: int
    rotation: KeyRotation | None
    padding: torch.Tensor | None
    row_sinks: tuple[torch.Tensor, torch.Tensor] | None
    num_sinks: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device
    key_shape: torch.Size
    value_shape: torch.Size
    epoch: tuple[list[int], int]

    @property
    def num_blocks(self) -> int:
        """Blocks held as codes."""
        return self.key_store.num_blocks

    @property
    def residual(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of the residual window, `[B, H, W, D]`, or `None`."""
        keys, values = (window.buffer for window in self.windows)
        if not self.window_length or keys is None or values is None:
            return None
        return keys[:, :, : self.window_length], values[:, :, : self.window_length]

    @property
    def block_length(self) -> int:
        """Tokens in a block."""
        return self.key_store.block_length

    @property
    def memo(self) -> dict[str, Any]:
        """What backends remember about the blocks; empty again whenever these change."""
        return self.key_store.memo

    def check_current(self) -> None:
        """Raise if the layer has changed since the view was made.

        Raises:
            StaleViewError: It has; reading on would mix two states.
        """
        counter, value = self.epoch
        if counter[0] != value:
            raise StaleViewError(
                "The keys or values of an earlier cache update were read after the cache had changed. Read them "
                "before the next update, or keep a copy made with `cache.dequantize(layer_idx)`."
            )

    def tiles(self, *, fold_rotations: bool = False) -> Iterator[Tile]:
        """All tokens in slot order, in tiles of about a thousand.

        Args:
            fold_rotations: Leave Hadamard rotations in where the caller can undo them once per query.

        Yields:
            Tiles; block tiles in float32 (unquantized sides and exact tokens in the model's dtype).
        """
        self.check_current()
        if self.sinks is not None:
            yield Tile(0, self.num_sinks, *self.sinks)
        start = self.num_sinks
        step = max(1, _TILE_TOKENS // self.block_length)
        for first in range(0, self.num_blocks, step):
            yield self._block_tile(start, first, min(first + step, self.num_blocks), fold_rotations)
        residual = self.residual
        if residual is not None:
            yield Tile(self.kv_len - self.window_length, self.kv_len, *residual)

    def _block_tile(self, start: int, first: int, last: int, fold: bool) -> Tile:
        begin, end = start + first * self.block_length, start + last * self.block_length
        # Rows whose sinks lie within the tile get them in the plain basis.
        fold = fold and self.padding is None
        fold_keys = fold and self.rotation is None and self.key_store.folds_rotation
        fold_values = fold and self.value_store.folds_rotation
        blocks = self.key_store.read(first, last, undo_rotation=not fold_keys)
        if self.rotation is not None:
            cos, sin = self.rotation.block_tables(begin, last - first, self.block_length, self.device)
            blocks = self.rotation.apply(blocks, cos, sin)
        keys = blocks.flatten(2, 3)
        values = self.value_store.read(first, last, undo_rotation=not fold_values).flatten(2, 3)
        if self.padding is not None and self.row_sinks is not None:
            keys, values = (
                _with_row_sinks(t, sinks, self.padding, begin)
                for t, sinks in zip((keys, values), self.row_sinks, strict=True)
            )
        return Tile(begin, end, keys, values, fold_keys, fold_values)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values as attention reads them, `[B, H, T, D]` each, in the model's dtype."""
        keys = torch.empty(self.key_shape, dtype=self.key_dtype, device=self.device)
        values = torch.empty(self.value_shape, dtype=self.value_dtype, device=self.device)
        for tile in self.tiles():
            keys[:, :, tile.first : tile.last] = tile.keys
            values[:, :, tile.first : tile.last] = tile.values
        return keys, values

    def fold_query(self, query: torch.Tensor) -> torch.Tensor:
        """Queries `[…, D]` for tiles with `rotated_keys`: `q·k = (qR)·(kR)` for an orthonormal `R`."""
        return rotate(query, self.key_store.spec.rotation, self.key_store.spec.channel_order)

    def unfold_output(self, output: torch.Tensor) -> torch.Tensor:
        """Sums `[…, D_v]` of values of tiles with `rotated_values`, back in the plain basis."""
        return unrotate(output, self.value_store.spec.rotation, self.value_store.spec.channel_order)


def _with_row_sinks(tile: torch.Tensor, sinks: torch.Tensor, padding: torch.Tensor, begin: int) -> torch.Tensor:
    """A tile `[B, H, t, D]` whose first slot is `begin`, with the sinks of padded rows put where they belong."""
    slots = begin + torch.arange(tile.shape[2], device=tile.device)
    place = slots[None, :] - padding[:, None]  # [B, t]: which sink a slot is
    inside = (place >= 0) & (place < sinks.shape[2]) & (padding[:, None] > 0)
    if not bool(inside.any()):
        return tile
    place = place.clamp(0, sinks.shape[2] - 1)[:, None, :, None].expand(*tile.shape[:2], -1, tile.shape[3])
    return torch.where(inside[:, None, :, None], sinks.gather(2, place).to(tile.dtype), tile)
