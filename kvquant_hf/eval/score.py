"""Teacher-forced scoring through the cache: what the stored history costs in perplexity, KL divergence and agreement.

The usual perplexity is one forward pass over a whole window, in which attention never reads the cache. Here the first
`prefill` tokens of a window are fed at once and the rest in pieces of `step` tokens, each of which attends to the
history as the cache gives it back. The same is done with `DynamicCache`, the reference of the KL divergence.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Protocol as TypingProtocol

import torch
from torch.nn.functional import log_softmax
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvquant_hf._compat import cache_kwargs
from kvquant_hf.cache import QuantCache
from kvquant_hf.eval.shared_prefill import RecordingCache

CacheFactory = Callable[[], Cache]
REFERENCE = "DynamicCache"
MOST_BINS = 32


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

    def bins(self) -> list[tuple[int, int]]:
        """Bounds `(first, end)` of at most 32 nearly equal stretches of the scored positions."""
        count = min(MOST_BINS, self.scored)
        return list(pairwise(self.prefill + i * self.scored // count for i in range(count + 1)))

    def pieces(self) -> list[tuple[int, int]]:
        """Bounds `(first, end)` of what is fed by each call."""
        bounds = [0, *range(self.prefill, self.context, self.step), self.context]
        return list(pairwise(bounds))


@dataclass(frozen=True)
class ChunkScore:
    """What one window of text adds up to, by position.

    Attributes:
        nll: Negative log-likelihoods of the scored tokens, summed over each of the position bins, nats.
        kl: KL(reference || this), summed likewise, nats.
        agreed: Tokens at which the likeliest next token is the reference's.
        tokens: Scored tokens.
    """

    nll: tuple[float, ...]
    kl: tuple[float, ...]
    agreed: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Quality of one cache configuration, over all windows.

    Attributes:
        perplexity: Exponential of the mean negative log-likelihood of the scored tokens.
        kl: Mean of KL(reference || this) over the scored tokens, nats.
        top1: Share of scored tokens at which the likeliest next token is the reference's.
        tokens: Scored tokens.
        chunks: The windows one by one, for intervals and curves.
    """

    perplexity: float
    kl: float
    top1: float
    tokens: int
    chunks: tuple[ChunkScore, ...] = ()

    @classmethod
    def of(cls, chunks: Sequence[ChunkScore]) -> "Score":
        """The score of all windows together."""
        tokens = sum(sum(chunk.tokens) for chunk in chunks)
        nll = sum(sum(chunk.nll) for chunk in chunks) / tokens
        return cls(
            perplexity=math.exp(nll) if nll < 700 else math.inf,
            kl=sum(sum(chunk.kl) for chunk in chunks) / tokens,
            top1=sum(sum(chunk.agreed) for chunk in chunks) / tokens,
            tokens=tokens,
            chunks=tuple(chunks),
        )

    def curve(self, name: str) -> list[float]:
        """Mean of `nll`, `kl` or `agreed` by position bin, over all windows."""
        sums = [sum(values) for values in zip(*(getattr(chunk, name) for chunk in self.chunks), strict=True)]
        counts = [sum(values) for values in zip(*(chunk.tokens for chunk in self.chunks), strict=True)]
        return [total / count for total, count in zip(sums, counts, strict=True)]


class ChunkStore(TypingProtocol):
    """Where scores of windows are kept between runs."""

    def get(self, name: str, window: torch.Tensor) -> ChunkScore | None:
        """The score of a configuration on a window, if it is known."""

    def put(self, name: str, window: torch.Tensor, score: ChunkScore) -> None:
        """Keep it."""


