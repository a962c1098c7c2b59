"""The SQuAD answer metrics under the module name that lm-eval's question-answering tasks import.

lm-eval 0.4.13 takes them from `transformers.data.metrics.squad_metrics`, which Transformers no longer has. Definitions
follow Rajpurkar et al. (2016), arXiv 1606.05250, section 6.1: answers are compared without case, punctuation and
articles; F1 is that of their bags of words.
"""

import importlib
import re
import string
import sys
from collections import Counter
from types import ModuleType

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PARENT = "transformers.data.metrics"


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, words separated by single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def get_tokens(text: str) -> list[str]:
    """Words of the normalized text."""
    return normalize_answer(text).split() if text else []


def compute_exact(gold: str, predicted: str) -> int:
    """1 where both normalize to the same text, else 0."""
    return int(normalize_answer(gold) == normalize_answer(predicted))


def compute_f1(gold: str, predicted: str) -> float:
    """F1 of the bags of words; of an answer without words, whether the other has none either."""
    gold_words, predicted_words = Counter(get_tokens(gold)), Counter(get_tokens(predicted))
    if not gold_words or not predicted_words:
        return float(gold_words == predicted_words)
    shared = (gold_words & predicted_words).total()
    # 2PR / (P + R) with P = shared / predicted and R = shared / gold.
    return 2 * shared / (gold_words.total() + predicted_words.total())


def provide_squad_metrics() -> bool:
    """Make `transformers.data.metrics.squad_metrics` importable where Transformers lacks it.

    Returns:
        Whether this module had to stand in.
    """
    try:
        importlib.import_module(f"{_PARENT}.squad_metrics")
    except ModuleNotFoundError:
        this = sys.modules[__name__]
        parent = sys.modules.setdefault(_PARENT, ModuleType(_PARENT))
        parent.__path__ = []  # a package, so that its submodule is looked up at all
        parent.squad_metrics = this  # type: ignore[attr-defined]
        sys.modules[f"{_PARENT}.squad_metrics"] = this
        return True
    return sys.modules[f"{_PARENT}.squad_metrics"] is sys.modules[__name__]
