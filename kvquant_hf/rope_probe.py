"""Finds which rotation a model applies to the keys of each layer, by running the model's own code.

A `ModelShell` records the key of one constant input at a few positions, where `key[t] = R_t key[0]` for a rotation by
position. Pairing, width and offset follow from the recorded keys; no list of model names is needed, and models that
bring their own code are treated alike.

Frequencies are those of the shell's `inv_freq` buffers, which the model computes from its config, where one of them
reproduces the keys, and are measured from the keys otherwise (GPT-J keeps tables instead of frequencies).

Two cases need a word. Dynamic NTK scaling changes its frequencies once a sequence outgrows the model's maximum: the
table for sequences within the maximum is used throughout. Keys that are scaled per channel after the rotation (a norm
on rotated keys) are not one rotated vector any more, and come out as not established.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedConfig

from kvquant_hf.model_shell import ModelShell, ShellRun, decoder_class, isolated
from kvquant_hf.rope import KeyRotation, Pairing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# A frequency measured up to one position predicts the phase at the next one to well within a turn.
_POSITIONS = (0, 1, 2, 5, 17, 80, 400, 1000)
_PAIRINGS: dict[Pairing, str] = {"half": "half-split pairs", "interleaved": "interleaved pairs"}
_CONSTANT_TOLERANCE = 1e-5  # smaller changes, relative to the largest entry, are rounding
_FIT_TOLERANCE = 1e-4  # largest relative error of a rotation that is taken for the model's
_RESULTS_KEPT = 32


@dataclass(frozen=True)
class LayerRope:
    """What is known about the keys of one layer, first of all their rotation.

    Attributes:
        rotation: The rotation to undo before quantization, or `None` where keys are stored as they come.
        reason: One line for reports: what was found, or why nothing was.
        established: Whether the model's own code confirmed the answer; also true when it confirmed that there is
            nothing to undo.
        num_heads: Key/value heads that the whole model hands to the cache, or `None` where its code could not be run.
            A process of a tensor-parallel model holds fewer.
        head_dims: Size of a key and of a value vector in the cache, or `None` likewise.
        scaling: What eager attention multiplies `q·k` by, or `None` where it does not multiply queries and keys.
    """

    rotation: KeyRotation | None
    reason: str
    established: bool
    num_heads: int | None = field(default=None, compare=False)
    head_dims: tuple[int, int] | None = field(default=None, compare=False)
    scaling: float | None = field(default=None, compare=False)


_NO_ROTARY = LayerRope(None, "no rotary embedding", True)
_NOPE = LayerRope(None, "NoPE layer", True)
_ROTATED_ELSEWHERE = LayerRope(None, "keys not rotated (the rotation is in the second tensor of the cache)", True)
_NO_KEYS = LayerRope(None, "layer stores no keys", True)

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
        TypeError: The argument neither is a config nor has one, or the config has no `num_hidden_layers`.
    """
    model = None if isinstance(config_or_model, PreTrainedConfig) else config_or_model
    config = config_or_model if model is None else getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            "`config_or_model` must be a `PreTrainedConfig` or a model whose `config` is one, got "
            f"{type(config_or_model).__name__}."
        )
    config = config.get_text_config(decoder=True)
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        raise TypeError(f"`config_or_model` must tell its `num_hidden_layers`, got {num_layers!r} in {type(config)}.")
    try:
        model_class, failure = decoder_class(config, model), None
    except LookupError as error:
        model_class, failure = None, str(error)
    key = (type(config), model_class, config.to_json_string(use_diff=False))
    if key not in _results:
        with isolated():
            layers = _examine(config, model_class) if model_class else [_not_established(failure or "")] * num_layers
        doubts = sorted({layer.reason for layer in layers if not layer.established})
        if doubts:
            logger.warning("Rotary embedding of %s: %s.", type(config).__name__, "; ".join(doubts))
        _results[key] = tuple(layers)
        if len(_results) > _RESULTS_KEPT:
            _results.popitem(last=False)
    return list(_results[key])


def _examine(config: PreTrainedConfig, model_class: "type[PreTrainedModel]") -> list[LayerRope]:
    """One verdict per layer, from a short run and from one beyond each length where frequencies may change."""
    lengths = _original_lengths(config)
    limit = min([*lengths, getattr(config, "max_position_embeddings", None) or max(_POSITIONS) + 1])
    try:
        shell = ModelShell(config, model_class)
        run = shell.run([position for position in _POSITIONS if position < limit])
        known: list[KeyRotation] = []
        layers = [_verdict(run, layer_idx, known) for layer_idx in range(config.num_hidden_layers)]
        for length in lengths if known else ():
            # One layer of each rotation tells; the last position makes the sequence longer than `length`.
            layer_of = {layer.rotation: layer_idx for layer_idx, layer in reversed(list(enumerate(layers)))}
            layer_of.pop(None, None)
            long_run = shell.run([*run.positions, length], layers=layer_of.values())
            layers = _with_long_tables(layers, long_run, length)
    # Code of an arbitrary model runs here and may raise anything; every layer reports the outcome.
    except Exception as error:
        return [_not_established(_describe(error))] * int(config.num_hidden_layers)
    layers = [_NOPE if known and layer is _NO_ROTARY else layer for layer in layers]
    return [
        replace(
            layer,
            num_heads=run.num_heads.get(layer_idx),
            head_dims=run.head_dims.get(layer_idx),
            scaling=run.scalings.get(layer_idx),
        )
        for layer_idx, layer in enumerate(layers)
    ]