def token_scores(log_probs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood, KL(reference || tested) and agreement of the likeliest token, for each position.

    Args:
        log_probs: `[n, vocabulary]` of the tested cache.
        reference: The same of the reference.
        targets: `[n]`, the tokens that follow.

    Returns:
        `[3, n]`, float64, on the CPU.
    """
    nll = -log_probs.gather(-1, targets[:, None])[:, 0]
    # A token that the reference rules out adds nothing, where 0 * -inf would be NaN.
    terms = torch.where(reference == -math.inf, 0.0, reference.exp() * (reference - log_probs))
    agreed = log_probs.argmax(-1) == reference.argmax(-1)
    return torch.stack([nll.double(), terms.sum(-1, dtype=torch.float64), agreed.double()]).cpu()


def chunk_score(scores: torch.Tensor, protocol: Protocol) -> ChunkScore:
    """Sums over the position bins of one window, of its `token_scores` `[3, scored]`."""
    spans = [slice(first - protocol.prefill, end - protocol.prefill) for first, end in protocol.bins()]
    nll, kl, agreed = ([float(row[span].sum()) for span in spans] for row in scores)
    return ChunkScore(
        nll=tuple(nll),
        kl=tuple(kl),
        agreed=tuple(round(count) for count in agreed),
        tokens=tuple(span.stop - span.start for span in spans),
    )


def predictions(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache, protocol: Protocol, skip_prefill: bool = False
) -> Iterator[torch.Tensor]:
    """Feed a window through `cache` and yield the predictions of its scored tokens, one tensor a piece.

    Args:
        model: Causal language model in eval mode.
        input_ids: `[context]`, integer, on the model's device.
        cache: Empty cache; holds the whole window afterwards.
        protocol: How the window is cut.
        skip_prefill: The cache holds the prefill already; its prediction, the first, is left out.

    Yields:
        Log-probabilities `[n, vocabulary]`, float32; the `n` of all pieces add up to `protocol.scored`.
    """
    for first, end in protocol.pieces()[skip_prefill:]:
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
    store: ChunkStore | None = None,
    share_prefill: bool = False,
) -> dict[str, Score]:
    """Score cache configurations against `DynamicCache` on the same windows.

    Args:
        model: Causal language model in eval mode.
        windows: `[N, context]`, integer, on the model's device; each window starts with an empty cache.
        caches: Makers of fresh caches by configuration name.
        protocol: How windows are fed.
        progress: Called with the configuration's name and a number of scored tokens as they are scored.
        store: Gives the scores of an earlier run and keeps new ones.
        share_prefill: Run the prefill once a window, with the reference, and fill the other caches with its keys and
            values, see `kvquant_hf.eval.shared_prefill`. The scores are the same. A model with layers of other kinds
            than attention runs it for each cache all the same, and caches with `attention_guard` run it themselves.

    Returns:
        Scores by name: the reference under `"DynamicCache"`, then `caches` in their order.

    Raises:
        ValueError: `windows` has another shape, or a configuration takes the reference's name.
    """
    if windows.ndim != 2 or not len(windows) or windows.shape[1] != protocol.context:
        raise ValueError(f"`windows` must have shape [N, {protocol.context}], N >= 1, got {list(windows.shape)}.")
    if REFERENCE in caches:
        raise ValueError(f"`caches` must not use the name {REFERENCE!r}, which is the reference's.")
    dense = RecordingCache if share_prefill else DynamicCache
    makers: dict[str, CacheFactory] = {REFERENCE: lambda: dense(config=model.config), **caches}
    found: dict[str, list[ChunkScore]] = {name: [] for name in makers}
    for window in windows:
        for name, score in _score_window(model, window, makers, protocol, progress, store).items():
            found[name].append(score)
    return {name: Score.of(chunks) for name, chunks in found.items()}


def _score_window(
    model: PreTrainedModel,
    window: torch.Tensor,
    makers: Mapping[str, CacheFactory],
    protocol: Protocol,
    progress: Callable[[str, int], object] | None,
    store: ChunkStore | None,
) -> dict[str, ChunkScore]:
    """Scores by name, in the order of `makers`, whose first is the reference."""
    known = {name: None if store is None else store.get(name, window) for name in makers}
    reference: torch.Tensor | None = None
    dense: Cache | None = None
    scores: dict[str, ChunkScore] = {}
    for name, make_cache in makers.items():
        score = known[name]
        if score is not None:
            if progress is not None:
                progress(name, protocol.scored)
        else:
            if reference is None:
                # Needed by every configuration that is not known yet, also where the reference's own score is.
                dense = makers[REFERENCE]()
                reference = torch.cat(list(predictions(model, window, dense, protocol)))
            tested: Iterable[torch.Tensor] = [reference]
            if name != REFERENCE:
                tested = _tested_predictions(model, window, make_cache(), protocol, dense, reference)
            parts, done = [], 0
            # Piece by piece: the predictions of a whole window fill hundreds of megabytes.
            for log_probs in tested:
                part = slice(done, done + len(log_probs))
                done = part.stop
                parts.append(token_scores(log_probs, reference[part], window[protocol.prefill :][part]))
                if progress is not None:
                    progress(name, len(log_probs))
            score = chunk_score(torch.cat(parts, dim=1), protocol)
            if store is not None:
                store.put(name, window, score)
        scores[name] = score
    return scores


def _asks_queries(cache: Cache) -> bool:
    """Whether a cache wants to see the queries of a prefill, which a recorded one does not have."""
    return isinstance(cache, QuantCache) and any(
        cache.quantized_layer(index).config.asks_queries for index in cache.quantized_layers
    )


def _tested_predictions(
    model: PreTrainedModel,
    window: torch.Tensor,
    cache: Cache,
    protocol: Protocol,
    dense: Cache | None,
    reference: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """`predictions` through a cache, its prefill taken from `dense` where that has recorded one."""
    if not isinstance(dense, RecordingCache) or not dense.is_complete or _asks_queries(cache):
        return predictions(model, window, cache, protocol)
    dense.fill(cache)
    return chain([reference[:1]], predictions(model, window, cache, protocol, skip_prefill=True))
