"""Activations of attention on real text: queries, keys and values as each layer's attention sees them.

Nothing is patched. A model runs with an attention function that is registered with Transformers under a name of its
own, and with a cache that hands keys and values through; both are there for the duration of a call.
"""

from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

from kvquant_hf._compat import cache_kwargs

CAPTURE_NAME = "kvquant_capture"
# Arguments that change what attention computes and that `attend` does not know.
_UNSUPPORTED = ("s_aux", "position_bias", "head_mask", "relative_position")
# Rows of scores that exist at a time.
_QUERY_BLOCK = 128


@dataclass(frozen=True)
class LayerActivations:
    """What the attention of one layer works on, for one window of text.

    Attributes:
        layer_idx: The layer.
        query: `[1, H_q, N, D]` of the last `N` tokens, after the rotary embedding, the model's dtype.
        key: `[1, H_kv, T, D]` of all tokens, likewise.
        value: `[1, H_kv, T, D_v]`.
        mask: `[1, 1|H_q, N, T]`, float, added to the scores; hidden tokens have the lowest number of its dtype.
        scale: Factor of the scores.
        softcap: Scores are squeezed into `±softcap` by a tanh (Gemma 2), or `None`.
    """

    layer_idx: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor
    scale: float
    softcap: float | None = None

    @cached_property
    def visible(self) -> torch.Tensor:
        """Tokens that a query may attend to, boolean, the shape of `mask`."""
        return self.mask > torch.finfo(self.mask.dtype).min / 2

    @cached_property
    def scores(self) -> torch.Tensor:
        """Exact `raw_scores`."""
        return self.raw_scores(self.key)

    @cached_property
    def log_attention(self) -> torch.Tensor:
        """Exact `log_probabilities`."""
        return self.log_probabilities(self.scores)

    @cached_property
    def attention(self) -> torch.Tensor:
        """Exact probabilities `[1, H_q, N, T]`, float32."""
        return self.log_attention.exp()

    @cached_property
    def exact_output(self) -> torch.Tensor:
        """Exact `output`."""
        return self.output(self.attention, self.value)

    def raw_scores(self, key: torch.Tensor) -> torch.Tensor:
        """`scale · q·K` of other keys `[1, H_kv, T, D]`, before cap and mask: `[1, H_q, N, T]`, float32."""
        return _per_group(self.query.float() * self.scale, key.float().transpose(-1, -2))

    def log_probabilities(self, raw_scores: torch.Tensor) -> torch.Tensor:
        """Log of the attention probabilities of scores `[1, H_q, N, T]`; hidden tokens get the lowest numbers."""
        if self.softcap is not None:
            raw_scores = torch.tanh(raw_scores / self.softcap) * self.softcap
        return torch.log_softmax(raw_scores + self.mask.float(), dim=-1)

    def output(self, probabilities: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Sums of values `[1, H_kv, T, D_v]` by probabilities `[1, H_q, N, T]`: `[1, H_q, N, D_v]`, float32."""
        return _per_group(probabilities, value.float())


def _per_group(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`[1, H_q, N, a] @ [1, H_kv, a, b]`, consecutive query heads sharing a key/value head."""
    grouped = rows.unflatten(1, (matrices.shape[1], -1))
    return torch.matmul(grouped, matrices[:, :, None]).flatten(1, 2)


class _PassingCache(DynamicCache):
    """Gives every layer back what it stores and keeps nothing but the last of it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.last: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.last = (layer_idx, key_states, value_states)
        return key_states, value_states


@dataclass
class _Capture:
    cache: _PassingCache
    layers: Collection[int]
    queries: int
    consume: Callable[[LayerActivations], object]
    seen: int = 0


_current: ContextVar[_Capture | None] = ContextVar("kvquant_capture", default=None)


def capture_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the manner of Transformers' `eager`, which shows its inputs to the running `capture`.

    Args:
        module: The attention module.
        query: `[1, H_q, T, D]`.
        key: `[1, H_kv, T, D]`.
        value: `[1, H_kv, T, D_v]`.
        attention_mask: `[1, 1|H_q, T, T]`, additive.
        dropout: Ignored; models are in eval mode.
        scaling: Factor of the scores.
        softcap: See `LayerActivations`.
        kwargs: Further arguments of the attention interface.

    Returns:
        `([1, T, H_q, D_v], None)`.

    Raises:
        RuntimeError: No capture is running.
        ValueError: Attention reads something else than what the cache was given, or has terms unknown here.
    """
    capture = _current.get()
    if capture is None:
        raise RuntimeError(f"Attention {CAPTURE_NAME!r} works only within `kvquant_hf.capture.capture`.")
    named = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if named:
        raise ValueError(f"Attention with {named} cannot be analyzed.")
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(f"Attention must come with a mask to be analyzed, got {attention_mask!r}.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = LayerActivations(-1, query, key, value, attention_mask[..., : key.shape[2]], scale, softcap)
    last, capture.cache.last = capture.cache.last, None
    if last is not None and last[0] in capture.layers:
        if last[1] is not key or last[2] is not value:
            raise ValueError(
                f"Layer {last[0]} attends to other tensors than it stores in the cache (as latent attention does): "
                "errors of the stored ones cannot be followed into its attention."
            )
        capture.seen += 1
        rows = slice(max(0, query.shape[2] - capture.queries), None)
        capture.consume(replace(layer, layer_idx=last[0], **_rows(layer, rows)))
    blocks = []
    for first in range(0, query.shape[2], _QUERY_BLOCK):
        part = replace(layer, **_rows(layer, slice(first, first + _QUERY_BLOCK)))
        blocks.append(part.output(part.log_probabilities(part.raw_scores(key)).exp(), value))
    return torch.cat(blocks, dim=2).to(query.dtype).transpose(1, 2).contiguous(), None


def _rows(layer: LayerActivations, rows: slice) -> dict[str, Any]:
    """The fields of a layer that some of its queries change."""
    return {"query": layer.query[:, :, rows], "mask": layer.mask[:, :, rows]}


def capture(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    layers: Collection[int],
    consume: Callable[[LayerActivations], object],
    queries: int = 128,
) -> None:
    """Run a window of text through a model and hand over the activations of its layers, one after the other.

    Only one layer's activations exist at a time, so `consume` should reduce what it gets to numbers. The model's
    attention implementation is set for the duration of the call.

    Args:
        model: Causal language model in eval mode whose attention goes through Transformers' attention interface.
        input_ids: `[T]`, integer, on the model's device.
        layers: Layers to hand over.
        consume: Called with the `LayerActivations` of each layer, in the model's order.
        queries: Queries to hand over: those of the last tokens.

    Raises:
        ValueError: `queries` is below 1, or a layer's attention cannot be observed.
    """
    if queries < 1:
        raise ValueError(f"`queries` must be an integer >= 1, got {queries!r}.")
    AttentionInterface.register(CAPTURE_NAME, capture_attention_forward)
    # Always an explicit mask: a registered attention without a mask function of its own gets none at all.
    AttentionMaskInterface.register(CAPTURE_NAME, eager_mask)
    cache = _PassingCache(model.config)
    running = _Capture(cache, frozenset(layers), queries, consume)
    before = model.config._attn_implementation
    token = _current.set(running)
    try:
        model.set_attn_implementation(CAPTURE_NAME)
        with torch.no_grad():
            model(input_ids=input_ids[None], use_cache=True, logits_to_keep=1, **cache_kwargs(cache))
    finally:
        _current.reset(token)
        model.set_attn_implementation(before)
    if running.seen != len(running.layers):
        raise ValueError(
            f"{type(model).__name__} showed {running.seen} of the layers {sorted(running.layers)}: its attention does "
            "not go through Transformers' attention interface."
        )
