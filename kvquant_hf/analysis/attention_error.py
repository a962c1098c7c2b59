"""How far quantized keys and values move attention, layer by layer and head by head, on real activations.

Keys and values are quantized by the cache's own layers, so every setting that a cache can have can be analyzed. Each
query reads what the cache would hold when it is computed: the first `prefill` tokens of a window arrive at once, the
others in pieces of `step`, and a piece attends to the cache as it is after the piece was stored, newest tokens exact
as far as the residual window reaches. With neither sinks nor a window, and lengths that whole blocks fill, every token
is read from codes, which is the setting of KIVI's table of errors (arXiv 2402.02750).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvquant_hf import KVQuantConfig, QuantCache
from kvquant_hf.analysis.measures import HeadSums
from kvquant_hf.capture import LayerActivations, capture
from kvquant_hf.eval.score import Protocol
from kvquant_hf.layer import QuantLayer
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rope_probe import find_rotations

FACTS_NAME = "exact attention"
_NEEDED = 0.95  # share of a query's probability that the tokens it needs hold
Pair = tuple[torch.Tensor, torch.Tensor]
HeadPair = tuple[list[float], list[float]]


def analyze_window(
    model: PreTrainedModel,
    window: torch.Tensor,
    settings: Mapping[str, KVQuantConfig],
    protocol: Protocol,
    queries: int = 128,
    progress: Callable[[int], object] | None = None,
) -> dict[str, HeadSums]:
    """Errors of several cache settings on one window of text, from one run of the model.

    Args:
        model: Causal language model in eval mode.
        window: `[context]`, integer, on the model's device.
        settings: Cache settings by name.
        protocol: How a cache would be fed, see the module.
        queries: Queries that are looked at: those of the last tokens of the window, at most the scored ones.
        progress: Called with the layer's index as layers are done.

    Returns:
        Sums of `ERRORS` by name of the setting, and those of `FACTS` under `"exact attention"`.

    Raises:
        ValueError: No token would be read from codes, the model's attention cannot be observed, a setting has the
            reserved name or an `attention_guard`, or `window` has another length.
    """
    if tuple(window.shape) != (protocol.context,):
        raise ValueError(f"`window` must have shape [{protocol.context}], got {list(window.shape)}.")
    if FACTS_NAME in settings:
        raise ValueError(f"`settings` must not use the name {FACTS_NAME!r}.")
    rotations = find_rotations(model)
    makers = {name: _layers_of(model, config) for name, config in settings.items()}
    for name, layers in makers.items():
        if any(layer.config.asks_queries for layer in layers.values()):
            raise ValueError(
                "`attention_guard` must be None where attention is analyzed: keys are stored here before any query "
                f"is seen. Got {name!r}; `scripts/score.py` scores it."
            )
        if not any(layer.config.is_quantized for layer in layers.values()):
            check_codes_are_read(next(iter(layers.values())).config, protocol)
    wanted = next(iter(makers.values())) if makers else _layers_of(model, KVQuantConfig())
    found: dict[str, dict[int, dict[str, HeadPair]]] = {name: {} for name in (*settings, FACTS_NAME)}

    def consume(layer: LayerActivations) -> None:
        index = layer.layer_idx
        found[FACTS_NAME][index] = _plain(attention_facts(layer, rotations[index].rotation))
        for name, layers in makers.items():
            found[name][index] = _plain(layer_errors(layer, layers[index], protocol))
        if progress is not None:
            progress(index)

    capture(model, window, wanted, consume, min(queries, protocol.scored))
    return {name: HeadSums.of_layers(layers) for name, layers in found.items()}


def _plain(pairs: Mapping[str, Pair]) -> dict[str, HeadPair]:
    """Sums as lists: small tensors that outlive a layer keep the allocator from reusing what lay around them."""
    return {name: (error.tolist(), norm.tolist()) for name, (error, norm) in pairs.items()}


def _layers_of(model: PreTrainedModel, config: KVQuantConfig) -> dict[int, QuantLayer]:
    """The layers that a cache of these settings quantizes, empty, by index."""
    cache = QuantCache(model, config)
    return {index: cache.quantized_layer(index) for index in cache.quantized_layers}


def code_ends(config: KVQuantConfig, protocol: Protocol, queries: int) -> torch.Tensor:
    """Where the codes that each of the last queries reads end.

    Args:
        config: Settings of the layer.
        protocol: How the cache is fed.
        queries: Number of queries, `N`.

    Returns:
        `[N]`, int64: the query reads the slots `sink_length … end - 1` from codes and all others exactly.
    """
    ends = torch.tensor([end for first, end in protocol.pieces() for _ in range(first, end)])[-queries:]
    waiting = (ends - config.sink_length - config.residual_length).clamp(min=0)
    return config.sink_length + waiting // config.block_length * config.block_length


def check_codes_are_read(config: KVQuantConfig, protocol: Protocol) -> None:
    """Raise unless the last query of a window reads a token from codes.

    Args:
        config: Settings of a layer.
        protocol: How the cache is fed.

    Raises:
        ValueError: Nothing is quantized, or windows and sinks cover everything.
    """
    if not config.is_quantized or int(code_ends(config, protocol, 1)) <= config.sink_length:
        raise ValueError(
            f"No token of a window of {protocol.context} would be read from codes with sink_length="
            f"{config.sink_length}, residual_length={config.residual_length} and nbits {config.key.nbits} and "
            f"{config.value.nbits}: take longer windows or other settings."
        )


def stored(layer: QuantLayer, key: torch.Tensor, value: torch.Tensor) -> Pair:
    """Keys and values after a round trip through a cache layer, as many blocks of them as there are.

    Blocks are quantized once, from exact inputs, so a block read now is what any later query reads.

    Args:
        layer: Layer with the settings; it is not changed.
        key: `[1, H_kv, T, D]`, rotated by the model.
        value: `[1, H_kv, T, D_v]`.
    """
    fresh = QuantLayer(
        replace(layer.config, residual_length=0, backend="auto"), layer.rotation, feedback=layer.feedback
    )
    fresh.update(key, value)
    return fresh.dequantize()


def layer_errors(layer: LayerActivations, settings: QuantLayer, protocol: Protocol) -> dict[str, Pair]:
    """`ERRORS` of one layer under one cache setting, as `(error, norm)` sums `[heads]`, float64.

    Args:
        layer: Activations of `N` queries over `T` tokens.
        settings: An empty cache layer with the settings.
        protocol: How a cache would be fed.

    Raises:
        ValueError: The layer is quantized and no token would be read from codes.
    """
    ends = code_ends(settings.config, protocol, layer.query.shape[2])
    last, first = int(ends.max()), settings.config.sink_length
    if settings.config.is_quantized:
        check_codes_are_read(settings.config, protocol)
    key, value = stored(settings, layer.key, layer.value)
    slots = torch.arange(layer.key.shape[2])
    is_code = ((slots >= first) & (slots < ends[:, None])).to(layer.key.device)  # [N, T]

    moved_scores = torch.where(is_code, layer.raw_scores(key), layer.scores)
    moved_logs = layer.log_probabilities(moved_scores)
    moved = moved_logs.exp()
    # Where codes are read the output lacks the error of the values by the probability they get.
    lost = layer.value.float() - value.float()
    moved_output = layer.output(moved, layer.value)
    values_alone = layer.output(layer.attention * is_code, lost)
    both = moved_output - layer.output(moved * is_code, lost)
    # Hidden tokens have no probability, and their logarithms may not be finite.
    divergence = torch.where(layer.visible, layer.attention * (layer.log_attention - moved_logs), 0.0).sum(-1)
    output, coded = layer.exact_output, slice(first, last)
    return {
        "key_error": _errors(layer.key[:, :, coded], layer.key[:, :, coded] - key[:, :, coded]),
        "score_error": _errors(layer.scores * layer.visible, (layer.scores - moved_scores) * layer.visible),
        "probability_error": _errors(layer.attention, layer.attention - moved),
        "attention_kl": _mean(divergence),
        "value_error": _errors(layer.value[:, :, coded], lost[:, :, coded]),
        "output_error_from_keys": _errors(output, output - moved_output),
        "output_error_from_values": _errors(output, values_alone),
        "output_error": _errors(output, output - both),
    }


def attention_facts(layer: LayerActivations, rotation: KeyRotation | None) -> dict[str, Pair]:
    """`FACTS` of one layer, as `(error, norm)` sums `[heads]`, float64.

    Args:
        layer: Activations.
        rotation: The rotary embedding of its keys, or `None` where there is none.
    """
    probabilities = layer.attention
    seen = layer.visible.expand(*probabilities.shape).sum(-1)
    mass = probabilities.double().sort(dim=-1, descending=True).values.cumsum(-1)
    needed = (mass < _NEEDED).sum(-1) + 1
    before = layer.key.float()
    if rotation is not None:
        rotation = rotation.for_length(before.shape[2])
        angles = rotation.tables(torch.arange(before.shape[2], device=before.device))
        before = rotation.apply(before, *angles, inverse=True)
    return {
        "negligible": _mean(1 - needed / seen),
        "first_token": _mean(probabilities[..., 0]),
        "outliers_pre": _mean(_outlier_ratio(before)),
        "outliers_post": _mean(_outlier_ratio(layer.key.float())),
    }


def _outlier_ratio(key: torch.Tensor) -> torch.Tensor:
    """Largest over median channel magnitude of keys `[1, H, T, D]`: `[1, H, 1]`."""
    magnitude = key.abs().mean(2)
    return (magnitude.amax(-1) / magnitude.median(-1).values)[..., None]


def _errors(exact: torch.Tensor, error: torch.Tensor) -> Pair:
    """Squared norms of an error and of what it is an error of, `[1, H, …]`, by head."""
    return _square(error), _square(exact)


def _square(states: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(states.float().flatten(2), dim=-1)
    return norms[0].double().square().cpu()


def _mean(values: torch.Tensor) -> Pair:
    """Sum and count of `[1, H, n]` by head."""
    sums = values.double().sum(-1)[0].cpu()
    return sums, torch.full_like(sums, values.shape[2])
