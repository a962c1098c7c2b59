"""What a quantized cache costs beside its attention kernel: per step and layer, and per prompt."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _timing import Clock, Sample, computes_alone, in_turn, take
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvquant_hf import KVQuantConfig, QuantCache
from kvquant_hf.layer import QuantLayer

# Blocks and window tokens of the smallest of the three histories, and by how much the others are larger.
_BLOCKS, _MORE_BLOCKS, _WIDER = 4, 64, 128


@dataclass(frozen=True)
class Overhead:
    """Time of a cache per layer and decode step, microseconds; processor time where one CPU thread does all the work.

    Attributes:
        overhead: Update, flush and dispatch: the whole step, extrapolated to an empty history.
        flush: Of this, quantizing and packing a block, spread over the steps between two.
        step: The whole step at a short history, attention included.
        history: Tokens of that history.
        block_token: Attention over one more token of the blocks.
        window_token: Attention over one more token of the residual window.
    """

    overhead: float
    flush: float
    step: float
    history: int
    block_token: float
    window_token: float


def cache_overhead(
    model: PreTrainedModel, config: KVQuantConfig, dense: DynamicCache, cycles: int = 6, clock: Clock | None = None
) -> Overhead:
    """Measure the cache alone, without the model around it.

    Steps of `update` and attention are timed on all layers over three histories: a short one, one with more blocks
    and one with a wider residual window. The differences give the cost of attention per token; taking it off for every
    token of the short history leaves what a step costs before any token is read. Whole cycles from flush to flush are
    timed; each step of a cycle counts with the median over cycles.

    Args:
        model: Its config and number of layers are used, no weights.
        config: Settings; the same for all layers.
        dense: Any filled cache of the model: shapes, dtypes and device are taken from it.
        cycles: Cycles that are timed.
        clock: Where times come from.
    """
    length, wide = config.block_length, config.residual_length + _WIDER
    caches = {
        "short": _filled(model, config, dense, _BLOCKS),
        "blocks": _filled(model, config, dense, _BLOCKS + _MORE_BLOCKS),
        "window": _filled(model, config.replace(residual_length=wide), dense, _BLOCKS),
    }
    steps = {name: _step(model, cache, dense) for name, cache in caches.items()}
    in_turn(steps, length, clock=clock)  # compilation, tables, and the first flush
    taken = in_turn(steps, length * cycles, clock=clock)
    layers = len(_quantized(caches["short"]))
    alone = computes_alone(model.device)
    phases = {name: _per_phase(samples, length, alone, 1e6 / layers) for name, samples in taken.items()}
    mean = {name: statistics.fmean(times) for name, times in phases.items()}
    block_token = (mean["blocks"] - mean["short"]) / (_MORE_BLOCKS * length)
    window_token = (mean["window"] - mean["short"]) / _WIDER
    # Means over the cycles timed: one block came before them, and one comes with the last step of each.
    in_blocks = length * (_BLOCKS + 1 + (cycles - 1) / 2) + 1
    in_window = config.sink_length + config.residual_length + (length - 1) / 2
    short = phases["short"]
    return Overhead(
        overhead=mean["short"] - block_token * in_blocks - window_token * in_window,
        flush=mean["short"] - statistics.median(short),
        step=mean["short"],
        history=round(in_blocks + in_window),
        block_token=block_token,
        window_token=window_token,
    )


def _per_phase(samples: list[Sample], length: int, alone: bool, factor: float) -> list[float]:
    """Median over cycles of each step of a cycle."""
    return [factor * statistics.median(sample.busy(alone) for sample in samples[i::length]) for i in range(length)]


def _quantized(cache: QuantCache) -> list[int]:
    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, QuantLayer)]


def _filled(model: PreTrainedModel, config: KVQuantConfig, dense: DynamicCache, blocks: int) -> QuantCache:
    """A cache with some blocks and a window that is just full: the next flush is `block_length` steps away."""
    cache = QuantCache(model, config)
    tokens = config.sink_length + config.residual_length + blocks * config.block_length
    for layer_idx in _quantized(cache):
        cache.update(*_states(dense, layer_idx, tokens), layer_idx)
    return cache


def _step(model: PreTrainedModel, cache: QuantCache, dense: DynamicCache) -> Callable[[int], None]:
    """One decode step of all layers without the model: update, and attention as Transformers calls it."""
    states = {layer_idx: _states(dense, layer_idx, 1) for layer_idx in _quantized(cache)}
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    queries = {i: _random(pair[0], heads, 1) for i, pair in states.items()}
    where = torch.zeros(1, 1, dtype=torch.int64, device=next(iter(queries.values())).device)

    @torch.no_grad()
    def step(_: int) -> None:
        for layer_idx, (key_states, value_states) in states.items():
            keys, values = cache.update(key_states, value_states, layer_idx, kwargs={"position_ids": where})
            F.scaled_dot_product_attention(queries[layer_idx], keys, values, enable_gqa=True)

    return step


def _states(dense: DynamicCache, layer_idx: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    layer: Any = dense.layers[layer_idx]
    keys, values = (_random(side, side.shape[1], tokens) for side in (layer.keys, layer.values))
    return keys, values


def _random(like: torch.Tensor, heads: int, tokens: int) -> torch.Tensor:
    """Random `[B, heads, tokens, D]` of the batch, head size, dtype and device of `like`."""
    return torch.randn(like.shape[0], heads, tokens, like.shape[3], device=like.device).to(like.dtype)


@dataclass(frozen=True)
class Prefill:
    """A prompt fed at once; processor time where one CPU thread does all the work.

    Attributes:
        tokens: Its tokens.
        seconds: The model with this cache.
        dense_seconds: The model with `DynamicCache`.
        store_seconds: Handing the prompt's keys and values to this cache, all layers: quantizing, packing, copying.
        share: `store_seconds` over `dense_seconds`.
    """

    tokens: int
    seconds: float
    dense_seconds: float
    store_seconds: float
    share: float


def prefill_costs(
    makers: Mapping[str, Callable[[], Cache]],
    run: Callable[[Cache], object],
    model: PreTrainedModel,
    tokens: int,
    *,
    repeats: int = 5,
    clock: Clock | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Prefill]:
    """Time a prompt with the dense cache and with others, and the storing alone.

    Args:
        makers: Makers of the other caches by name.
        run: Feeds the prompt at once.
        model: The model.
        tokens: Tokens of the prompt.
        repeats: Times that storing is timed; the median counts.
        clock: Where times come from.
        progress: Called with 1 after each prompt.
    """
    clock, alone = clock or Clock(), computes_alone(model.device)
    dense = DynamicCache(config=model.config)
    caches: dict[str, Cache] = {"": dense, **{name: make() for name, make in makers.items()}}
    seconds = {}
    for name, cache in caches.items():
        seconds[name] = take(partial(run, cache), clock).busy(alone)
        if progress is not None:
            progress(1)
    layers: list[Any] = list(dense.layers)

    def store(fresh: list[Cache], _: int) -> None:
        cache = fresh.pop()
        for layer_idx, layer in enumerate(layers):
            cache.update(layer.keys, layer.values, layer_idx)

    # Made beforehand: a cache looks the model's rotary embedding up when it is made.
    steps = {name: partial(store, [make() for _ in range(repeats)]) for name, make in makers.items()}
    taken = in_turn(steps, repeats, clock=clock)
    stored = {name: statistics.median(sample.busy(alone) for sample in samples) for name, samples in taken.items()}
    dense_seconds = seconds[""]
    return {
        name: Prefill(tokens, seconds[name], dense_seconds, stored[name], stored[name] / dense_seconds)
        for name in makers
    }