def _original_lengths(config: PreTrainedConfig) -> list[int]:
    """Lengths below the config's maximum at which it may switch frequencies, in ascending order."""
    parameters = getattr(config, "rope_parameters", None) or {}
    places = [parameters, *(nested for nested in parameters.values() if isinstance(nested, Mapping))]
    found = {place.get("original_max_position_embeddings") for place in places}
    found.add(getattr(config, "original_max_position_embeddings", None))
    maximum = getattr(config, "max_position_embeddings", None) or math.inf
    return sorted(int(length) for length in found if length and length < maximum)


def _verdict(run: ShellRun, layer_idx: int, known: list[KeyRotation]) -> LayerRope:
    """The verdict on one layer; rotations found are added to `known`, so that layers alike share one object."""
    if layer_idx not in run.keys:
        return _NO_KEYS if run.error is None else _not_established(_describe(run.error))
    keys, values = run.keys[layer_idx], run.values[layer_idx]
    if keys.ndim != 2 or keys.shape[0] != len(run.positions):
        return _not_established(f"keys of shape {tuple(keys.shape)} instead of [tokens, head_dim]")
    if keys.is_meta or not keys.isfinite().all() or not keys.any():
        return _not_established("the probe got no keys with values")
    if _is_constant(keys):
        return _NO_ROTARY if values.is_meta or _is_constant(values) else _ROTATED_ELSEWHERE
    # A model that takes no positions, or ignores those it is given, counts by itself.
    for positions in dict.fromkeys([run.positions, tuple(range(len(run.positions)))]):
        at = torch.tensor(positions)
        rotation = next((candidate for candidate in known if _fit_error(candidate, keys, at) <= _FIT_TOLERANCE), None)
        if rotation is None:
            rotation = _from_tables(keys, at, run.tables) or _measured(keys, at)
            known.extend([rotation] if rotation else [])
        if rotation is not None:
            width, head_dim = rotation.rotary_dim, rotation.head_dim
            part = "" if width == head_dim else f", {width} of {head_dim} channels"
            return LayerRope(rotation, f"pre-RoPE, {_PAIRINGS[rotation.pairing]}{part}", True)
    return _not_established("keys fit no rotation of half-split or interleaved pairs")


def _not_established(why: str) -> LayerRope:
    return LayerRope(None, f"pairing not established: {why}; stored post-RoPE", False)


def _describe(error: Exception) -> str:
    message = (str(error).splitlines() or [""])[0]
    return f"the probe raised {type(error).__name__}({message[:120]})"


def _with_long_tables(layers: Sequence[LayerRope], long_run: ShellRun, length: int) -> list[LayerRope]:
    """`layers` with the frequencies of sequences longer than `length` where they differ (LongRoPE)."""
    at = torch.tensor(long_run.positions[:-1])
    changed: dict[KeyRotation, LayerRope] = {}
    for layer_idx, long_keys in long_run.keys.items():
        rotation, keys = layers[layer_idx].rotation, long_keys[:-1]
        if rotation is None or rotation.long_inv_freq is not None or _fit_error(rotation, keys, at) <= _FIT_TOLERANCE:
            continue
        long = _from_tables(keys, at, long_run.tables) or _measured(keys, at)
        if long is None or (long.pairing, long.offset) != (rotation.pairing, rotation.offset):
            changed[rotation] = _not_established(f"frequencies beyond {length} tokens not found")
        else:
            both = replace(rotation, long_inv_freq=long.inv_freq, original_length=length)
            changed[rotation] = replace(layers[layer_idx], rotation=both)
    return [changed.get(layer.rotation, layer) if layer.rotation is not None else layer for layer in layers]


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
    best: tuple[float, KeyRotation | None] = (_FIT_TOLERANCE, None)
    for inv_freq in tables:
        spare = head_dim - 2 * inv_freq.numel()
        for offset, pairing in product(sorted({0, spare}) if spare >= 0 else (), _PAIRINGS):
            rotation = KeyRotation(inv_freq, head_dim, offset, pairing)
            error = _fit_error(rotation, keys, positions)
            if error < best[0]:
                best = (error, rotation)
    return best[1]


def _measured(keys: torch.Tensor, positions: torch.Tensor) -> KeyRotation | None:
    """The narrowest rotation that reproduces `keys`, with frequencies measured from them, if any does.

    The phase of a pair grows by its frequency per position. It is read at position 1, where it is less than half a
    turn, and refined at ever farther positions.
    """
    head_dim = keys.shape[1]
    moving = (keys - keys[0]).abs().amax(dim=0) > _CONSTANT_TOLERANCE * keys.abs().max()
    first, last = (int(channel) for channel in moving.nonzero().aminmax())
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
                inv_freq = inv_freq + (torch.remainder(missing + math.pi, math.tau) - math.pi) / position
            rotation = KeyRotation(inv_freq.float(), head_dim, offset, pairing)
            if _fit_error(rotation, keys, positions) <= _FIT_TOLERANCE:
                return rotation
    return None
