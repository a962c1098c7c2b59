"""The contents of a quantized layer as named tensors and plain facts, and back."""

from typing import Any

import torch

from kvquant_hf.blocks import STATE_PARTS
from kvquant_hf.guard import guarded
from kvquant_hf.layer import QuantLayer
from kvquant_hf.storage import keep_layouts_alike


def layer_state(layer: QuantLayer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Everything stored, as named tensors and plain facts (see `load_layer_state`)."""
    if layer._stores is None:
        return {}, {"length": 0}
    tensors: dict[str, torch.Tensor] = {}
    for side, store, window in zip(("key", "value"), layer._stores, layer._residual, strict=True):
        tensors |= {f"{side}.{name}": tensor for name, tensor in store.state().items()}
        kept = window.view()
        if kept is not None:
            tensors[f"{side}.residual"] = kept
    for name, pair in (("sinks", layer._sinks), ("row_sinks", layer._row_sinks)):
        if pair is not None:
            tensors |= {f"key.{name}": pair[0], f"value.{name}": pair[1]}
    if layer._padding is not None:
        tensors["padding"] = layer._padding
    shown = None if layer._last_queries is None else layer._last_queries.window.view()
    if shown is not None:
        tensors["last_queries"] = shown
    facts = {
        "length": layer._length,
        "shapes": [list(shape) for shape in layer._shapes],
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in layer._dtypes],
        "long_rope": layer._rotation_in_use is not layer.rotation,
        "guarded": layer.is_guarded,
    }
    return tensors, facts


def load_layer_state(layer: QuantLayer, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    """Take over what `layer_state` returned.

    Raises:
        KeyError: A fact or tensor is missing.
        ValueError: Tensors do not fit each other, the settings or the model.
    """
    if not facts["length"]:
        return
    dtypes = [getattr(torch, name) for name in facts["dtypes"]]
    device = next(iter(tensors.values())).device
    key_like, value_like = (
        torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(facts["shapes"], dtypes, strict=True)
    )
    layer.lazy_initialization(key_like, value_like)
    if facts.get("guarded"):
        layer._open_stores(key_like, value_like, guarded(layer.config.key))
    if layer.rotation is not None and facts["long_rope"]:
        layer._rotation_in_use = layer.rotation.for_length(torch.iinfo(torch.int64).max)
    for i, side in enumerate(("key", "value")):
        found = {name: tensors[f"{side}.{name}"] for name in STATE_PARTS if f"{side}.{name}" in tensors}
        layer._block_stores()[i].load_state(found)
        if f"{side}.residual" in tensors:
            layer._residual[i].append(tensors[f"{side}.residual"])
    keep_layouts_alike(*layer._block_stores())
    for name in ("sinks", "row_sinks"):
        if f"key.{name}" in tensors:
            setattr(layer, f"_{name}", (tensors[f"key.{name}"], tensors[f"value.{name}"]))
    layer._padding = tensors.get("padding")
    layer._note_padding()
    if layer.quantized_length:
        layer._last_queries = None
    elif layer._last_queries is not None and "last_queries" in tensors:
        layer._last_queries.window.append(tensors["last_queries"])
    layer._length = facts["length"]
    sinks = 0 if layer._sinks is None else layer._sinks[0].shape[2]
    held = [sinks + layer.quantized_length + window.length for window in layer._residual]
    if held != [layer._length] * 2:
        raise ValueError(f"it should hold {layer._length} tokens, its tensors hold {held}.")
