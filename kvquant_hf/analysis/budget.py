"""Budgets: what a cache may cost in error or in size."""

from dataclasses import dataclass, fields

import numpy as np

KINDS = ("kl", "attention", "bits", "bytes")
_UNITS = {"kl": "nats", "key_kl": "nats", "value_error": "", "bits": "bits per value", "bytes": "bytes"}
_WORDS = {
    "kl": "KL of the predictions",
    "key_kl": "KL of attention probabilities from keys",
    "value_error": "relative error of the attention output from values",
    "bits": "average size of the quantized part",
    "bytes": "size of the cache",
}


@dataclass(frozen=True)
class Budget:
    """What may be spent: exactly one of an error of predictions, two errors of attention, or a size.

    Attributes:
        kl: KL of the predictions, dense cache against quantized one, nats a token.
        key_kl: KL of attention probabilities with quantized keys, nats, mean over queries, heads and layers.
        value_error: Relative error of the attention output with quantized values, mean over heads and layers.
        bits: Average bits per value of the quantized part, scales and zero points included.
        bytes: Bytes of the whole cache of one sequence of `context_length` tokens.
        context_length: Tokens that `bytes` is about.

    Raises:
        ValueError: None, several or half of them are set, or one is not above zero.
    """

    kl: float | None = None
    key_kl: float | None = None
    value_error: float | None = None
    bits: float | None = None
    bytes: int | None = None
    context_length: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise ValueError(f"`{item.name}` must be a number above 0, got {value!r}.")
        given = [item.name for item in fields(self) if getattr(self, item.name) is not None]
        groups = (["kl"], ["key_kl", "value_error"], ["bits"], ["bytes", "context_length"])
        if given not in groups:
            allowed = "`kl`, `key_kl` with `value_error`, `bits`, `bytes` with `context_length`"
            raise ValueError(f"the budget must be exactly one of {allowed}; got {given or 'none'}.")

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return "attention" if self.key_kl is not None else next(k for k in KINDS if getattr(self, k, None) is not None)

    @property
    def is_error(self) -> bool:
        """Whether an error is given and the size is to be small, rather than the other way round."""
        return self.kind in ("kl", "attention")

    @property
    def limits(self) -> dict[str, float]:
        """What is limited, by name."""
        names = ("key_kl", "value_error") if self.kind == "attention" else (self.kind,)
        return {name: float(getattr(self, name)) for name in names}

    @property
    def error_names(self) -> tuple[str, ...]:
        """The errors that are predicted and measured."""
        return ("key_kl", "value_error") if self.kind == "attention" else ("kl",)

    def __str__(self) -> str:
        texts = [f"{_WORDS[name]} at most {amount(name, limit)}" for name, limit in self.limits.items()]
        tokens = f" at {self.context_length:,} tokens" if self.context_length else ""
        return ", ".join(texts) + tokens


def amount(name: str, value: float) -> str:
    """A limited quantity with its unit."""
    number = f"{value:,.0f}" if name == "bytes" else f"{value:.4g}"
    return f"{number} {_UNITS[name]}".rstrip()
