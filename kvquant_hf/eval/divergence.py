"""Where the greedy text of a quantized cache leaves that of the dense one."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvquant_hf._compat import cache_kwargs


@dataclass(frozen=True)
class Divergence:
    """First differences of one cache configuration.

    Attributes:
        tokens: Greedy tokens looked at after each prompt.
        first: For each prompt, how many leading tokens are equal; `tokens` where all are.
    """

    tokens: int
    first: tuple[int, ...]

    @property
    def median(self) -> float:
        """Median of `first`; `tokens` where most texts never diverge."""
        return float(median(self.first))

    @property
    def never(self) -> int:
        """Prompts whose text is the same to the end."""
        return sum(count == self.tokens for count in self.first)


def greedy_text(model: PreTrainedModel, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Tokens that greedy decoding with a `DynamicCache` appends to a prompt, past any end-of-text token.

    Args:
        model: Causal language model in eval mode.
        prompt: `[n]`, integer, on the model's device.
        tokens: How many.

    Returns:
        `[tokens]`.
    """
    cache = DynamicCache(config=model.config)
    chosen = [_next(model, prompt, cache)]
    while len(chosen) < tokens:
        chosen.append(_next(model, chosen[-1], cache))
    return torch.cat(chosen)


def first_divergence(model: PreTrainedModel, prompt: torch.Tensor, text: torch.Tensor, cache: Cache) -> int:
    """Leading tokens of `text` that greedy decoding through `cache` gives, too.

    Up to the first difference both texts are the same, so the reference's tokens are fed and each choice is compared;
    nothing is decoded past the difference.

    Args:
        model: Causal language model in eval mode.
        prompt: `[n]`, integer, on the model's device.
        text: `[tokens]`, the reference's greedy text, see `greedy_text`.
        cache: Empty cache.
    """
    chosen = _next(model, prompt, cache)
    for i in range(len(text)):
        if chosen != text[i]:
            return i
        if i + 1 < len(text):
            chosen = _next(model, text[i : i + 1], cache)
    return len(text)


def _next(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """The likeliest next token, `[1]`."""
    with torch.no_grad():
        outputs = model(input_ids=ids[None], use_cache=True, logits_to_keep=1, **cache_kwargs(cache))
    likeliest: torch.Tensor = outputs.logits[0, -1:].argmax(-1)
    return likeliest


def summarize_divergence(first: Sequence[int], tokens: int) -> dict[str, object]:
    """For JSON: tokens looked at, leading equal tokens of each prompt, their median, prompts that never diverge."""
    found = Divergence(tokens, tuple(first))
    return {"tokens": tokens, "first": list(first), "median": found.median, "never": found.never}
