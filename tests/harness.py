"""What the acceptance tests share: cache settings, rolls through a cache, probes and an independent byte counter.

Nothing here reads private state of the package: a test sees a cache only through Transformers' own interface, the
names listed in the README, and the tensors reachable from the object.
"""

import copy
import gc
import inspect
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from transformers import Cache, DynamicCache, LlamaForCausalLM, PreTrainedModel

VOCAB_SIZE = 128
GROUP = 16
RESIDUAL = 16
SINKS = 4

CACHE_KW = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""The argument of `forward` that takes a cache, found by signature."""

GENERATE_KWS = tuple(dict.fromkeys(("past_key_values", CACHE_KW)))
"""The arguments of `generate` that take a cache in this version."""

PASSES_POSITIONS = CACHE_KW == "cache"
"""Whether attention layers hand `position_ids` to `Cache.update` (5.24 does, 5.17 does not)."""


def settings(
    key_bits: int = 4,
    value_bits: int = 4,
    *,
    group: int = GROUP,
    residual: int = RESIDUAL,
    sinks: int = SINKS,
    key: Mapping[str, Any] | None = None,
    value: Mapping[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """A plain settings mapping: keys per channel and pre-RoPE, values per token, changed by `key`, `value`, `top`."""
    return {
        "key": {
            "nbits": key_bits,
            "granularity": "per_channel",
            "group_size": group,
            "rope": "pre",
            "clip": "minmax",
            **(key or {}),
        },
        "value": {
            "nbits": value_bits,
            "granularity": "per_token",
            "group_size": group,
            "clip": "minmax",
            **(value or {}),
        },
        "residual_length": residual,
        "sink_length": sinks,
        **top,
    }


Q = settings()
"""Q-mode: K4/V4, group 16, residual 16, sinks 4."""

LOSSLESS: dict[str, dict[str, Any]] = {
    "long-residual": settings(residual=4096),
    "16-bit": settings(16, 16),
    "16-bit-no-residual": settings(16, 16, residual=0),
}
"""L-modes: nothing is quantized, by a window longer than the run or by 16-bit storage."""

each_lossless = pytest.mark.parametrize("lossless", list(LOSSLESS.values()), ids=list(LOSSLESS))
each_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def quant_cache(model: Any, quant: Any = Q, **overrides: Any) -> Any:
    """A `QuantCache` for a model or a config; imported late, so that the harness itself works without the package."""
    from kvquant_hf import QuantCache

    return QuantCache(getattr(model, "config", model), quant, **overrides)


def dynamic_cache(model: PreTrainedModel) -> DynamicCache:
    """The unquantized reference."""
    return DynamicCache(config=model.config)


def block_length(quant: Mapping[str, Any]) -> int:
    """Tokens per block by the documented rule: the longest group that runs along tokens."""
    specs = [quant["key"], quant["value"]]
    return max(spec["group_size"] for spec in specs if spec["granularity"] == "per_channel" and spec["nbits"] < 16)


def expected_quantized(length: int, *, group: int = GROUP, residual: int = RESIDUAL, sinks: int = SINKS) -> int:
    """Tokens held as codes after `length` tokens: whole blocks beyond sinks and the promised window."""
    return max(0, length - sinks - residual) // group * group


# ---------------------------------------------------------------- tokens and forwards


def random_ids(batch_size: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids in [3, 128), shape `[batch_size, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (batch_size, length), generator=generator)


def left_pad(ids: torch.Tensor, pads: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put pad token 0 on the first `pads[r]` slots of row r; returns ids and mask of the same shape."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return ids, mask


def positions(mask: torch.Tensor, length: int | None = None) -> torch.Tensor:
    """Position ids as `generate` derives them from a mask; the last `length` of them."""
    ids = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return ids if length is None else ids[:, -length:]


def model_or_skip(family: str, attention: str, **overrides: Any) -> PreTrainedModel:
    """A tiny model with an attention implementation; skips where Transformers has none for the family."""
    try:
        return tiny_model(family, attn_implementation=attention, **overrides)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        pytest.skip(f"Transformers has no {attention} attention for {family}")


def steady_model(family: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A tiny model of one layer in float64, for comparing what two runs quantize.

    Its keys and values depend on token and position alone, and rounding is far too small to tip a code from one level
    to the next, whatever the shapes of the two runs are.
    """
    return tiny_model(family, **{"num_hidden_layers": 1, **overrides}).double()


