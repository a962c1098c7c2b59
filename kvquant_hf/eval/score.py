"""Teacher-forced scoring through the cache: what the stored history costs in perplexity, KL divergence and agreement.

The usual perplexity is one forward pass over a whole window, in which attention never reads the cache. Here the first
`prefill` tokens of a window are fed at once and the rest in pieces of `step` tokens, each of which attends to the
history as the cache gives it back. The same is done with `DynamicCache`, the reference of the KL divergence.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import log_softmax
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvquant_hf._compat import cache_kwargs

CacheFactory = Callable[[], Cache]
REFERENCE = "DynamicCache"


@dataclass(frozen=True)
class Protocol:
    """How a window of text is fed.

    Attributes:
        context: Tokens of a window.
        prefill: Tokens of it that are fed first and at once.
        step: Tokens of each later piece; the last one may be shorter.

    Raises:
        ValueError: A length is below 1, or `prefill` leaves no token to score.
    """

    context: int = 1024
    prefill: int = 256
    step: int = 64

    def __post_init__(self) -> None:
        for name in ("context", "prefill", "step"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be an integer >= 1, got {getattr(self, name)!r}.")
        if self.prefill >= self.context:
            raise ValueError(f"`prefill` must be less than `context` = {self.context}, got {self.prefill}.")

    @property
    def scored(self) -> int:
        """Tokens of a window whose prediction is scored: all but the prefilled ones."""
        return self.context - self.prefill

    def pieces(self) -> list[tuple[int, int]]:
        """Bounds `(first, end)` of what is fed by each call."""
        bounds = [0, *range(self.prefill, self.context, self.step), self.context]
        return list(pairwise(bounds))


@dataclass(frozen=True)
class Score:
    """Quality of one cache configuration, over all windows.

    Attributes:
        perplexity: Exponential of the mean negative log-likelihood of the scored tokens.
        kl: Mean of KL(reference || this) over the scored tokens, nats.
        top1: Share of scored tokens at which the likeliest next token is the reference's.
        tokens: Scored tokens.
    """

    perplexity: float
    kl: float
    top1: float
    tokens: int


@dataclass
class _Sums:
    nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    tokens: int = 0

    def add(self, log_probs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        self.nll -= log_probs.gather(-1, targets[:, None]).sum(dtype=torch.float64).item()
        # A token that the reference rules out adds nothing, where 0 * -inf would be NaN.
        terms = torch.where(reference == -math.inf, 0.0, reference.exp() * (reference - log_probs))
        self.kl += terms.sum(dtype=torch.float64).item()
        self.agreed += int((log_probs.argmax(-1) == reference.argmax(-1)).sum())
        self.tokens += targets.numel()

    def score(self) -> Score:
        return Score(
            perplexity=math.exp(self.nll / self.tokens) if self.nll / self.tokens < 700 else math.inf,
            kl=self.kl / self.tokens,
            top1=self.agreed / self.tokens,
            tokens=self.tokens,
        )


def predictions(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache, protocol: Protocol
) -> Iterator[torch.Tensor]:
    """Feed a window through `cache` and yield the predictions of its scored tokens, one tensor a piece.

    Args:
        model: Causal language model in eval mode.
        input_ids: `[context]`, integer, on the model's device.
        cache: Empty cache; holds the whole window afterwards.
        protocol: How the window is cut.

    Yields:
        Log-probabilities `[n, vocabulary]`, float32; the `n` of all pieces add up to `protocol.scored`.
    """
    for first, end in protocol.pieces():
        # The last position of the prefill predicts the first scored token; the last token of all predicts none.
        keep = {"logits_to_keep": 1} if first == 0 else {}
        with torch.no_grad():
            outputs = model(input_ids=input_ids[None, first:end], use_cache=True, **keep, **cache_kwargs(cache))
        logits = outputs.logits[0]
        if end == protocol.context:
            logits = logits[:-1]
        if len(logits):
            yield log_softmax(logits.float(), dim=-1)


def score_windows(
    model: PreTrainedModel,
    windows: torch.Tensor,
    caches: Mapping[str, CacheFactory],
    protocol: Protocol,
    progress: Callable[[str, int], object] | None = None,
) -> dict[str, Score]:
    """Score cache configurations against `DynamicCache` on the same windows.

    Args:
        model: Causal language model in eval mode.
        windows: `[N, context]`, integer, on the model's device; each window starts with an empty cache.
        caches: Makers of fresh caches by configuration name.
        protocol: How windows are fed.
        progress: Called with the configuration's name and a number of scored tokens as they are scored.

    Returns:
        Scores by name: the reference under `"DynamicCache"`, then `caches` in their order.

    Raises:
        ValueError: `windows` has another shape, or a configuration takes the reference's name.
    """
    if windows.ndim != 2 or not len(windows) or windows.shape[1] != protocol.context:
        raise ValueError(f"`windows` must have shape [N, {protocol.context}], N >= 1, got {list(windows.shape)}.")
    if REFERENCE in caches:
        raise ValueError(f"`caches` must not use the name {REFERENCE!r}, which is the reference's.")
    sums = {name: _Sums() for name in (REFERENCE, *caches)}
    for window in windows:
        targets = window[protocol.prefill :]
        pieces = list(predictions(model, window, DynamicCache(config=model.config), protocol))
        reference = torch.cat(pieces)
        sums[REFERENCE].add(reference, reference, targets)
        if progress is not None:
            progress(REFERENCE, len(targets))
        for name, make_cache in caches.items():
            done = 0
            for log_probs in predictions(model, window, make_cache(), protocol):
                part = slice(done, done + len(log_probs))
                sums[name].add(log_probs, reference[part], targets[part])
                done = part.stop
                if progress is not None:
                    progress(name, len(log_probs))
    return {name: total.score() for name, total in sums.items()}
