"""Gradients of the language model's loss with respect to the keys and values that a cache stores.

Their squares are the diagonal of the empirical Fisher information `F`: an error `e` of an entry raises the loss by
about `F e² / 2` (KVQuant, arXiv 2401.18079, section 3.3).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from kvquant_hf._compat import cache_kwargs


@dataclass(frozen=True)
class LayerGradients:
    """Keys and values of one layer for one window of text, with the gradients of the loss.

    Attributes:
        key: `[1, H_kv, T, D]`, after the rotary embedding, the model's dtype.
        value: `[1, H_kv, T, D_v]`.
        key_gradient: Like `key`.
        value_gradient: Like `value`.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_gradient: torch.Tensor
    value_gradient: torch.Tensor


class _WatchedCache(DynamicCache):
    """Gives every layer back what it stores, as tensors that gradients can be asked of."""

    def __init__(self, config: Any, layers: Collection[int]) -> None:
        super().__init__(config=config)
        self.watched: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._wanted = frozenset(layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self._wanted:
            key_states, value_states = (
                # What no watched tensor came before has no graph yet that detaching could cut.
                states if states.requires_grad else states.detach().requires_grad_()
                for states in (key_states, value_states)
            )
            self.watched[layer_idx] = (key_states, value_states)
        return key_states, value_states


def loss_gradients(
    model: PreTrainedModel, input_ids: torch.Tensor, layers: Collection[int]
) -> dict[int, LayerGradients]:
    """Keys and values of one window of text, with the gradients of its loss.

    The loss is the sum over the window of the cross-entropy of the next token. Parameters get no gradients.

    Args:
        model: Causal language model in eval mode.
        input_ids: `[T]`, integer, on the model's device.
        layers: Layers to watch.

    Raises:
        ValueError: There are fewer than two tokens, or the loss does not depend on what a layer stores.
    """
    if input_ids.ndim != 1 or input_ids.shape[0] < 2:
        raise ValueError(f"`input_ids` must have the shape [T] with T >= 2, got {list(input_ids.shape)}.")
    cache = _WatchedCache(model.config, layers)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        with torch.inference_mode(False), torch.enable_grad():
            logits = model(input_ids=input_ids[None].clone(), use_cache=True, **cache_kwargs(cache)).logits[0, :-1]
            loss = cross_entropy(logits.float(), input_ids[1:].clone(), reduction="sum")
        missing = sorted(set(layers) - set(cache.watched))
        states = [tensor for pair in cache.watched.values() for tensor in pair]
        gradients = torch.autograd.grad(loss, states, allow_unused=True) if loss.requires_grad else ()
    finally:
        for parameter in learned:
            parameter.requires_grad_()
    found = {}
    for place, (layer_idx, (key, value)) in enumerate(cache.watched.items()):
        key_gradient, value_gradient = gradients[2 * place : 2 * place + 2] or (None, None)
        if key_gradient is None or value_gradient is None:
            missing.append(layer_idx)
            continue
        found[layer_idx] = LayerGradients(key.detach(), value.detach(), key_gradient, value_gradient)
    if missing:
        raise ValueError(
            f"{type(model).__name__} reads other tensors than the layers {missing} store in the cache (as latent "
            "attention does), or none: the loss has no gradients with respect to them."
        )
    return found
