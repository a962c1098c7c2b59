"""Finds which rotation a model applies to its keys, by running the model's own code without its weights.

A shell of the decoder is built from the config with its weights on the meta device, and run on a few positions. Every
product with such a weight is replaced by a fixed vector, the same at every position, so each layer hands the cache one
key that is rotated by its position alone: `key[t] = R_t key[0]`. Pairing, width and offset follow from the recorded
keys; no list of model names is needed, and models that bring their own code are treated alike.

Frequencies are those of the shell's `inv_freq` buffers, which the model computes from the config, where one of them
reproduces the keys, and are measured from the keys otherwise (GPT-J keeps tables instead of frequencies).

Two cases need a word. Dynamic NTK scaling changes its frequencies once a sequence outgrows the model's maximum: the
table for sequences within the maximum is used throughout. Keys that are scaled per channel after the rotation (a norm
on rotated keys) are not one rotated vector any more: norm weights are random in the shell, so such a layer comes out
as not established.
"""

import copy
import inspect
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, DynamicCache, PreTrainedConfig, PreTrainedModel

from kvquant_hf.rope import KeyRotation, Pairing

logger = logging.getLogger(__name__)

# A frequency measured up to one position predicts the phase at the next one to well within a turn.
_POSITIONS = (0, 1, 2, 5, 17, 80, 400, 1000)
_PAIRINGS: dict[Pairing, str] = {"half": "half-split pairs", "interleaved": "interleaved pairs"}
_CONSTANT_TOLERANCE = 1e-5  # smaller changes, relative to the largest entry, are rounding
_FIT_TOLERANCE = 1e-4  # largest relative error of a rotation that is taken for the model's
_TABLE_ELEMENTS = 1 << 20  # a larger tensor of constants is a weight, not a table
_MANY_ELEMENTS = 1 << 20  # operands that keys of a few tokens do not reach
_CONSTANTS = 1 << 17
_CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value")
_RESULTS_KEPT = 32


@dataclass(frozen=True)
class LayerRope:
    """What is known about the rotation of one layer's keys.

    Attributes:
        rotation: The rotation to undo before quantization, or `None` where keys are stored as they come.
        reason: One line for reports: what was found, or why nothing was.
        established: Whether the model's own code confirmed the answer; also true when it confirmed that there is
            nothing to undo.
    """

    rotation: KeyRotation | None
    reason: str
    established: bool


_results: OrderedDict[tuple[type, type | None, str], tuple[LayerRope, ...]] = OrderedDict()


def find_rotations(config_or_model: PreTrainedConfig | nn.Module) -> list[LayerRope]:
    """The rotation of the keys of every decoder layer.

    Of a model that is given only the class is used. Config, model and random state stay as they are, and results are
    remembered by config.

    Args:
        config_or_model: Config or model; of a composite one the text decoder is examined.

    Returns:
        One `LayerRope` for each of the decoder's `num_hidden_layers`. Where the model's code cannot be run, or its
        keys fit no rotation, the entries say so: an unusual model is no error. Rotations are shared between layers
        and calls.

    Raises:
        TypeError: The argument neither is a config nor has one.
    """
    model = None if isinstance(config_or_model, PreTrainedConfig) else config_or_model
    config = getattr(config_or_model, "config", None) if model is not None else config_or_model
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            "`config_or_model` must be a `PreTrainedConfig` or a model whose `config` is one, got "
            f"{type(config_or_model).__name__}."
        )
    config = config.get_text_config(decoder=True)
    own_class = _class_in_model(model, config)
    key = (type(config), own_class, config.to_json_string(use_diff=False))
    if key not in _results:
        _results[key] = tuple(_examine(config, own_class))
        if len(_results) > _RESULTS_KEPT:
            _results.popitem(last=False)
    return list(_results[key])


