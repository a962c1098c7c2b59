"""Retrieval from a long context, over a grid of prompt lengths and depths, generated from a seed.

Three kinds of context, each asking for one number of seven digits: `needle` hides one sentence in a long text (after
Kamradt's needle in a haystack), with `distractors` many like it hide among it (multi-key retrieval of RULER, Hsieh et
al. 2024, arXiv 2404.06654, section 3), and `key_value` is lines of keys and values alone (LongEval's line retrieval).
Prompts depend on the seed, the text and the tokenizer only.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvquant_hf.checks import check_choice
from kvquant_hf.eval.tasks import data_file

KINDS = ("needle", "key_value")
DEFAULT_TEXT = "pride_and_prejudice_17_chapters.txt"
_COLOURS = (
    "amber ash azure beige black blue bronze brown copper coral cream crimson cyan dark ebony emerald fawn gold green "
    "grey hazel indigo ivory jade khaki lemon lilac lime maroon mauve mint navy olive orange peach pearl pink plum "
    "purple red ruby rust scarlet silver tan teal violet white"
)
_ANIMALS = (
    "ant badger bat bear beaver bee bison boar buck bull camel cat cobra cod colt crab crane crow deer dog dove duck "
    "eagle eel elk falcon finch fox frog goat goose hare hawk hen heron horse lark lion lynx mole moose mouse otter "
    "owl rabbit seal tiger wolf"
)
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|\n\s*\n")


@dataclass(frozen=True)
class Grid:
    """What prompts are made.

    Attributes:
        lengths: Most tokens of a prompt, one column of the grid each.
        depths: Where the asked fact stands, 0 (beginning) to 1 (end), one row of the grid each.
        trials: Prompts of each cell.
        seed: Decides keys, numbers and places of the text.
        distractors: Further facts of the same form, spread over a `needle` text.

    Raises:
        ValueError: A value is out of its range; the message names it.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 2
    seed: int = 0
    distractors: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or any(not isinstance(n, int) or n < 64 for n in self.lengths):
            raise ValueError(f"`needle_lengths` must be integers >= 64 (tokens), got {list(self.lengths)}.")
        if not self.depths or any(not 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"`needle_depths` must be numbers from 0 to 1, got {list(self.depths)}.")
        if self.trials < 1 or self.distractors < 0:
            raise ValueError(
                f"`needle_trials` must be >= 1 and `distractors` >= 0, got {self.trials} and {self.distractors}."
            )


def retrieval(
    kind: str = "needle",
    needle_lengths: Sequence[int] = Grid.lengths,
    needle_depths: Sequence[float] = Grid.depths,
    needle_trials: int = Grid.trials,
    needle_seed: int = Grid.seed,
    needle_text: str | None = None,
    distractors: int = Grid.distractors,
    tokenizer: str | None = None,
    pretrained: str | None = None,
    data_dir: str | None = None,
    **_: Any,
) -> dict[str, Dataset]:
    """The `custom_dataset` of the retrieval tasks; lm-eval passes the model's arguments and the metadata.

    Args:
        kind: `needle` or `key_value`.
        needle_lengths: See `Grid`; the other `needle_` arguments likewise.
        needle_depths: See `Grid`.
        needle_trials: See `Grid`.
        needle_seed: See `Grid`.
        needle_text: Path of a long UTF-8 text; by default the one shipped in `data/`.
        distractors: See `Grid`.
        tokenizer: Name or directory of the tokenizer that measures lengths, by default that of `pretrained`.
        pretrained: The model.
        data_dir: See `kvquant_hf.eval.tasks.data_file`.

    Returns:
        Split `test` of rows `prompt`, `key`, `answer`, `length`, `depth`, `trial`, `tokens`.

    Raises:
        ValueError: A setting is not allowed, no tokenizer is named, or the text is too short.
        FileNotFoundError: There is no such text.
    """
    check_choice("kind", kind, KINDS)
    source = tokenizer or pretrained
    if not source:
        raise ValueError("`tokenizer` must be named where `pretrained` is not, got neither.")
    grid = Grid(tuple(needle_lengths), tuple(needle_depths), needle_trials, needle_seed, distractors)
    path = Path(needle_text) if needle_text else data_file(DEFAULT_TEXT, data_dir)
    return {"test": Dataset.from_list(prompts(kind, grid, _tokenizer(source), path.read_text(encoding="utf-8")))}


