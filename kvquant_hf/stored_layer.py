"""What a layer of the cache holds (exact sinks, blocks of codes, exact residual window), read and acted on as one."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvquant_hf import ops
from kvquant_hf.buffers import TensorMap
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.last_queries import LastQueries
from kvquant_hf.rope import KeyRotation
from kvquant_hf.spec import QuantSpec
from kvquant_hf.storage import BlockStore
from kvquant_hf.view import KVView
from kvquant_hf.window import ExactTokens


class StoredLayer(CacheLayerMixin):
    """The contents of a `QuantLayer` and everything that is done to them besides adding tokens.

    Args:
        config: Settings of this layer (`KVQuantConfig.for_layer`).
        rotation: The rotary embedding to undo before keys are quantized, or `None` to store them as they come.
        note: What `repr` says about the rotary embedding.
        feedback: `[H_kv, D, D]`: how errors of key channels are made good in others (`QueryMoments.feedback`), or
            `None` to round every number for itself.
        num_heads: Key/value heads of the whole model, `None` where that is not known.
        scaling: Factor of the scores where attention does not tell, `None` for `1/√D`.
    """

    # Set by the first keys and values: their shapes without tokens, dtypes and device.
    _shapes: tuple[torch.Size, torch.Size]
    _dtypes: tuple[torch.dtype, torch.dtype]
    batch_size: int
    device: torch.device

    def __init__(
        self,
        config: KVQuantConfig,
        rotation: KeyRotation | None = None,
        note: str = "",
        feedback: torch.Tensor | None = None,
        num_heads: int | None = None,
        scaling: float | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config = config
        self.rotation = rotation if config.key.is_quantized and config.key.rope == "pre" else None
        self.note = note
        self.feedback = feedback
        self._whole_heads = num_heads
        self._scaling = scaling
        self._epoch = [0]
        # Tokens at which the residual window overflows; no window limits what is not quantized at all.
        self._overflow = config.residual_length + config.block_length if config.is_quantized else 0
        self._clear()

    def _clear(self) -> None:
        self._length = 0
        self._stores: tuple[BlockStore, BlockStore] | None = None
        limit = self._overflow or None
        self._residual = (ExactTokens(limit), ExactTokens(limit))
        self._sinks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._row_sinks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._padding: torch.Tensor | None = None
        self._exact_until = self._num_sink_slots
        self._is_away = False
        self._appender: ops.Appender | None = None
        self._last_queries = self._no_queries()
        self._rotation_in_use: KeyRotation | None = None
        self.is_initialized = False
        for name in ("batch_size", "device"):
            self.__dict__.pop(name, None)

    def _no_queries(self) -> LastQueries | None:
        """What the attention guard judges by, to be collected; `None` without one, and once a block is stored."""
        return LastQueries(self.config) if self.config.asks_queries else None

    @property
    def _num_sink_slots(self) -> int:
        return self.config.sink_length if self.config.is_quantized else 0

    # ---- reading -----------------------------------------------------------------------------------------------

    def _block_stores(self) -> tuple[BlockStore, BlockStore]:
        if self._stores is None:
            raise RuntimeError("The cache layer is empty.")
        return self._stores

    def view(self, query_length: int = 1) -> KVView:
        """A snapshot for attention of `query_length` new tokens; valid until the layer changes."""
        key_store, value_store = self._block_stores()
        length = self._length
        key_shape, value_shape = self._shapes
        return KVView(
            kv_len=length,
            query_length=query_length,
            backend=self.config.backend,
            key_store=key_store,
            value_store=value_store,
            sinks=self._sinks,
            windows=self._residual,
            window_length=self._residual[0].length,
            rotation=self._rotation_in_use,
            padding=self._padding,
            row_sinks=self._row_sinks,
            num_sinks=0 if self._sinks is None else self._sinks[0].shape[2],
            key_dtype=self._dtypes[0],
            value_dtype=self._dtypes[1],
            device=self.device,
            key_shape=torch.Size((key_shape[0], key_shape[1], length, key_shape[3])),
            value_shape=torch.Size((value_shape[0], value_shape[1], length, value_shape[3])),
            epoch=(self._epoch, self._epoch[0]),
        )

    def dequantize(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as attention reads them, `[B, H, T, D]` each, in the model's dtype (copies).

        Tokens that wait for attention to show its queries (`attention_guard`) are still exact.

        Raises:
            RuntimeError: The layer is empty.
        """
        self.prefetch()
        return self.view().dense()

    @property
    def quantized_length(self) -> int:
        """Tokens held as codes."""
        return 0 if self._stores is None else self._stores[0].num_blocks * self.config.block_length

    @property
    def key_spec(self) -> QuantSpec:
        """How keys are stored: as the settings say, or as a guard decided by the first block."""
        return self._stores[0].spec if self._stores is not None and self.quantized_length else self.config.key

    @property
    def is_guarded(self) -> bool:
        """Whether a guard gave the keys more bits than the settings; false before the first block."""
        return self.key_spec != self.config.key

    @property
    def num_heads(self) -> int:
        """Key/value heads held: under tensor parallelism those of this process. 0 where nothing was stored yet."""
        return self._shapes[0][1] if self.is_initialized else 0

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(kv_length, kv_offset)` of the mask for `query_length` new tokens."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    # ---- acting on everything stored ---------------------------------------------------------------------------

    def set_padding(self, padding: torch.Tensor | None) -> None:
        """Left padding of each row, `[B]`, int64, on any device; `None` or all zeros for none."""
        if padding is not None and bool((padding > 0).any()):
            self._padding = padding.clone()
        else:
            self._padding = self._row_sinks = None
        self._note_padding()

    def _note_padding(self) -> None:
        """Remember the slot at which the sinks of all rows, and all padding, end."""
        self._exact_until = self._num_sink_slots + (0 if self._padding is None else int(self._padding.max()))

    def _map(self, function: TensorMap) -> None:
        for window in self._residual:
            window.map(function)
        for store in self._stores or ():
            store.map(function)
        if self._last_queries is not None:
            self._last_queries.window.map(function)
        for name in ("_sinks", "_row_sinks"):
            pair = getattr(self, name)
            if pair is not None:
                setattr(self, name, (function(pair[0]), function(pair[1])))
        if self._padding is not None:
            self._padding = function(self._padding)
            self._note_padding()
        self._epoch[0] += 1

    def _map_rows(self, function: TensorMap, batch_size: int) -> None:
        if not self.is_initialized:
            return
        self._map(function)
        self.batch_size = batch_size
        first, second = (torch.Size((batch_size, *shape[1:])) for shape in self._shapes)
        self._shapes = (first, second)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row `i` what row `beam_idx[i]` was; `beam_idx`: `[B']`, int64."""
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)), beam_idx.numel())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`: `[B']` int64, or a boolean mask `[B]`."""
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        self._map_rows(lambda tensor: tensor.index_select(0, rows.to(tensor.device)), rows.numel())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of each row side by side."""
        if self.is_initialized:
            self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0), self.batch_size * repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens.

        Within the residual window this leaves no trace. A deeper cut dequantizes the rest of the block it falls into;
        these tokens become part of the residual window as attention read them, and are quantized again with whatever
        follows when the window flows over.

        Args:
            tokens_to_remove: Zero or negative. More than there are empties the layer.

        Raises:
            ValueError: The count is positive.
        """
        tokens_to_remove = int(tokens_to_remove)  # `generate` may count on the device
        if tokens_to_remove > 0:
            raise ValueError(
                f"`tokens_to_remove` must be zero or negative, the number of tokens to remove; got {tokens_to_remove}."
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        length = self._length + tokens_to_remove
        if length <= 0:
            self.reset()
            return
        self.prefetch()
        key_store, value_store = self._block_stores()
        body = max(0, length - self._num_sink_slots)
        in_blocks = self.quantized_length
        if body >= in_blocks:
            for window in self._residual:
                window.truncate(body - in_blocks)
        else:
            blocks, rest = divmod(body, self.config.block_length)
            start = length - rest
            kept = [side[:, :, start:length] for side in self.view().dense()] if rest else None
            for store in (key_store, value_store):
                store.truncate(blocks)
            for i, window in enumerate(self._residual):
                if kept is None:
                    window.truncate(0)
                else:
                    window.replace(kept[i])
        if self._sinks is not None and length < self._sinks[0].shape[2]:
            self._sinks = (self._sinks[0][:, :, :length].clone(), self._sinks[1][:, :, :length].clone())
        if self._last_queries is not None:
            self._last_queries.truncate(length)
        elif not self.quantized_length:
            self._last_queries = self._no_queries()
        self._length = length
        self._epoch[0] += 1

    def reset(self) -> None:
        """Forget everything; the layer is as new, also for another batch size or dtype."""
        self._clear()
        self._epoch[0] += 1

    def offload(self) -> None:
        """Move everything stored to the CPU."""
        if self.is_initialized:
            self._map(lambda tensor: tensor.to("cpu", non_blocking=True))
            self._is_away = True

    def prefetch(self) -> None:
        """Bring everything stored back to the layer's device."""
        if self._is_away:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))
            self._is_away = False

    def memory(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by part, and the figures they are compared with, under the names of `MemoryReport`."""
        parts = {"codes": 0, "scales": 0, "zero_points": 0, "sinks": 0, "residual": 0, "unused": 0}
        figures = {"dense_bytes": 0, "values": 0, "quantized_values": 0, "quantized_bytes": 0}
        figures["guarded_layers"] = int(self.is_guarded)
        if self._stores is None:
            return parts, figures
        if self._last_queries is not None:
            queries = self._last_queries.window
            parts["residual"] += queries.bytes_used()
            parts["unused"] += queries.bytes_held() - queries.bytes_used()
        for pair in (self._sinks, self._row_sinks):
            parts["sinks"] += sum(tensor.untyped_storage().nbytes() for tensor in pair or ())
        for side, (store, window) in enumerate(zip(self._stores, self._residual, strict=True)):
            block_parts = store.bytes_by_part()
            for name, size in block_parts.items():
                parts[name] += size
            parts["residual"] += window.bytes_used()
            parts["unused"] += window.bytes_held() - window.bytes_used()
            batch_size, heads, _, head_dim = self._shapes[side]
            values = batch_size * heads * head_dim
            figures["values"] += values * self._length
            figures["dense_bytes"] += values * self._length * self._dtypes[side].itemsize
            if store.spec.is_quantized:
                figures["quantized_values"] += values * self.quantized_length
                figures["quantized_bytes"] += sum(block_parts[name] for name in ("codes", "scales", "zero_points"))
        return parts, figures

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_appender": None}  # addresses mean nothing in a copy

    def __repr__(self) -> str:
        config = self.config
        if not config.is_quantized:
            return "QuantLayer(not quantized)"
        guard = "" if config.outlier_guard is None else f", outlier guard {config.outlier_guard:g}"
        guard += "" if config.attention_guard is None else f", attention guard {config.attention_guard:g}"
        guard += f" widened {config.key.nbits}-bit" * self.is_guarded
        wants_pre = config.key.is_quantized and config.key.rope == "pre"
        order = f"; {self.note}" if wants_pre else "; post-RoPE" if config.key.is_quantized else ""
        text = (
            f"QuantLayer(keys {self.key_spec}{guard}{order}; values {config.value}; {config.sink_length} sinks, "
            f"residual {config.residual_length}"
        )
        return f"{text}; {self._length} tokens, {self.quantized_length} as codes)"
