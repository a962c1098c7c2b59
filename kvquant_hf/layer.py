"""How a layer of the cache grows: new tokens into sinks and residual window, and from there into blocks."""

from functools import partial
from typing import Any, cast

import torch

from kvquant_hf import ops
from kvquant_hf.block_layer import BlockLayer
from kvquant_hf.last_queries import by_token
from kvquant_hf.lazy import lazy_pair, watched_pair
from kvquant_hf.padding import fill_row_sinks
from kvquant_hf.rotation import check_head_groups
from kvquant_hf.view import KVView


class QuantLayer(BlockLayer):
    """Keys and values of one full-attention layer.

    Slots `0 … S-1` are kept exact for ever, the newest `R` to `R + L - 1` tokens are exact, and everything between
    lies in blocks of `L` tokens that were quantized once, from exact inputs. The contents depend on the tokens alone,
    not on how calls cut them.

    See `StoredLayer` for the arguments.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, dtypes and device from the first keys and values `[B, H, t, D]`."""
        for name, states in (("key_states", key_states), ("value_states", value_states)):
            if states.ndim != 4 or not states.is_floating_point():
                raise ValueError(
                    f"`{name}` must be a floating-point tensor [batch, heads, tokens, head_dim], got "
                    f"{list(states.shape)} of {states.dtype}."
                )
        for spec in (self.config.key, self.config.value):
            if spec.is_quantized:
                check_head_groups(spec.rotation, key_states.shape[1], self._whole_heads)
        self._open_stores(key_states, value_states, self.config.key)
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
            to itself exactly), dense tensors where nothing is quantized, else `LazyKV` stand-ins. While
            `attention_guard` waits for queries, `LazyKV` also stands for the arguments themselves.

        Raises:
            ValueError: Shapes or dtypes do not continue what is stored. Nothing has changed then.
        """
        if self._append(key_states, value_states):
            return lazy_pair(self.view(key_states.shape[2]))
        is_new = not self.is_initialized
        needs_grad = _needs_grad((key_states, value_states))
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
            watches = self._wants_queries(key_states) and not needs_grad
            self._store(states, waits=watches)
        self._epoch[0] += 1
        if watches:
            slot, tokens = self._length - key_states.shape[2], key_states.shape[2]
            show = partial(self._see, slot, tokens, self._epoch[0])
            return watched_pair(self.view(tokens), show, states if was_empty else None)
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
        if _needs_grad((key_states, value_states)):
            return False
        self._check_states(key_states, value_states)
        if self._wants_queries(key_states):
            return False
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

    def _wants_queries(self, states: torch.Tensor) -> bool:
        """Whether the attention guard judges by queries of some of these new tokens `[B, H, t, D]`."""
        return self._last_queries is not None and self._last_queries.wants(self._length, states.shape[2])

    def _see(
        self, slot: int, tokens: int, epoch: int, query: torch.Tensor | None, scale: float | None
    ) -> KVView | None:
        """Take the queries of the `tokens` tokens from `slot` on, and quantize what waited for them.

        Args:
            slot: Slot of the first of them.
            tokens: Tokens of the update.
            epoch: The layer's counter of changes after it.
            query: What attention asked, `None` where it did not show.
            scale: Factor of the scores, `None` for that of the model.

        Returns:
            The layer as attention should read it; `None`, and nothing happens, where it has changed since.
        """
        if self._epoch[0] != epoch:
            return None
        with torch.inference_mode(False), torch.no_grad():
            self.prefetch()
            found = None if query is None else by_token(query.detach(), self._shapes[0], tokens)
            if found is not None and self._last_queries is not None:
                own = found.shape[3] ** -0.5 if self._scaling is None else self._scaling
                self._last_queries.take(found, slot, own if scale is None else scale)
            blocks = self._blocks_due(self._residual[0].length)
            if blocks:
                held = [cast(torch.Tensor, window.view()) for window in self._residual]
                self._flush(held[0], held[1], blocks)
                for window, side in zip(self._residual, held, strict=True):
                    window.replace(side[:, :, blocks * self.config.block_length :].clone())
        self._epoch[0] += 1
        return self.view(tokens)

    def _store(self, states: tuple[torch.Tensor, torch.Tensor], waits: bool) -> None:
        first = self._length
        tokens = states[0].shape[2]
        body_start = min(tokens, max(0, self._num_sink_slots - first))
        body = tuple(side[:, :, body_start:] for side in states)
        blocks = self._blocks_due(self._residual[0].length + body[0].shape[2])
        if blocks and not waits:
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


def _zeros(like: torch.Tensor, tokens: int) -> torch.Tensor:
    """Zeros `[B, H, tokens, D]`."""
    return like.new_zeros(*like.shape[:2], tokens, like.shape[3])


def _needs_grad(states: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(side.requires_grad for side in states)
