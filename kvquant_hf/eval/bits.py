"""Bits per value that a cache really holds, whatever class it is of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvquant_hf._compat import cache_kwargs
from kvquant_hf.cache import QuantCache


@dataclass(frozen=True)
class HeldBits:
    """What a cache holds at one moment.

    Attributes:
        bits_per_value: All bytes held over the numbers (key and value elements) held, bits.
        bits_per_value_quantized: The same for the part stored as codes, with its metadata; `None` where nothing is.
        memory_bytes: All bytes held.
    """

    bits_per_value: float
    bits_per_value_quantized: float | None
    memory_bytes: int


def storage_bytes(root: object) -> int:
    """Bytes of the distinct tensor storages reachable from `root`.

    A view counts its whole storage, once: that is what it keeps alive. Tensor subclasses that wrap other tensors
    (those of optimum-quanto) count what they wrap.
    """
    storages: dict[int, int] = {}
    for tensor in _tensors(root, set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type)) or id(value) in seen:
        return
    seen.add(id(value))
    parts: list[object] = []
    if isinstance(value, torch.Tensor):
        inner = vars(value) if type(value) is not torch.Tensor else {}
        wrapped = [part for part in inner.values() if isinstance(part, torch.Tensor)]
        if not wrapped:
            yield value
        parts.extend(wrapped)
    elif isinstance(value, dict):
        parts.extend(value.values())
    elif isinstance(value, (list, tuple, set)):
        parts.extend(value)
    elif hasattr(value, "__dict__"):
        parts.extend(vars(value).values())
    for part in parts:
        yield from _tensors(part, seen)


def held_bits(cache: Cache) -> HeldBits:
    """Bits held by a `QuantCache`, Transformers' `DynamicCache` or its `QuantizedCache`.

    Raises:
        ValueError: The cache is empty.
    """
    if isinstance(cache, QuantCache):
        report = cache.memory_report()
        if not report.values:
            raise ValueError("`cache` must hold tokens, it is empty.")
        return HeldBits(
            report.bits_per_value,
            report.bits_per_value_quantized if report.quantized_tokens else None,
            report.total_bytes,
        )
    size, values, code_bytes, coded = storage_bytes(cache), 0, 0, 0
    layers: list[Any] = list(cache.layers)
    for layer in layers:
        if not isinstance(getattr(layer, "keys", None), torch.Tensor):
            continue  # not filled yet, or a kind of layer that keeps no keys
        exact = layer.keys.numel() + layer.values.numel()
        codes = [getattr(layer, name, None) for name in ("_quantized_keys", "_quantized_values")]
        if codes[0] is None:
            values += exact
            continue
        held = _quantized_values_of(layer)
        values += exact + held
        code_bytes += storage_bytes(codes)
        coded += held
    if not values:
        raise ValueError("`cache` must hold tokens, it is empty.")
    return HeldBits(8 * size / values, 8 * code_bytes / coded if coded else None, size)


def _quantized_values_of(layer: Any) -> int:
    """Numbers that a layer of Transformers' `QuantizedCache` holds as codes."""
    both = (layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values))
    return sum(tensor.numel() for tensor in both)


def replayed_bits(
    make_cache: Callable[[], Cache],
    shapes: list[tuple[int, int, int] | None],
    pieces: list[tuple[int, int]],
    dtype: torch.dtype,
) -> HeldBits:
    """Bits that a cache holds after one row of tokens of type `dtype` went into it.

    Scores are measured in float32 to be exact, in which an unquantized number would count 32 bits; what matters is
    the cache of a 16-bit model. Bytes do not depend on the numbers, so random ones are fed; with a guard they
    do, see `as_decided`.

    Args:
        make_cache: Makes an empty cache.
        shapes: `(num_kv_heads, key_dim, value_dim)` of each layer, `None` for one without keys and values.
        pieces: Bounds `(first, end)` of the tokens of each update, as `Protocol.pieces` gives them.
        dtype: Type of the keys and values.
    """
    cache = make_cache()
    generator = torch.Generator().manual_seed(0)
    for first, end in pieces:
        for layer_idx, shape in enumerate(shapes):
            if shape is None:
                continue
            heads, key_dim, value_dim = shape
            key_states = torch.randn(1, heads, end - first, key_dim, generator=generator).to(dtype)
            value_states = torch.randn(1, heads, end - first, value_dim, generator=generator).to(dtype)
            cache.update(key_states, value_states, layer_idx)
    return held_bits(cache)


def as_decided(
    make_cache: Callable[[], Cache], model: PreTrainedModel, window: torch.Tensor, pieces: list[tuple[int, int]]
) -> Callable[[], Cache]:
    """A maker of caches whose guards have decided as they do on a text, for `replayed_bits`.

    Args:
        make_cache: Makes an empty cache; what it makes comes back as it is where no layer has a guard.
        model: Causal language model in eval mode.
        window: `[context]`, integer, on the model's device.
        pieces: Bounds `(first, end)` of the tokens of each call, as `Protocol.pieces` gives them.
    """
    cache = make_cache()
    if not isinstance(cache, QuantCache):
        return make_cache
    layers = {index: cache.quantized_layer(index) for index in cache.quantized_layers}
    layers = {index: layer for index, layer in layers.items() if layer.config.has_guard}
    if not layers:
        return make_cache
    for first, end in pieces:
        with torch.no_grad():
            model(input_ids=window[None, first:end], use_cache=True, logits_to_keep=1, **cache_kwargs(cache))
        if all(layer.quantized_length for layer in layers.values()):
            break

    def make() -> Cache:
        decided = cast(QuantCache, make_cache())
        for index, layer in layers.items():
            other = decided.quantized_layer(index)
            other.config = replace(other.config.without_guards(), key=layer.key_spec)
            other.reset()
        return decided

    return make


def layer_shapes(cache: Cache) -> list[tuple[int, int, int] | None]:
    """`(num_kv_heads, key_dim, value_dim)` of each layer of a filled `DynamicCache`; `None` where it holds neither."""
    shapes: list[tuple[int, int, int] | None] = []
    layers: list[Any] = list(cache.layers)
    for layer in layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.ndim == 4:
            shapes.append((keys.shape[1], keys.shape[-1], values.shape[-1]))
        else:
            shapes.append(None)
    return shapes


def model_shapes(model: PreTrainedModel) -> list[tuple[int, int, int] | None]:
    """`layer_shapes` of what a model keeps, found by running it on two tokens."""
    dense = DynamicCache(config=model.config)
    with torch.no_grad():
        model(
            input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=True, **cache_kwargs(dense)
        )
    return layer_shapes(dense)
