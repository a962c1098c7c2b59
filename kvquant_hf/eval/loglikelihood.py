"""Log-likelihood of continuations that were read through the cache.

The usual log-likelihood is one forward pass, in which attention never reads the cache: every cache would give the
numbers of the dense one. Here a context is prefilled up to its last token; that token and the continuation are then
decoded, so that each scored token attends to the history as the cache gives it back. (The last context token must be
decoded, since a prefill attends to its own exact keys and values: scored from its logits, a continuation of one token
would read nothing from the cache.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvquant_hf._compat import cache_kwargs
from kvquant_hf.cache import QuantCache

MODES = ("decode", "chunked", "plain")


@dataclass
class Row:
    """One sequence to feed, and what is asked about it.

    Attributes:
        prefill: Tokens fed at once, unscored; may be empty.
        fed: Tokens decoded: the last of the context, then the continuation without its last token.
        targets: Continuations by the number of their request, each as long as `fed`. Requests that differ in the last
            token only, as the letters of a multiple-choice question do, share a row.
    """

    prefill: tuple[int, ...]
    fed: tuple[int, ...]
    targets: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int, tuple[int, ...]]:
        """Longest first, so that rows of like length share a batch and memory runs out at once or never."""
        return -len(self.prefill), -len(self.fed), self.prefill + self.fed


def rows_of(requests: Sequence[tuple[Sequence[int], Sequence[int]]], max_length: int) -> list[Row]:
    """Rows of `(context, continuation)` token pairs, sorted; contexts too long are cut from the left.

    Args:
        requests: Token ids; both parts hold at least one token.
        max_length: Most tokens that the model may be fed.

    Raises:
        ValueError: A part is empty, or a continuation alone is longer than `max_length`.
    """
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], Row] = {}
    for number, (context, continuation) in enumerate(requests):
        if not context or not 0 < len(continuation) <= max_length:
            raise ValueError(
                f"`requests` must hold contexts of at least 1 token and continuations of 1 to {max_length} tokens, "
                f"got {len(context)} and {len(continuation)}."
            )
        tokens = [*context, *continuation][-(max_length + 1) :][:-1]
        border = len(tokens) - len(continuation)
        prefill, fed = tuple(tokens[:border]), tuple(tokens[border:])
        row = rows.setdefault((prefill, fed), Row(prefill, fed))
        row.targets[number] = tuple(continuation)
    return sorted(rows.values(), key=lambda row: row.order)


def batches_of(rows: Sequence[Row], batch_size: int) -> Iterator[list[Row]]:
    """Consecutive batches; rows without a prefill are kept apart, since a row of padding alone attends to nothing."""
    for group in ([row for row in rows if row.prefill], [row for row in rows if not row.prefill]):
        for first in range(0, len(group), batch_size):
            yield group[first : first + batch_size]


def decoded_log_probs(
    model: PreTrainedModel,
    rows: Sequence[Row],
    cache: Cache,
    step: int = 1,
    pad_token_id: int = 0,
    softmax_dtype: torch.dtype | None = None,
) -> Iterator[torch.Tensor]:
    """Prefill a batch of rows and decode what they feed.

    Args:
        model: Causal language model in eval mode.
        rows: One batch.
        cache: Empty cache.
        step: Tokens of a decode call.
        pad_token_id: Fills the left of shorter prefills and the right of shorter continuations.
        softmax_dtype: Type in which log-probabilities are computed; that of the logits by default.

    Yields:
        Log-probabilities `[B, n, vocabulary]` of the tokens that follow the `n <= step` tokens just fed.
    """
    lengths = [len(row.prefill) for row in rows]
    longest, feeds = max(lengths), max(len(row.fed) for row in rows)
    padded = [[pad_token_id] * (longest - len(row.prefill)) + list(row.prefill) for row in rows]
    fed = [list(row.fed) + [pad_token_id] * (feeds - len(row.fed)) for row in rows]
    # Weights offloaded to disk lie on `meta`; the hooks that load them bring their inputs along.
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    prompt = torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(rows), longest)
    tail = torch.tensor(fed, dtype=torch.int64, device=device)
    starts = torch.tensor(lengths, device=device)[:, None]
    # Continuation slots count as real in every row: a shorter row's scores are complete before its padding begins.
    slots = torch.arange(longest + feeds, device=device)[None]
    mask = (slots >= longest - starts).long()
    positions = (slots - (longest - starts)).clamp(min=0)
    if isinstance(cache, QuantCache) and longest and min(lengths) < longest:
        cache.set_padding(mask[:, :longest])

    def feed(ids: torch.Tensor, end: int, **more: int) -> torch.Tensor:
        span = slice(end - ids.shape[1], end)
        with torch.no_grad():
            outputs = model(
                input_ids=ids,
                attention_mask=mask[:, :end],
                position_ids=positions[:, span],
                use_cache=True,
                **more,
                **cache_kwargs(cache),
            )
        logits: torch.Tensor = outputs.logits
        return logits

    if longest:
        feed(prompt, longest, logits_to_keep=1)
    for first in range(0, feeds, step):
        piece = tail[:, first : first + step]
        yield log_softmax(feed(piece, longest + first + piece.shape[1]), dim=-1, dtype=softmax_dtype)


def gather_targets(rows: Sequence[Row], pieces: Iterator[torch.Tensor]) -> dict[int, tuple[float, bool]]:
    """Sums of target log-probabilities and whether every target was the likeliest token, by request number.

    Args:
        rows: The batch.
        pieces: What `decoded_log_probs` yields for it.
    """
    sums: dict[int, float] = {number: 0.0 for row in rows for number in row.targets}
    greedy = dict.fromkeys(sums, True)
    first = 0
    for log_probs in pieces:
        likeliest = log_probs.argmax(-1)
        for i, row in enumerate(rows):
            for number, targets in row.targets.items():
                wanted = torch.tensor(targets[first : first + log_probs.shape[1]], device=log_probs.device)
                if len(wanted):
                    found = log_probs[i, : len(wanted)].gather(-1, wanted[:, None])
                    sums[number] += float(found.sum())
                    greedy[number] &= bool((likeliest[i, : len(wanted)] == wanted).all())
        first += log_probs.shape[1]
    return {number: (sums[number], greedy[number]) for number in sums}


def chunked_logits(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache, chunk: int) -> torch.Tensor:
    """Logits of right-padded rows, fed in chunks that attend to the earlier ones through the cache.

    Args:
        model: Causal language model in eval mode.
        input_ids: `[B, T]`; padding follows the tokens of a row, which therefore never attend to it.
        cache: Empty cache.
        chunk: Tokens of a forward call. The first chunk reads no cache.

    Returns:
        `[B, T, vocabulary]`.
    """
    with torch.no_grad():
        pieces = [
            model(input_ids=piece, use_cache=True, **cache_kwargs(cache)).logits
            for piece in input_ids.split(chunk, dim=1)
        ]
    return torch.cat(pieces, dim=1)
