"""Layers of Transformers' own beside the quantized ones: what they hold."""

from collections.abc import Mapping

import torch

from kvquant_hf.buffers import storage_bytes


def tensors_of(layer: object) -> list[torch.Tensor]:
    """Keys, values and states that a layer of Transformers' own holds."""
    found: list[torch.Tensor] = []
    for name in ("keys", "values", "indexer_keys", "conv_states", "recurrent_states"):
        value = getattr(layer, name, None)
        items = value.values() if isinstance(value, Mapping) else [value]
        found += [item for item in items if isinstance(item, torch.Tensor)]
    return found


def drop_views(layer: object) -> None:
    """Copy keys and values that are a small part of a large tensor.

    Transformers' sliding layers keep a slice of what they were given, and a slice keeps a whole prefill alive.
    """
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        if isinstance(tensor, torch.Tensor) and storage_bytes(tensor) > 1.25 * tensor.numel() * tensor.element_size():
            setattr(layer, name, tensor.clone(memory_format=torch.contiguous_format))
