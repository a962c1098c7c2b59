"""Orders of channels for rotations, by layer and side (RotateKV's reordering, IJCAI 2025, arXiv 2501.16383)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from kvquant_hf.analysis.attention_error import analyze_window, check_codes_are_read
from kvquant_hf.analysis.candidates import SIDES
from kvquant_hf.analysis.level_calibration import with_layers
from kvquant_hf.analysis.measures import HeadSums
from kvquant_hf.cache import QuantCache
from kvquant_hf.capture import LayerActivations, capture
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.eval.score import Protocol
from kvquant_hf.layer import QuantLayer
from kvquant_hf.rotation import hadamard_of_heads
from kvquant_hf.spec import QuantSpec

# What a side is judged by.
MEASURE_OF = {"key": "attention_kl", "value": "output_error_from_values"}
NATURAL = "none"
# How wide a channel is, `[D]`, for mean absolute values `[H, D]` of the heads, which share an order.
RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "widest head": lambda sizes: sizes.amax(0),
    "mean square": lambda sizes: sizes.square().mean(0),
    "mean share": lambda sizes: torch.nn.functional.normalize(sizes, p=1.0, dim=-1).sum(0),
}
Orders = Mapping[int, Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class SideOrder:
    """The order of the keys or of the values of one layer.

    Attributes:
        rule: What it was made by, a name in `RULES`, or `none` where none of them helps.
        channel_order: See `QuantSpec.channel_order`; empty with `none`.
        errors: The measure that decides, by rule, on the calibration text: KL of attention probabilities for keys,
            relative error of the attention output for values.
    """

    rule: str
    channel_order: tuple[int, ...]
    errors: Mapping[str, float]


@dataclass(frozen=True)
class OrderCalibration:
    """Orders of a model.

    Attributes:
        config: The settings asked for, with an order for each side of each layer under `layers`.
        orders: By layer and side; a side that is not rotated has none.
    """

    config: KVQuantConfig
    orders: Mapping[int, Mapping[str, SideOrder]]


def calibrate_orders(
    model: PreTrainedModel,
    windows: torch.Tensor,
    config: KVQuantConfig,
    protocol: Protocol,
    progress: Callable[[], object] | None = None,
) -> OrderCalibration:
    """Find the order of channels in which rotated keys and values lose least.

    Channels are put in the order of their size, the widest first, by each of `RULES`; of these orders and that of the
    model each layer and side gets the one with which attention is moved least, without guards.

    Args:
        model: Causal language model in eval mode whose attention goes through Transformers' attention interface.
        windows: `[N, T]`, integer, on the model's device, without padding, `T` being the protocol's context.
        config: All settings but the orders, which are replaced where there is a rotation.
        protocol: How a cache is fed, see `analyze_window`.
        progress: Called after each window, twice.

    Raises:
        ValueError: No side is rotated, windows have another length or are too short for codes to be read, or the
            model's attention cannot be observed.
    """
    if windows.ndim != 2 or not windows.shape[0] or windows.is_floating_point():
        raise ValueError(f"`windows` must be integers [N, T], got {list(windows.shape)} of {windows.dtype}.")
    if windows.shape[1] != protocol.context:
        raise ValueError(f"`windows` must have {protocol.context} tokens each, got {windows.shape[1]}.")
    cache = QuantCache(model, config)
    layers = {index: cache.quantized_layer(index) for index in cache.quantized_layers}
    wanted = {index: [side for side in SIDES if _is_rotated(getattr(layers[index].config, side))] for index in layers}
    if not any(wanted.values()):
        raise ValueError(
            f"orders of channels need keys or values with a `rotation`, got {config.key} and {config.value}."
        )
    for layer in layers.values():
        if layer.config.is_quantized:
            check_codes_are_read(layer.config, protocol)
    sizes = _sizes(model, windows, layers, wanted, progress)
    candidates: dict[str, Orders] = {NATURAL: {index: dict.fromkeys(sides, ()) for index, sides in sizes.items()}}
    for rule, width in RULES.items():
        candidates[rule] = {i: {side: _order(width(found)) for side, found in sizes[i].items()} for i in sizes}
    # An order must not win by what the guard makes of it: wider keys.
    unguarded = {index: layer.config.without_guards() for index, layer in layers.items()}
    settings = {rule: _with_orders(config, unguarded, orders) for rule, orders in candidates.items()}
    parts = []
    for window in windows:
        parts.append(analyze_window(model, window, settings, protocol))
        if progress is not None:
            progress()
    errors = {name: HeadSums.total([part[name] for part in parts]) for name in settings}
    best = {index: {side: _best(errors, candidates, index, side) for side in sides} for index, sides in sizes.items()}
    chosen = {index: {side: entry.channel_order for side, entry in sides.items()} for index, sides in best.items()}
    own = {index: layer.config for index, layer in layers.items()}
    return OrderCalibration(_with_orders(config, own, chosen), best)


def _is_rotated(spec: QuantSpec) -> bool:
    return spec.is_quantized and spec.rotation != "none"


def _sizes(
    model: PreTrainedModel,
    windows: torch.Tensor,
    layers: Mapping[int, QuantLayer],
    wanted: Mapping[int, list[str]],
    progress: Callable[[], object] | None,
) -> dict[int, dict[str, torch.Tensor]]:
    """Mean absolute values `[H, D]` of what is rotated within heads, by layer and side."""
    found: dict[int, dict[str, torch.Tensor]] = {index: {} for index, sides in wanted.items() if sides}

    def consume(activations: LayerActivations) -> None:
        index = activations.layer_idx
        for side in wanted[index]:
            mean = _mixed(activations, layers[index], side).abs().mean(1).cpu() / len(windows)
            found[index][side] = found[index].get(side, 0) + mean

    for window in windows:
        capture(model, window, found, consume, queries=1)
        if progress is not None:
            progress()
    return found


def _mixed(activations: LayerActivations, layer: QuantLayer, side: str) -> torch.Tensor:
    """Keys or values `[H, T, D]`, float32, just before their channels are mixed; exact first tokens left out."""
    states: torch.Tensor = getattr(activations, side).float()
    spec: QuantSpec = getattr(layer.config, side)
    if side == "key" and layer.rotation is not None:
        tokens = states.shape[2]
        angles = layer.rotation.for_length(tokens).tables(torch.arange(tokens, device=states.device))
        states = layer.rotation.apply(states, *angles, inverse=True)
    states = states[:, :, layer.config.sink_length :]
    return (hadamard_of_heads(states) if spec.rotation == "grouped_heads" else states)[0]


def _order(width: torch.Tensor) -> tuple[int, ...]:
    """Channels, the widest first."""
    return tuple(width.argsort(descending=True, stable=True).tolist())


def _with_orders(config: KVQuantConfig, layers: Mapping[int, KVQuantConfig], orders: Orders) -> KVQuantConfig:
    changed = {}
    for index, sides in orders.items():
        old = layers[index]
        new = {side: replace(getattr(old, side), channel_order=order) for side, order in sides.items()}
        changed[index] = replace(old, **new)
    return with_layers(config, changed)


def _best(errors: Mapping[str, HeadSums], candidates: Mapping[str, Orders], index: int, side: str) -> SideOrder:
    def error(sums: HeadSums) -> float:
        return sums.by_layer(MEASURE_OF[side])[sums.layers.index(index)]

    found = {name: error(errors[name]) for name in candidates}
    rule = min(found, key=lambda name: found[name])
    return SideOrder(rule, candidates[rule][index][side], found)
