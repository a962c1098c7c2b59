"""How tokens of a cache layer become blocks of codes, and who decides in how many bits."""

from functools import partial
from typing import Any, cast

import torch

from kvquant_hf import ops
from kvquant_hf.blocks import split_blocks
from kvquant_hf.guard import output_error, storage_of_keys
from kvquant_hf.padding import without_padding
from kvquant_hf.rope import KeyRotation
from kvquant_hf.spec import QuantSpec
from kvquant_hf.storage import BlockStore, keep_layouts_alike
from kvquant_hf.stored_layer import StoredLayer

# Blocks quantized at a time: bounds the float32 copies made of a long prompt.
_ENCODE_BLOCKS = 64


class BlockLayer(StoredLayer):
    """A `StoredLayer` that quantizes tokens and stores them.

    See `StoredLayer` for the arguments.
    """

    def _open_stores(self, key_states: torch.Tensor, value_states: torch.Tensor, key_spec: QuantSpec) -> None:
        """Empty stores for keys and values like these `[B, H, t, D]`, keys stored as `key_spec` says."""
        heads, head_dim = key_states.shape[1], key_states.shape[3]
        feedback = self.feedback
        if feedback is not None:
            if tuple(feedback.shape[:2]) != (heads, head_dim):
                raise ValueError(
                    f"`query_moments` has {feedback.shape[0]} heads of size {feedback.shape[1]}, `key_states` has "
                    f"{heads} of size {head_dim} (of a tensor parallel model they cannot be used yet)."
                )
            feedback = feedback.to(key_states.device)
        promotes = key_spec.promotes and self.rotation is not None
        partners = cast(KeyRotation, self.rotation).partners() if promotes else None
        length = self.config.block_length
        layouts = ops.block_layouts(
            self.config.backend,
            (key_spec, self.config.value),
            length,
            (key_states.shape[3], value_states.shape[3]),
            self.rotation,
            key_states.device,
        )
        self._stores = (
            BlockStore(key_spec, length, key_states.shape[3], key_states.dtype, layouts[0], feedback, partners),
            BlockStore(self.config.value, length, value_states.shape[3], value_states.dtype, layouts[1]),
        )

    def _flush(self, key_states: torch.Tensor, value_states: torch.Tensor, blocks: int) -> None:
        """Decide how the keys `[B, H, ≥ blocks · L, D]` are stored, and store their first `blocks` blocks."""
        self._guard(key_states, value_states)
        self._append_blocks(key_states, value_states, blocks)

    def _append_blocks(self, key_states: torch.Tensor, value_states: torch.Tensor, blocks: int) -> None:
        """Quantize the first `blocks` blocks as the stores say."""
        length = self.config.block_length
        key_store, value_store = self._block_stores()
        encoded = []
        for first in range(0, blocks, _ENCODE_BLOCKS):
            count = min(_ENCODE_BLOCKS, blocks - first)
            part = slice(first * length, (first + count) * length)
            slot = self._num_sink_slots + (key_store.num_blocks + first) * length
            encoded.append(
                (
                    self._encode(key_store, key_states[:, :, part], slot, self._rotation_in_use),
                    self._encode(value_store, value_states[:, :, part], slot, None),
                )
            )
        spare = blocks == 1  # a prompt gets what it needs, decoding grows in chunks
        for keys, values in encoded:
            key_store.append(keys, spare=spare)
            value_store.append(values, spare=spare)
            keep_layouts_alike(key_store, value_store)

    def _guard(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Let the first block of keys `[B, H, ≥ L, D]` decide how all of them are stored, before any is."""
        if not self.config.has_guard or self._block_stores()[0].num_blocks:
            return
        block = key_states[:, :, : self.config.block_length]
        queries, error = self._last_queries, None
        if queries is not None and queries.query is not None:
            error = partial(self._output_error, queries.query, queries.first, key_states, value_states)
        wanted = storage_of_keys(self.config, block, self._rotation_in_use, self._padding, error)
        if wanted != self._block_stores()[0].spec:
            self._open_stores(key_states, value_states, wanted)
        self._last_queries = None

    def _output_error(
        self, query: torch.Tensor, slot: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> torch.Tensor:
        """`output_error` of the first of these blocks for queries from `slot` on, the stores being empty again."""
        first, length, end = self._num_sink_slots, self.config.block_length, slot + query.shape[2]
        with torch.autocast(key_states.device.type, enabled=False):
            self._open_stores(key_states, value_states, self.config.key)
            try:
                self._append_blocks(key_states, value_states, 1)
                read = next(tile.keys for tile in self.view().tiles() if tile.first == first)
            finally:
                self._open_stores(key_states, value_states, self.config.key)
            keys, values = (states[:, :, : end - first] for states in (key_states, value_states))
            if self._sinks is not None:
                keys, values = (torch.cat(pair, dim=2) for pair in zip(self._sinks, (keys, values), strict=True))
            stored = keys.float().clone()
            stored[:, :, first : first + length] = read[:, :, : end - first]
            return output_error(query, keys, stored, values, slot, self._padding)

    def _encode(self, store: BlockStore, states: torch.Tensor, slot: int, rotation: KeyRotation | None) -> Any:
        """Codes of whole blocks `[B, H, n · L, D]` that begin at `slot`."""
        length, sinks = self.config.block_length, self._num_sink_slots
        clean = self._padding is None or slot >= self._exact_until
        compiled = store.spec.is_quantized and self.config.backend != "torch"
        if clean and compiled:
            encoded = ops.encode_blocks(store, states, slot, sinks, rotation)
            if encoded is not None:
                return encoded
        if not store.spec.is_quantized:
            return store.encode(states.reshape(*states.shape[:2], -1, length, states.shape[3]))
        blocks = split_blocks(states, length, slot, rotation)
        if clean:
            return store.encode(blocks)
        fitted = without_padding(blocks, slot, cast(torch.Tensor, self._padding), sinks)
        if compiled:
            encoded = ops.encode_blocks(store, blocks.flatten(2, 3), slot, sinks, None, fitted.contiguous())
            if encoded is not None:
                return encoded
        return store.encode(blocks, fitted)
