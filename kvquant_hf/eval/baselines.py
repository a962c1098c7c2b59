"""Transformers' own quantized caches, as makers of fresh caches by name."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, QuantizedCache
from transformers.cache_utils import Cache

_NAME = re.compile(r"^([a-z0-9-]+?)(?::(\d+))?$")


@dataclass(frozen=True)
class Baseline:
    """One setting of `transformers.QuantizedCache`.

    Attributes:
        backend: Its `backend`.
        nbits: Bit widths it can store; the first one is the default, none where the backend has one width.
        options: Further arguments.
        package: What must be installed.
    """

    backend: str
    nbits: tuple[int, ...] = ()
    options: dict[str, int] = field(default_factory=dict)
    package: str | None = None


BASELINES = {
    "hf-quanto": Baseline("quanto", (4, 2), package="optimum-quanto"),
    # Keys per channel, as in KIVI; Transformers' default shares a scale along the head dimension.
    "hf-quanto-channel": Baseline("quanto", (4, 2), {"axis_key": -1}, "optimum-quanto"),
    "hf-hqq": Baseline("hqq", (4, 2, 3, 8), package="hqq"),
    "hf-fp8": Baseline("fp8"),
}


def baseline_factory(name: str, config: PreTrainedConfig) -> Callable[[], Cache]:
    """Maker of fresh caches for a baseline such as `hf-quanto` or, with the bit width, `hf-quanto:2`.

    Raises:
        ValueError: There is no such baseline or it cannot store that width, or it does not serve this model.
        ImportError: Its package is not installed; the message names it.
    """
    match = _NAME.match(name)
    baseline = BASELINES.get(match[1]) if match else None
    if match is None or baseline is None:
        raise ValueError(f"`baseline` must be one of {sorted(BASELINES)}, optionally with `:nbits`, got {name!r}.")
    options: dict[str, Any] = dict(baseline.options)
    if baseline.nbits:
        options["nbits"] = int(match[2] or baseline.nbits[0])
    if (match[2] and not baseline.nbits) or (baseline.nbits and options["nbits"] not in baseline.nbits):
        raise ValueError(f"`nbits` of {match[1]} must be one of {sorted(baseline.nbits)}, got {match[2]}.")

    def make_cache() -> Cache:
        return QuantizedCache(baseline.backend, config, **options)

    try:
        make_cache()
    except ImportError as error:
        raise ImportError(f"Baseline {name!r} needs {baseline.package}: run `make venv-baselines`.") from error
    return make_cache
