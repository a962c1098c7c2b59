"""KVQuant's levels (arXiv 2401.18079, section 3.3): one table for the keys and one for the values of each layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvquant_hf.analysis.candidates import SIDES
from kvquant_hf.analysis.layer_settings import changes_between
from kvquant_hf.analysis.level_samples import calibrates, check_spec, even_levels, group_samples, thinned, whole_blocks
from kvquant_hf.analysis.loss_gradients import LayerGradients, loss_gradients
from kvquant_hf.analysis.scalar_levels import WeightedSamples, best_levels, matched_levels
from kvquant_hf.cache import QuantCache
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.layer import QuantLayer
from kvquant_hf.quantizers.levels import levels_of
from kvquant_hf.spec import TABLE_LIMIT, QuantSpec

# Samples of one side of one layer, over all windows.
_MOST_SAMPLES = 2**18
Samples = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SideLevels:
    """Levels of the keys or of the values of one layer, and what they do to the samples they were made from.

    Attributes:
        levels: The table, see `QuantSpec.levels`.
        samples: Number of samples.
        error: Weighted mean squared error with these levels, in units of half ranges; weights add up to 1.
        even_error: With evenly spaced levels from -1 to 1.
        gaussian_error: With those of a Gaussian density, the outermost at -1 and 1.
        moments: Mean and standard deviation of the samples, without weights.
        decoded_moments: Of their nearest levels.
    """

    levels: tuple[float, ...]
    samples: int
    error: float
    even_error: float
    gaussian_error: float
    moments: tuple[float, float]
    decoded_moments: tuple[float, float]


@dataclass(frozen=True)
class LevelCalibration:
    """Levels of a model.

    Attributes:
        config: The settings asked for, with a table for each side of each layer under `layers`.
        levels: Tables by layer and side; a side that is not stored in 2 to 4 bits has none.
        q_norm: Whether levels were moved to keep mean and standard deviation.
        is_weighted: Whether errors were weighted by the squared gradients of the loss.
    """

    config: KVQuantConfig
    levels: Mapping[int, Mapping[str, SideLevels]]
    q_norm: bool
    is_weighted: bool


def calibrate_levels(
    model: PreTrainedModel,
    windows: torch.Tensor,
    config: KVQuantConfig,
    q_norm: bool = False,
    is_weighted: bool = True,
    progress: Callable[[], object] | None = None,
) -> LevelCalibration:
    """Find levels for the keys and the values of each layer that a cache quantizes.

    Entries of each window are brought to the units of the groups that the cache would form, exact first tokens and
    outliers left out; the levels have the least sum of squared errors, weighted by squared scales and by squared
    gradients of the loss. Blocks of the whole window count, also those that a residual window would keep exact.

    Args:
        model: Causal language model in eval mode.
        windows: `[N, T]`, integer, on the model's device, without padding.
        config: All settings but the levels, which are replaced where codes have 2 to 4 bits.
        q_norm: Move levels so that what is decoded keeps mean and standard deviation.
        is_weighted: Whether gradients count; if not, squared scales alone do.
        progress: Called after each window.

    Raises:
        ValueError: Windows are too short, no side has codes of 2 to 4 bits, a setting does not go with listed levels,
            or the model's loss does not depend on what its layers store.
    """
    if windows.ndim != 2 or not windows.shape[0] or windows.is_floating_point():
        raise ValueError(f"`windows` must be integers [N, T], got {list(windows.shape)} of {windows.dtype}.")
    cache = QuantCache(model, config)
    layers = {index: cache.quantized_layer(index) for index in cache.quantized_layers}
    wanted = {index: _sides(index, layer.config) for index, layer in layers.items()}
    if not any(wanted.values()):
        raise ValueError(f"levels need keys or values of 2 to 4 bits, got {config.key} and {config.value}.")
    for index, layer in layers.items():
        if wanted[index]:
            whole_blocks(layer.config, windows.shape[1])
    most = -(-_MOST_SAMPLES // windows.shape[0])
    found: dict[tuple[int, str], list[Samples]] = {}
    for window in windows:
        gradients = loss_gradients(model, window, [index for index, sides in wanted.items() if sides])
        for index in list(gradients):
            layer_gradients = gradients.pop(index)
            for side in wanted[index]:
                samples = thinned(*_samples(layers[index], side, layer_gradients, is_weighted), most)
                found.setdefault((index, side), []).append((samples[0].cpu(), samples[1].cpu()))
        if progress is not None:
            progress()
    levels = {
        index: {side: _levels(found.pop((index, side)), getattr(layers[index].config, side), q_norm) for side in sides}
        for index, sides in wanted.items()
        if sides
    }
    settings = {index: _with_levels(layers[index].config, sides) for index, sides in levels.items()}
    return LevelCalibration(with_layers(config, settings), levels, q_norm, is_weighted)


def _sides(index: int, config: KVQuantConfig) -> list[str]:
    """Sides of a layer that get levels, checked."""
    sides = [side for side in SIDES if calibrates(getattr(config, side))]
    for side in sides:
        check_spec(f"{side}s of layer {index}", getattr(config, side))
    return sides


def _samples(layer: QuantLayer, side: str, gradients: LayerGradients, is_weighted: bool) -> Samples:
    """What one window says about one side of a layer."""
    config, is_key = layer.config, side == "key"
    tokens = gradients.key.shape[2]
    body = slice(config.sink_length, config.sink_length + whole_blocks(config, tokens))
    states, gradient = getattr(gradients, side), getattr(gradients, f"{side}_gradient")
    if not is_weighted:
        gradient = torch.ones_like(gradient)
    rotation = layer.rotation.for_length(tokens) if is_key and layer.rotation is not None else None
    spec: QuantSpec = getattr(config, side)
    values, weights = group_samples(
        states[:, :, body], gradient[:, :, body], spec, config.block_length, config.sink_length, rotation
    )
    if not bool(torch.isfinite(weights).all() & torch.isfinite(values).all()):
        raise ValueError(f"{side}s of the model or their gradients are not finite numbers.")
    return values, weights


def _levels(parts: list[Samples], spec: QuantSpec, q_norm: bool) -> SideLevels:
    samples = WeightedSamples(torch.cat([values for values, _ in parts]), torch.cat([weights for _, weights in parts]))
    levels = best_levels(samples, 2**spec.nbits)
    if q_norm:
        levels = matched_levels(samples, levels, TABLE_LIMIT)
    gaussian = levels_of("gaussian", spec.nbits, torch.device("cpu"))
    others = (torch.tensor(even_levels(spec.nbits)).double(), gaussian.table.double() / gaussian.reach)
    error, even_error, gaussian_error = (samples.error(table) for table in (levels, *others))
    return SideLevels(
        tuple(levels.tolist()),
        len(samples),
        error,
        even_error,
        gaussian_error,
        samples.moments(),
        samples.decoded_moments(levels),
    )


def _with_levels(config: KVQuantConfig, levels: Mapping[str, SideLevels]) -> KVQuantConfig:
    return replace(
        config, **{side: replace(getattr(config, side), levels=found.levels) for side, found in levels.items()}
    )


def with_layers(config: KVQuantConfig, settings: Mapping[int, KVQuantConfig]) -> KVQuantConfig:
    """Settings in which layers of these indices have these settings, whatever `config.layers` says of them."""
    layers: dict[int | str, Any] = {name: entry for name, entry in config.layers.items() if name not in settings}
    # What entries for ranges and types of layers say is said again, since they may hold for these layers, too.
    named: dict[str, set[str]] = {side: set() for side in SIDES}
    others: set[str] = set()
    for entry in layers.values():
        others |= set(entry) - set(SIDES)
        for side in SIDES:
            named[side] |= set(entry.get(side, ()))
    for index, layer in settings.items():
        changes: dict[str, Any] = dict(changes_between(config.key, config.value, layer.key, layer.value))
        for side in SIDES:
            again = {name: getattr(getattr(layer, side), name) for name in sorted(named[side])}
            if again:
                changes[side] = again | changes.get(side, {})
        for name in ("residual_length", "sink_length", "outlier_guard", "attention_guard"):
            if name in others or getattr(layer, name) != getattr(config, name):
                changes[name] = getattr(layer, name)
        layers[index] = changes
    return config.replace(layers=layers)
