"""One layer of the cache: exact sinks, blocks of codes, exact residual window, and Transformers' layer contract."""

from typing import Any, cast

import torch
from transformers.cache_utils import CacheLayerMixin

from kvquant_hf import ops
from kvquant_hf.buffers import TensorMap
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.lazy import lazy_pair
from kvquant_hf.padding import fill_row_sinks, without_padding
from kvquant_hf.rope import KeyRotation
from kvquant_hf.storage import BlockStore
from kvquant_hf.view import KVView
from kvquant_hf.window import ExactTokens

# Blocks quantized at a time: bounds the float32 copies made of a long prompt.
_ENCODE_BLOCKS = 64


class QuantLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer.

    Slots `0 … S-1` are kept exact for ever, the newest `R` to `R + L - 1` tokens are exact, and everything between
    lies in blocks of `L` tokens that were quantized once, from exact inputs. The contents depend on the tokens alone,
    not on how calls cut them.

    Args:
        config: Settings of this layer (`KVQuantConfig.for_layer`).
        rotation: The rotary embedding to undo before keys are quantized, or `None` to store them as they come.
        note: What `repr` says about the rotary embedding.
        feedback: `[H_kv, D, D]`: how errors of key channels are made good in others (`QueryMoments.feedback`), or
            `None` to round every number for itself.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(
        self,
        config: KVQuantConfig,
        rotation: KeyRotation | None = None,
        note: str = "",
        feedback: torch.Tensor | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config = config
        self.rotation = rotation if config.key.is_quantized and config.key.rope == "pre" else None
        self.note = note
        self.feedback = feedback
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
        self._rotation_in_use: KeyRotation | None = None
        self.is_initialized = False
        for name in ("batch_size", "device"):
            self.__dict__.pop(name, None)

    # ---- growing -----------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, dtypes and device from the first keys and values `[B, H, t, D]`."""
        for name, states in (("key_states", key_states), ("value_states", value_states)):
            if states.ndim != 4 or not states.is_floating_point():
                raise ValueError(
                    f"`{name}` must be a floating-point tensor [batch, heads, tokens, head_dim], got "
                    f"{list(states.shape)} of {states.dtype}."
                )
        heads, head_dim = key_states.shape[1], key_states.shape[3]
        feedback = self.feedback
        if feedback is not None:
            if tuple(feedback.shape[:2]) != (heads, head_dim):
                raise ValueError(
                    f"`query_moments` has {feedback.shape[0]} heads of size {feedback.shape[1]}, `key_states` has "
                    f"{heads} of size {head_dim} (of a tensor parallel model they cannot be used yet)."
                )
            feedback = feedback.to(key_states.device)
        promotes = self.config.key.promoted and self.rotation is not None
        partners = cast(KeyRotation, self.rotation).partners() if promotes else None
        length = self.config.block_length
        layouts = ops.block_layouts(
            self.config.backend,
            (self.config.key, self.config.value),
            length,
            (key_states.shape[3], value_states.shape[3]),
            self.rotation,
            key_states.device,
        )
        self._stores = (
            BlockStore(self.config.key, length, key_states.shape[3], key_states.dtype, layouts[0], feedback, partners),
            BlockStore(self.config.value, length, value_states.shape[3], value_states.dtype, layouts[1]),
        )
        if self.rotation is not None:
            if self.rotation.head_dim != key_states.shape[3]:
                raise ValueError(
                    f"`key_states` has head size {key_states.shape[3]}, the model's rotary embedding belongs to "
                    f"{self.rotation.head_dim}."
                )
            self._rotation_in_use = self.rotation.for_length(key_states.shape[2])
        self._shapes = (key_states[:, :, :0].shape, value_states[:, :, :0].shape)
        self._dtypes = (key_states.dtype, value_states.dtype)
        self.batch_size = key_states.shape[0]
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values and return what attention should read.

        Args:
            key_states: `[B, H, t, D]`, rotated by the model.
            value_states: `[B, H, t, D_v]`.
            args: Ignored; other versions of Transformers pass more.
            kwargs: Ignored likewise.

        Returns:
            Keys and values of all tokens so far: the arguments themselves where the layer was empty (a prompt attends
            to itself exactly), dense tensors where nothing is quantized, else `LazyKV` stand-ins.

        Raises:
            ValueError: Shapes or dtypes do not continue what is stored. Nothing has changed then.
        """
        if self._append(key_states, value_states):
            return lazy_pair(self.view(key_states.shape[2]))
        is_new = not self.is_initialized
        # What is kept outlives the caller's gradient and inference modes, and has no part in either.
        with torch.inference_mode(False), torch.no_grad():
            try:
                if is_new:
                    self.lazy_initialization(key_states, value_states)
                self._check_states(key_states, value_states)
            except ValueError:
                if is_new:
                    self._clear()
                raise
            self.prefetch()
            was_empty = self._length == 0
            states = (key_states, value_states)
            self._store(states)
        self._epoch[0] += 1
        if was_empty:
            return states
        if not self.config.is_quantized:
            # Both sides are whole in the residual window, as `DynamicCache` would hold them.
            keys, values = (window.view() for window in self._residual)
            return cast(torch.Tensor, keys), cast(torch.Tensor, values)
        return lazy_pair(self.view(key_states.shape[2]))

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Take new tokens into the residual window if that is all there is to do, as in most steps of decoding."""
        length = self._length
        keys, values = self._residual
        if not length or length < self._exact_until or self._is_away or keys.buffer is None or values.buffer is None:
            return False
        if (key_states.requires_grad or value_states.requires_grad) and torch.is_grad_enabled():
            return False
        self._check_states(key_states, value_states)
        tokens = key_states.shape[2]
        held = keys.length
        waiting = held + tokens
        if waiting > self._overflow or waiting > keys.buffer.shape[2] or key_states.device != self.device:
            return False
        if not (tokens == 1 and self._append_one(key_states, value_states)):
            for window, states in zip(self._residual, (key_states, value_states), strict=True):
                cast(torch.Tensor, window.buffer).narrow(2, held, tokens).copy_(states)
        if waiting == self._overflow:
            self._flush_window(waiting)
        else:
            keys.length = values.length = waiting
        self._length = length + tokens
        self._epoch[0] += 1
        return True

    def _append_one(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Copy one token behind those of the residual window, if compiled code can and may."""
        if self.config.backend == "torch":
            return False
        keys, values = self._residual
        if self._appender is None or self._appender.keys is not keys.buffer:
            self._appender = ops.appender(cast(torch.Tensor, keys.buffer), cast(torch.Tensor, values.buffer))
        return self._appender is not None and self._appender.append(key_states, value_states, keys.length)

    def _flush_window(self, waiting: int) -> None:
        """Quantize the oldest block of the residual window, whose buffers hold `waiting` tokens."""
        buffers = [cast(torch.Tensor, window.buffer)[:, :, :waiting] for window in self._residual]
        with torch.inference_mode(False), torch.no_grad():
            self._flush(buffers[0], buffers[1], 1)
            for window in self._residual:
                window.length = waiting
                window.drop_front(self.config.block_length)

    def _check_states(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        tokens = key_states.shape[2] if key_states.ndim == 4 else -1
        for side, (name, states) in enumerate((("key_states", key_states), ("value_states", value_states))):
            batch_size, heads, _, head_dim = self._shapes[side]
            if states.shape == (batch_size, heads, tokens, head_dim) and states.dtype == self._dtypes[side]:
                continue
            if tuple(states.shape) != (batch_size, heads, tokens, head_dim):
                raise ValueError(
                    f"`{name}` must have the shape [{batch_size}, {heads}, tokens, {head_dim}] to continue this "
                    f"cache, got {list(states.shape)}. For another batch size use `batch_repeat_interleave`, "
                    "`batch_select_indices` or a new cache."
                )
            if states.dtype != self._dtypes[side]:
                raise ValueError(f"`{name}` must be of {self._dtypes[side]} like what is stored, got {states.dtype}.")

    def _store(self, states: tuple[torch.Tensor, torch.Tensor]) -> None:
        first = self._length
        tokens = states[0].shape[2]
        body_start = min(tokens, max(0, self._num_sink_slots - first))
        body = tuple(side[:, :, body_start:] for side in states)
        blocks = self._blocks_due(self._residual[0].length + body[0].shape[2])
        if blocks:
            held = self._residual[0].length
            joined = [
                torch.cat([cast(torch.Tensor, window.view()), new], dim=2) if held else new
                for window, new in zip(self._residual, body, strict=True)
            ]
            self._keep_sinks(states, first)
            self._flush(joined[0], joined[1], blocks)
            cut = blocks * self.config.block_length
            for window, side in zip(self._residual, joined, strict=True):
                window.replace(side[:, :, cut:])
        else:
            self._keep_sinks(states, first)
            if body[0].shape[2]:
                for window, new in zip(self._residual, body, strict=True):
                    window.append(new)
        self._length += tokens

    @property
    def _num_sink_slots(self) -> int:
        return self.config.sink_length if self.config.is_quantized else 0

    def _blocks_due(self, waiting: int) -> int:
        """Blocks to be quantized when `waiting` tokens lie in the residual window."""
        if not self.config.is_quantized:
            return 0
        return max(0, (waiting - self.config.residual_length) // self.config.block_length)

    def _keep_sinks(self, states: tuple[torch.Tensor, torch.Tensor], first: int) -> None:
        """Copy what falls on sink slots, `first` being the slot of the first new token."""
        slots = self._num_sink_slots
        if first < slots:
            kept = [side[:, :, : slots - first] for side in states]
            before = [] if self._sinks is None else [side[:, :, :first] for side in self._sinks]
            self._sinks = cast(
                tuple[torch.Tensor, torch.Tensor],
                tuple(
                    torch.cat([before[i], new], dim=2) if before else new.clone(memory_format=torch.contiguous_format)
                    for i, new in enumerate(kept)
                ),
            )
        if self._padding is not None and slots and first < self._exact_until:
            if self._row_sinks is None:
                self._row_sinks = (_zeros(states[0], slots), _zeros(states[1], slots))
            for sinks, side in zip(self._row_sinks, states, strict=True):
                fill_row_sinks(sinks, side, self._padding, first)

    def _flush(self, key_states: torch.Tensor, value_states: torch.Tensor, blocks: int) -> None:
        """Quantize the first `blocks` blocks of `[B, H, ≥ blocks · L, D]` and store them."""
        key_store, value_store = self._block_stores()
        length = self.config.block_length
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

    def _encode(self, store: BlockStore, states: torch.Tensor, slot: int, rotation: KeyRotation | None) -> Any:
        """Codes of whole blocks `[B, H, n · L, D]` that begin at `slot`."""
        length, sinks = self.config.block_length, self._num_sink_slots
        clean = self._padding is None or slot >= self._exact_until
        compiled = store.spec.is_quantized and self.config.backend != "torch"
        if clean and compiled:
            encoded = ops.encode_blocks(store, states, slot, sinks, rotation)
            if encoded is not None:
                return encoded
        batch_size, heads, _, head_dim = states.shape
        blocks = states.reshape(batch_size, heads, -1, length, head_dim)
        if not store.spec.is_quantized:
            return store.encode(blocks)
        blocks = blocks.float()
        if rotation is not None:
            cos, sin = rotation.block_tables(slot, blocks.shape[2], length, blocks.device)
            blocks = rotation.apply(blocks, cos, sin, inverse=True)
        if clean:
            return store.encode(blocks)
        fitted = without_padding(blocks, slot, cast(torch.Tensor, self._padding), sinks)
        if compiled:
            encoded = ops.encode_blocks(store, blocks.flatten(2, 3), slot, sinks, None, fitted.contiguous())
            if encoded is not None:
                return encoded
        return store.encode(blocks, fitted)

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
        if self._stores is None:
            return parts, figures
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
        wants_pre = config.key.is_quantized and config.key.rope == "pre"
        order = f"; {self.note}" if wants_pre else "; post-RoPE" if config.key.is_quantized else ""
        text = (
            f"QuantLayer(keys {config.key}{order}; values {config.value}; {config.sink_length} sinks, "
            f"residual {config.residual_length}"
        )
        return f"{text}; {self._length} tokens, {self.quantized_length} as codes)"


def _zeros(like: torch.Tensor, tokens: int) -> torch.Tensor:
    """Zeros `[B, H, tokens, D]`."""
    return like.new_zeros(*like.shape[:2], tokens, like.shape[3])
