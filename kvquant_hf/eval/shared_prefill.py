"""One prefill for many caches: the keys and values that a model gave one cache, given to others without running it.

A prompt that goes into an empty cache attends to itself, so its keys and values do not depend on what the cache makes
of them. This holds for caches whose first update hands back what it was given, as `DynamicCache` and `QuantCache` do.
"""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache


class RecordingCache(DynamicCache):
    """A `DynamicCache` that remembers the first keys and values of each layer.

    Args:
        config: Config of the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._prefill: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[Any, ...], dict[str, Any]]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DynamicCache.update`; `key_states` `[B, H, t, D]`, `value_states` `[B, H, t, D_v]`."""
        if layer_idx not in self._prefill:
            self._prefill[layer_idx] = (key_states, value_states, args, kwargs)
        states: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return states

    @property
    def is_complete(self) -> bool:
        """Whether every layer was filled by keys and values; layers of linear attention have states of other kinds."""
        return set(self._prefill) == set(range(len(self.layers)))

    def fill(self, cache: Cache) -> None:
        """Bring an empty cache to where the prefill would have brought it.

        Args:
            cache: Gets the same updates, in the order of the layers.

        Raises:
            ValueError: `is_complete` is false.
        """
        if not self.is_complete:
            raise ValueError(
                f"`cache` cannot be filled: keys and values were seen in the layers {sorted(self._prefill)} of "
                f"{len(self.layers)}."
            )
        for layer_idx in sorted(self._prefill):
            key_states, value_states, args, kwargs = self._prefill[layer_idx]
            cache.update(key_states, value_states, layer_idx, *args, **kwargs)