def _examine(config: PreTrainedConfig, own_class: type[PreTrainedModel] | None) -> list[LayerRope]:
    num_layers = int(config.num_hidden_layers)
    try:
        layers = _classify(num_layers, config, _Shell(config, own_class or _registered_class(config)))
    # Code of an arbitrary model runs here and may raise anything; every layer reports the outcome.
    except Exception as error:
        layers = [_not_established(_describe(error))] * num_layers
    doubts = sorted({layer.reason for layer in layers if not layer.established})
    if doubts:
        logger.warning("Rotary embedding of %s: %s.", type(config).__name__, "; ".join(doubts))
    return layers


def _not_established(why: str) -> LayerRope:
    return LayerRope(None, f"pairing not established: {why}; stored post-RoPE", False)


def _describe(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"the probe raised {type(error).__name__}({lines[0][:120]})"


def _class_in_model(model: object, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Class of the decoder inside `model` that `config` belongs to: a body without a head where there is one."""
    if not isinstance(model, nn.Module):
        return None
    classes = [type(m) for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config]
    bodies = [found for found in classes if not found.can_generate()]
    return (bodies or classes or [None])[0]


def _registered_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise LookupError(f"no model class is registered for {type(config).__name__}, pass the model")


# ---- classification of recorded keys


def _classify(num_layers: int, config: PreTrainedConfig, shell: "_Shell") -> list[LayerRope]:
    """One verdict per layer from a run of the shell, and from longer runs where frequencies may depend on length."""
    lengths = _original_lengths(config)
    limit = min([*lengths, getattr(config, "max_position_embeddings", None) or max(_POSITIONS) + 1])
    run = shell.run([p for p in _POSITIONS if p < limit])
    rotations: list[KeyRotation] = []
    layers = [_verdict(run, layer_idx, rotations) for layer_idx in range(num_layers)]
    for length in lengths:
        # The position that makes the sequence longer than `length` triggers the change and is not looked at.
        layers = _add_long_tables(layers, shell.run([*run.positions, length]), length)
    if any(layer.rotation is not None for layer in layers):
        no_rope = LayerRope(None, "NoPE layer", True)
        layers = [no_rope if layer.reason == _NO_ROPE.reason else layer for layer in layers]
    return layers


_NO_ROPE = LayerRope(None, "no rotary embedding", True)
_ROTATED_VALUES = LayerRope(None, "keys not rotated (the rotation is in the second tensor of the cache)", True)
_NO_KEYS = LayerRope(None, "layer stores no keys", True)


def _verdict(run: "_Run", layer_idx: int, known: list[KeyRotation]) -> LayerRope:
    """The verdict on one layer; rotations found are added to `known`, so that layers alike share one object."""
    if layer_idx not in run.keys:
        return _NO_KEYS if run.error is None else _not_established(_describe(run.error))
    keys, values = run.keys[layer_idx], run.values[layer_idx]
    if keys.ndim != 2 or keys.shape[0] != len(run.positions):
        return _not_established(f"keys of shape {tuple(keys.shape)} instead of [tokens, head_dim]")
    if keys.is_meta or not keys.isfinite().all() or not keys.any():
        return _not_established("the probe got no keys with values")
    if _is_constant(keys):
        return _NO_ROPE if _is_constant(values) else _ROTATED_VALUES
    # A model without a `position_ids` argument, or one that ignores it, counts by itself.
    for positions in dict.fromkeys([run.positions, tuple(range(len(run.positions)))]):
        at = torch.tensor(positions)
        rotation = next((r for r in known if _fit_error(r, keys, at) <= _FIT_TOLERANCE), None)
        if rotation is None:
            rotation = _from_tables(keys, at, run.tables) or _measured(keys, at)
            known.extend([rotation] if rotation else [])
        if rotation is not None:
            width = rotation.rotary_dim
            part = "" if width == keys.shape[1] else f", {width} of {keys.shape[1]} channels"
            return LayerRope(rotation, f"pre-RoPE, {_PAIRINGS[rotation.pairing]}{part}", True)
    return _not_established("keys fit no rotation of half-split or interleaved pairs")


def _add_long_tables(layers: Sequence[LayerRope], long_run: "_Run", length: int) -> list[LayerRope]:
    """Adds the frequencies of sequences longer than `length` where they differ (LongRoPE)."""
    seen = len(long_run.positions) - 1
    at = torch.tensor(long_run.positions[:seen])
    done: dict[int, LayerRope] = {}
    out = []
    for layer_idx, layer in enumerate(layers):
        rotation, keys = layer.rotation, long_run.keys.get(layer_idx)
        if rotation is None or rotation.long_inv_freq is not None or keys is None:
            out.append(layer)
            continue
        if id(rotation) not in done:
            done[id(rotation)] = layer
            if _fit_error(rotation, keys[:seen], at) > _FIT_TOLERANCE:
                long = _from_tables(keys[:seen], at, long_run.tables) or _measured(keys[:seen], at)
                if long is None or (long.pairing, long.offset) != (rotation.pairing, rotation.offset):
                    done[id(rotation)] = _not_established(f"frequencies beyond {length} tokens not found")
                else:
                    both = replace(rotation, long_inv_freq=long.inv_freq, original_length=length)
                    done[id(rotation)] = replace(layer, rotation=both)
        out.append(done[id(rotation)])
    return out


def _original_lengths(config: PreTrainedConfig) -> list[int]:
    """Lengths at which the config may switch frequencies, below its maximum."""
    parameters = getattr(config, "rope_parameters", None) or {}
    places = [parameters, *(p for p in parameters.values() if isinstance(p, Mapping))]
    found = {place.get("original_max_position_embeddings") for place in places}
    found.add(getattr(config, "original_max_position_embeddings", None))
    maximum = getattr(config, "max_position_embeddings", None) or math.inf
    return sorted(int(length) for length in found if length and length < maximum)


def _is_constant(states: torch.Tensor) -> bool:
    return bool((states - states[:1]).abs().max() <= _CONSTANT_TOLERANCE * states.abs().max())


def _fit_error(rotation: KeyRotation, keys: torch.Tensor, positions: torch.Tensor) -> float:
    """Largest error of `R_t key[0]` against `keys` `[P, head_dim]`, relative to the largest entry."""
    if rotation.head_dim != keys.shape[1]:
        return math.inf
    rotated = rotation.apply(keys[:1].expand_as(keys), *rotation.tables(positions))
    return float((rotated - keys).abs().max() / keys.abs().max())


def _from_tables(keys: torch.Tensor, positions: torch.Tensor, tables: Iterable[torch.Tensor]) -> KeyRotation | None:
    """The rotation by one of the model's own frequency tables that reproduces `keys` best, if any does."""
    head_dim = keys.shape[1]
    fits: list[tuple[float, KeyRotation]] = []
    for inv_freq in tables:
        spare = head_dim - 2 * inv_freq.numel()
        for offset, pairing in product(sorted({0, spare}) if spare >= 0 else (), _PAIRINGS):
            rotation = KeyRotation(inv_freq, head_dim, offset, pairing)
            fits.append((_fit_error(rotation, keys, positions), rotation))
    error, rotation = min(fits, key=lambda fit: fit[0], default=(math.inf, None))
    return rotation if error <= _FIT_TOLERANCE else None


def _measured(keys: torch.Tensor, positions: torch.Tensor) -> KeyRotation | None:
    """The narrowest rotation that reproduces `keys`, with frequencies measured from them, if any does.

    The phase of a pair grows by its frequency per position. It is read at position 1, where a turn is not exceeded,
    and refined at ever farther positions.
    """
    head_dim = keys.shape[1]
    moving = (keys - keys[0]).abs().amax(dim=0) > _CONSTANT_TOLERANCE * keys.abs().max()
    first, last = moving.nonzero().aminmax()
    for width in range(2, head_dim + 1, 2):
        for offset, pairing in product(sorted({0, head_dim - width}), _PAIRINGS):
            if offset > first or offset + width <= last:
                continue
            part = keys[:, offset : offset + width].double()
            x, y = part.chunk(2, dim=1) if pairing == "half" else (part[:, ::2], part[:, 1::2])
            phases = torch.angle(torch.complex(x, y) * torch.complex(x[:1], -y[:1]))
            inv_freq = phases[1]
            for position, phase in zip(positions[2:].tolist(), phases[2:], strict=True):
                missing = phase - inv_freq * position
                inv_freq = inv_freq + torch.remainder(missing + math.pi, math.tau).sub(math.pi) / position
            rotation = KeyRotation(inv_freq.float(), head_dim, offset, pairing)
            if _fit_error(rotation, keys, positions) <= _FIT_TOLERANCE:
                return rotation
    return None


# ---- the shell: a decoder without weights


@dataclass
class _Run:
    """What one run of the shell showed.

    Attributes:
        positions: Positions of the `P` tokens.
        keys: Keys of the first head by layer, `[P, head_dim]`, float32; only layers that stored keys.
        values: Likewise the second tensor handed to the cache.
        tables: Distinct frequency tables of the model at the end of the run, each one-dimensional, float32.
        error: What stopped the run before its end.
    """

    positions: tuple[int, ...]
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    tables: list[torch.Tensor] = field(default_factory=list)
    error: Exception | None = None


class _Shell:
    """A decoder of a config's own class whose matrices hold no memory.

    Args:
        config: Text decoder config; a copy is used.
        model_class: Class to instantiate.
    """

    def __init__(self, config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
        self._config = copy.deepcopy(config)
        self._config._attn_implementation = "eager"
        self._config._experts_implementation = "eager"
        self._constants = _Constants()
        # The random state is restored because initialisers draw from it; an outer device or inference mode of the
        # caller would otherwise leak into tables that are kept.
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.device("cpu"), _WeightsOnMeta():
            self._model = model_class(self._config).eval()
        for module in self._model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim <= 1:
                    weight = self._constants.take(parameter.numel()).abs().reshape(parameter.shape)
                    setattr(module, name, nn.Parameter(weight, requires_grad=False))

    def run(self, positions: Sequence[int]) -> _Run:
        """Feed one constant token at the given positions."""
        run = _Run(tuple(positions))
        parameters = inspect.signature(self._model.forward).parameters
        cache_argument = next((name for name in _CACHE_ARGUMENTS if name in parameters), None)
        if cache_argument is None:
            raise TypeError(f"{type(self._model).__name__}.forward takes none of {_CACHE_ARGUMENTS}")
        arguments: dict[str, Any] = {
            "input_ids": torch.ones(1, len(positions), dtype=torch.long, device="cpu"),
            "position_ids": torch.tensor([list(positions)], device="cpu"),
            "use_cache": True,
        }
        arguments = {name: value for name, value in arguments.items() if name in parameters}
        arguments[cache_argument] = _Recorder(self._config, run)
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
            _ConstantProducts(self._constants),
        ):
            try:
                self._model(**arguments)
            # Layers that were recorded before the code of an arbitrary model failed keep their verdict.
            except Exception as error:
                run.error = error
        for name, buffer in self._model.named_buffers():
            is_table = name.endswith("inv_freq") and not name.endswith("original_inv_freq")
            if is_table and buffer.ndim == 1 and not buffer.is_meta:
                table = buffer.detach().float().clone()
                if not any(torch.equal(table, other) for other in run.tables):
                    run.tables.append(table)
        return run


class _Recorder(DynamicCache):
    """A cache that stores nothing but each layer's first keys and values, in a `_Run`."""

    def __init__(self, config: PreTrainedConfig, run: _Run) -> None:
        super().__init__(config=config)
        self._run = run

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record `[B, H, P, D]` of the first row and head, and return what came."""
        if layer_idx not in self._run.keys:
            self._run.keys[layer_idx] = _first_head(key_states)
            self._run.values[layer_idx] = _first_head(value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero; also for models without attention layers, where Transformers' own method raises."""
        return 0


def _first_head(states: torch.Tensor) -> torch.Tensor:
    return (states[0, 0] if states.ndim == 4 else states).detach().float().clone()


class _Constants:
    """Fixed random vectors without zeros, cut from one table, so that a large model costs no more than a small one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        magnitudes = torch.rand(_CONSTANTS, generator=generator, device="cpu") + 0.5
        signs = torch.randint(0, 2, (_CONSTANTS,), generator=generator, device="cpu") * 2 - 1
        self._table = magnitudes * signs
        self._start = 0

    def take(self, size: int) -> torch.Tensor:
        """A vector `[size]`, float32, that differs from call to call."""
        self._start = (self._start + 7919) % (_CONSTANTS // 2)
        if size > _CONSTANTS // 2:
            return self._table.repeat(size // _CONSTANTS + 1)[:size]
        return self._table[self._start : self._start + size]


class _WeightsOnMeta(TorchFunctionMode):
    """Makes uninitialised tensors on the meta device, and large random and constant ones; tables stay real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            return func(*args, **{**kwargs, "device": "meta"})
        if func in (torch.zeros, torch.ones, torch.full, torch.rand, torch.randn):
            shape_only = func(*args, **{**kwargs, "device": "meta"})
            if shape_only.numel() > _TABLE_ELEMENTS:
                return shape_only
        return func(*args, **kwargs)


class _ConstantProducts(TorchFunctionMode):
    """Replaces each product with a weight on the meta device by a vector that is the same in every row.

    Where a tensor on the meta device enters any other operation together with real ones (a bias of an expert that is
    added), constants take its place. Operations on many elements (the state of a linear attention layer) go to the
    meta device: keys of a few tokens are never that large, and all that is wanted of the rest is its shape.
    """

    def __init__(self, constants: _Constants) -> None:
        super().__init__()
        self._constants = constants

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            rows_at, weight_at, weight_dim = _PRODUCTS[func]
            operands = [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)]
            rows, weight = operands[rows_at], operands[weight_at]
            if weight.is_meta:
                leading = rows.shape if func is F.embedding else rows.shape[:-1]
                size = weight.shape[weight_dim]
                return self._constants.take(size).expand(*leading, size).contiguous()
        real = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and not value.is_meta]
        size = sum(value.numel() for value in real)
        if size and func in _GROWING:
            size = func(*_changed(args, _on_meta), **kwargs).numel()
        change = self._constant_like
        if size > _MANY_ELEMENTS:
            change = _on_meta
        else:
            try:
                return func(*args, **kwargs)
            except (RuntimeError, NotImplementedError):  # how torch refuses mixed devices, and reading meta tensors
                pass
        return func(*_changed(args, change), **dict(zip(kwargs, _changed(kwargs.values(), change), strict=True)))

    def _constant_like(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if not tensor.is_floating_point():
            return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
        return self._constants.take(tensor.shape[-1] if tensor.ndim else 1).expand(tensor.shape)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _changed(values: Iterable[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """`values` with `change` made to each tensor among them and in lists of them."""
    return [
        change(value)
        if isinstance(value, torch.Tensor)
        else _changed(value, change)
        if isinstance(value, list) or type(value) is tuple
        else value
        for value in values
    ]


# Operations on tensors whose result may be far larger than the operands.
_GROWING = (F.pad, torch.mul, torch.Tensor.mul, torch.Tensor.__mul__)
_OPERANDS = ("input", "mat1", "weight", "mat2", "other")
# Positions of the rows and of the weight among the operands, and the weight's dimension that the result has.
_PRODUCTS: dict[Callable[..., Any], tuple[int, int, int]] = {
    F.linear: (0, 1, 0),
    F.embedding: (0, 1, 1),
    torch.addmm: (1, 2, 1),
    torch.mm: (0, 1, 1),
    torch.bmm: (0, 1, 2),
    torch.matmul: (0, 1, -1),
    torch.Tensor.matmul: (0, 1, -1),
    torch.Tensor.__matmul__: (0, 1, -1),
}