@cache
def _tokenizer(source: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    return tokenizer


def _names() -> list[str]:
    return [f"{colour} {animal}" for colour in _COLOURS.split() for animal in _ANIMALS.split()]


def prompts(kind: str, grid: Grid, tokenizer: PreTrainedTokenizerBase, text: str) -> list[dict[str, Any]]:
    """All prompts of a grid, the shortest first; see `retrieval`."""
    sentences = [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]
    counts = [len(ids) for ids in tokenizer(sentences, add_special_tokens=False, verbose=False).input_ids]
    rows = []
    for length, depth, trial in product(grid.lengths, grid.depths, range(grid.trials)):
        # A generator of its own for each cell: a prompt does not change when the grid grows.
        rng = random.Random(f"{grid.seed} {kind} {length} {depth} {trial}")
        keys = rng.sample(_names(), 1 + grid.distractors)
        maker = _Prompt(tokenizer, length, depth, rng)
        row = maker.needle(sentences, counts, keys) if kind == "needle" else maker.key_value()
        rows.append({**row, "length": length, "depth": depth, "trial": trial})
    return rows


@dataclass(frozen=True)
class _Prompt:
    """The making of one prompt."""

    tokenizer: PreTrainedTokenizerBase
    length: int
    depth: float
    rng: random.Random

    def _tokens(self, text: str) -> int:
        return len(self.tokenizer(text, verbose=False).input_ids)

    def _number(self) -> str:
        return str(self.rng.randrange(10**6, 10**7))

    def _row(self, context: str, key: str, answer: str) -> dict[str, Any]:
        asked = f"access number of the {key}"
        prompt = f"{context}\n\nQuestion: What is the {asked}?\nAnswer: The {asked} is"
        return {"prompt": prompt, "key": key, "answer": answer, "tokens": self._tokens(prompt)}

    def needle(self, sentences: Sequence[str], counts: Sequence[int], keys: Sequence[str]) -> dict[str, Any]:
        """Sentences of the text from a random place on, the fact among them at its depth."""
        facts = [f"The access number of the {key} is {self._number()}." for key in keys]
        frame = self._row("", keys[0], "")["tokens"]
        # A sentence costs its tokens and the blank before it, which most tokenizers join to the first word.
        budget = self.length - frame - sum(self._tokens(fact) + 1 for fact in facts)
        if budget < 1 or sum(counts) + len(counts) < budget:
            raise ValueError(
                f"`needle_lengths` must leave room for {len(facts)} facts and not exceed the "
                f"{sum(counts)} tokens of the text, got {self.length}."
            )
        start = self._start(counts, budget)
        end = start
        while end < len(counts) and (cost := counts[end] + 1) <= budget:
            budget -= cost
            end += 1
        hay = list(zip(sentences[start:end], counts[start:end], strict=True))
        for fact in facts[1:]:
            hay.insert(self.rng.randint(0, len(hay)), (fact, self._tokens(fact)))
        hay.insert(self._place([cost for _, cost in hay]), (facts[0], 0))
        return self._row(" ".join(text for text, _ in hay), keys[0], facts[0].rpartition(" ")[2].rstrip("."))

    def _start(self, counts: Sequence[int], budget: int) -> int:
        """A random sentence after which the text still holds `budget` tokens."""
        left, last = 0, len(counts)
        while left < budget and last:
            last -= 1
            left += counts[last] + 1
        return self.rng.randint(0, last)

    def _place(self, costs: Sequence[int]) -> int:
        """Number of pieces before the border that lies nearest to the depth, in tokens."""
        borders = [0, *accumulate(costs)]
        return min(range(len(borders)), key=lambda i: abs(borders[i] - self.depth * borders[-1]))

    def key_value(self) -> dict[str, Any]:
        """As many lines of keys and numbers as fit."""
        names = _names()
        self.rng.shuffle(names)
        head = "Access numbers:"
        budget = self.length - self._row(head, "emerald falcon", "")["tokens"]
        lines: list[tuple[str, str]] = []
        for name in names:
            number = self._number()
            budget -= self._tokens(f"\n{name}: {number}")
            if budget < 0:
                break
            lines.append((name, number))
        else:
            raise ValueError(
                f"`needle_lengths` must need at most {len(names)} lines of keys, got {self.length} tokens."
            )
        if not lines:
            raise ValueError(f"`needle_lengths` must leave room for one line, got {self.length}.")
        key, answer = lines[min(round(self.depth * len(lines)), len(lines) - 1)]
        context = "\n".join([head, *(f"{name}: {number}" for name, number in lines)])
        return self._row(context, key, answer)


def score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """`retrieved`: 1 where the first number of the answer is the one asked for, else 0."""
    found = re.search(r"\d[\d,]*", results[0])
    return {"retrieved": float(found is not None and found[0].replace(",", "") == doc["answer"])}