@torch.no_grad()
def forward(
    model: PreTrainedModel, ids: torch.Tensor, cache: Cache | None, mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Logits `[B, len, V]` in fp32 of one forward; `mask` covers the stored tokens as well."""
    if mask is not None:
        kwargs.setdefault("attention_mask", mask)
        if "position_ids" in inspect.signature(model.forward).parameters:
            kwargs.setdefault("position_ids", positions(mask, ids.shape[1]))
    if cache is not None:
        kwargs[CACHE_KW] = cache
    return model(ids, use_cache=cache is not None, **kwargs).logits.float()


@torch.no_grad()
def fed(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, cut: int) -> torch.Tensor:
    """Logits `[B, V]` after the last of `ids`, which are fed `cut` tokens at a time."""
    for piece in ids.split(cut, dim=1):
        logits = model(input_ids=piece, use_cache=True, **{CACHE_KW: cache}).logits
    return logits[:, -1]


def roll(
    model: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    steps: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Prefill `ids`, then feed `steps` one token at a time; last-position logits `[B, 1 + steps, V]`."""
    logits = [forward(model, ids, cache, mask)[:, -1:]]
    for index in range(steps.shape[1]):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        logits.append(forward(model, steps[:, index : index + 1], cache, mask)[:, -1:])
    return torch.cat(logits, dim=1)


def kl(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """Mean KL(reference || candidate) in nats over all leading dimensions of two logit tensors."""
    p, q = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4, what: str = "logits") -> None:
    """Largest absolute difference at most `atol`, and everything finite."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    gap = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    assert gap <= atol, f"{what}: largest difference {gap:.3g}, allowed {atol:.3g}"


def scored_chunk(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, prefill: int, step: int) -> torch.Tensor:
    """Teacher forcing through the cache: prefill, then chunks of `step` tokens; logits at the scored positions."""
    forward(model, ids[:, :prefill], cache)
    chunks = ids[:, prefill:].split(step, dim=1)
    return torch.cat([forward(model, chunk, cache) for chunk in chunks], dim=1)


# ---------------------------------------------------------------- what a cache holds


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor with the values of `tensor`, which may be lazy."""
    dense = torch.add(tensor, 0).clone()
    assert type(dense) is torch.Tensor, f"an operation on a lazy tensor returned a {type(dense).__name__}"
    return dense


def probe(model: PreTrainedModel, cache: Cache, token: torch.Tensor | None = None, **kwargs: Any) -> list[Any]:
    """`(keys, values)` per layer that attention receives in the next decode step; `cache` itself is not changed."""
    spied, seen = copy.deepcopy(cache), {}
    original = spied.update

    def update(key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kw: Any) -> Any:
        keys, values = original(key_states, value_states, layer_idx, *args, **kw)
        seen[layer_idx] = (plain(keys), plain(values))
        return keys, values

    spied.update = update  # type: ignore[method-assign]
    if token is None:
        batch_size = next(layer_batch(layer) for layer in cache.layers if layer.get_seq_length() > 0)
        token = torch.full((batch_size, 1), 7)
    forward(model, token, spied, **kwargs)
    return [seen[index] for index in sorted(seen)]


def layer_batch(layer: Any) -> int:
    """Batch size of an initialized cache layer, whatever its class."""
    for name in ("batch_size", "keys"):
        value = getattr(layer, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, torch.Tensor) and value.numel() > 0:
            return value.shape[0]
    for _, tensor in tensors_of(layer):
        if tensor.ndim >= 3:
            return tensor.shape[0]
    raise AssertionError(f"{type(layer).__name__} holds no tensors")


def exact_tokens(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4) -> torch.Tensor:
    """Which tokens of `[B, H, T, D]` agree in every row, head and channel: bool `[T]`."""
    return ((actual - expected).abs().amax(dim=(0, 1, 3))) < atol


def feed(
    cache: Any, keys: torch.Tensor, values: torch.Tensor, cuts: Iterable[int] | None = None, layer_idx: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hand `[B, H, T, D]` tensors to one layer of a cache in calls of `cuts` tokens; what the last call returned."""
    cuts = [keys.shape[2]] if cuts is None else list(cuts)
    assert sum(cuts) == keys.shape[2], f"cuts {cuts} do not add up to {keys.shape[2]} tokens"
    start, out = 0, (keys, values)
    for cut in cuts:
        part = slice(start, start + cut)
        out = cache.update(keys[:, :, part].clone(), values[:, :, part].clone(), layer_idx)
        start += cut
    return out


def random_states(
    batch_size: int, num_heads: int, length: int, key_dim: int, value_dim: int | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ~ N(0, 1), fp32."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, num_heads, length)
    keys = torch.randn(*shape, key_dim, generator=generator)
    return keys, torch.randn(*shape, value_dim or key_dim, generator=generator)


_OPAQUE = (type, types.ModuleType, types.FrameType, types.CodeType, torch.nn.Module, torch.device, torch.dtype)


def tensors_of(root: Any) -> Iterable[tuple[int, torch.Tensor]]:
    """Every tensor reachable from `root` through attributes, slots, containers, closures and bound methods."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, _OPAQUE):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield id(item), item
        if isinstance(item, types.FunctionType):  # not its globals: those are the module
            stack += [*(cell.cell_contents for cell in item.__closure__ or ()), *(item.__defaults__ or ())]
        else:
            stack += gc.get_referents(item)


def reachable_storages(root: Any) -> dict[int, int]:
    """`{data pointer: bytes}` of every distinct buffer reachable from `root`, found without the package's help.

    Counts tensor storages, numpy arrays and byte strings of more than 256 bytes. A lazy wrapper has no buffer of its
    own; what it refers to is followed.
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, _OPAQUE):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if type(item) is torch.Tensor or type(item) is torch.nn.Parameter:
                storage = item.untyped_storage()
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, np.ndarray):
            base = item if item.base is None else item.base
            found[id(base)] = getattr(base, "nbytes", item.nbytes)
        elif isinstance(item, bytes | bytearray) and len(item) > 256:
            found[id(item)] = len(item)
        if isinstance(item, types.FunctionType):
            stack += [*(cell.cell_contents for cell in item.__closure__ or ()), *(item.__defaults__ or ())]
        else:
            stack += gc.get_referents(item)
    return found


def reachable_bytes(root: Any) -> int:
    """Bytes of all distinct buffers reachable from `root`."""
    return sum(reachable_storages(root).values())


def assert_reported_bytes(cache: Any, tolerance: float = 0.01) -> None:
    """The memory report adds up and equals what is reachable from the cache."""
    report = cache.memory_report()
    parts = ("codes", "scales", "zero_points", "sinks", "residual", "unused", "other_layers")
    assert all(getattr(report, part) >= 0 for part in parts), report
    assert sum(getattr(report, part) for part in parts) == report.total_bytes, report
    assert report.shards == 1, report  # one process holds all heads
    held = reachable_bytes(cache)
    # A handful of numbers per layer (rotation frequencies) is no part of the cache's contents.
    allowed = max(tolerance * held, 64 * len(cache.layers))
    assert abs(held - report.total_bytes) <= allowed, f"held {held}, reported {report.total_bytes}\n{report}"


def assert_lengths(cache: Any, length: int) -> None:
    """One truth about the length, in every way of asking, for every full-attention layer."""
    assert cache.get_seq_length() == length
    for index, layer in enumerate(cache.layers):
        assert cache.get_seq_length(index) == length, f"layer {index}"
        if getattr(layer, "is_sliding", False):
            continue
        for query_length in (1, 3):
            assert cache.get_mask_sizes(query_length, index) == (length + query_length, 0), f"layer {index}"


def stored(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`cache.dequantize` of every layer."""
    return [cache.dequantize(index) for index in range(len(cache.layers))]


def assert_same_content(actual: Any, expected: Any, atol: float = 0.0) -> None:
    """Both caches hold the same lengths, the same number of coded tokens and the same values."""
    assert len(actual.layers) == len(expected.layers)
    for index in range(len(expected.layers)):
        assert actual.quantized_length(index) == expected.quantized_length(index), f"layer {index}"
        for name, mine, theirs in zip(
            ("keys", "values"), actual.dequantize(index), expected.dequantize(index), strict=True
        ):
            assert_close(mine, theirs, atol, f"layer {index} {name}")
