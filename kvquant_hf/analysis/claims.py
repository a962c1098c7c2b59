"""Published findings as tests that a measurement passes or fails.

Every claim names an effect, how large it was where it was published, and where. It counts as reproduced if the effect
measured here has the same direction and at least half the published size (of ratios, half on a logarithmic scale, that
is, the square root). Models, texts and metrics differ from the published ones, so closer agreement would mean nothing;
the rule is the same for all claims and was fixed before anything was measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvquant_hf.analysis.measures import ERRORS
from kvquant_hf.checks import check_choice, check_keys

SCORES = ("kl", "perplexity", "top1")
# What an effect is computed of, by kind.
_SETTINGS = {"ratio": ("worse", "better"), "difference": ("worse", "better"), "share": ("none", "some", "full")}
_SETTINGS["lost"] = ("setting",)
EFFECTS = tuple(_SETTINGS)
_FIELDS = ("name", "text", "metric", "effect", "published", "figures", "source", "note")


@dataclass(frozen=True)
class Claim:
    """One published finding.

    Attributes:
        name: One word for tables.
        text: The finding.
        metric: What is compared: a name of `measures.ERRORS` (mean over heads and layers), or `kl`, `perplexity`,
            `top1` through the stored history.
        effect: `ratio` (worse / better), `difference` (worse - better), `share` of what `full` gains over `none` that
            `some` gains, or `lost` (1 - value).
        settings: Names of the settings in the order of the effect: worse, better; none, some, full; setting.
        published: The published effect, or `None` where only its direction is known.
        figures: The published numbers in words.
        source: Paper, table, model.
        note: Where the published metric is another one, or anything else a reader should know.
    """

    name: str
    text: str
    metric: str
    effect: str
    settings: tuple[str, ...]
    published: float | None
    figures: str
    source: str
    note: str = ""

    @property
    def needed(self) -> float:
        """The least effect that counts as reproduced."""
        if self.published is None:
            return 1.0 if self.effect == "ratio" else 0.0
        return math.sqrt(self.published) if self.effect == "ratio" else self.published / 2

    @property
    def is_scored(self) -> bool:
        """Whether the claim is about predictions rather than attention."""
        return self.metric in SCORES

    def measure(self, value: Callable[[str], float]) -> float:
        """The effect, from the metric's value by setting."""
        found = [value(name) for name in self.settings]
        if self.effect == "ratio":
            return found[0] / found[1] if found[1] else math.inf
        if self.effect == "difference":
            return found[0] - found[1]
        if self.effect == "share":
            return (found[0] - found[1]) / (found[0] - found[2]) if found[0] != found[2] else math.nan
        return 1 - found[0]

    def holds(self, effect: float) -> bool:
        """Whether a measured effect is at least the one needed; of a mere direction, more than none."""
        # A share of nothing gained is no share.
        return effect > self.needed if self.published is None else effect >= self.needed

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], settings: Sequence[str]) -> "Claim":
        """A claim as a run file writes it.

        Args:
            plain: The fields, with `worse`, `better` and so on in place of `settings`.
            settings: Settings of the run file.

        Raises:
            ValueError: A field is missing, unknown or names no setting or metric.
        """
        check_choice("effect", plain.get("effect"), EFFECTS)
        roles = _SETTINGS[plain["effect"]]
        check_keys("claim", plain, (*_FIELDS, *roles))
        missing = [name for name in (*_FIELDS[:-1], *roles) if name not in plain]
        if missing:
            raise ValueError(f"claim {plain.get('name')!r} lacks {missing}.")
        check_choice("metric", plain["metric"], (*ERRORS, *SCORES))
        for role in roles:
            check_choice(role, plain[role], settings)
        published = plain["published"]
        if published is not None and (not isinstance(published, (int, float)) or published <= 0):
            raise ValueError(f"`published` must be a number > 0 or null, got {published!r}.")
        fields = {name: plain[name] for name in _FIELDS if name in plain}
        return cls(**fields, settings=tuple(plain[role] for role in roles))


@dataclass(frozen=True)
class Verdict:
    """What a measurement says about a claim.

    Attributes:
        claim: The claim.
        values: The metric by setting.
        effect: The measured effect.
        windows: Effects of the single windows.
    """

    claim: Claim
    values: Mapping[str, float]
    effect: float
    windows: tuple[float, ...]

    @property
    def is_reproduced(self) -> bool:
        """Whether the effect is as large as needed; not where it could not be computed."""
        return self.claim.holds(self.effect)

    @property
    def word(self) -> str:
        """`reproduced`, or `not reproduced` with what was seen instead."""
        if self.is_reproduced:
            return "reproduced"
        neutral = 1 if self.claim.effect == "ratio" else 0
        return "not reproduced (same direction, smaller)" if self.effect > neutral else "not reproduced"

    @property
    def agreeing(self) -> int:
        """Windows that pass the test by themselves."""
        return sum(self.claim.holds(effect) for effect in self.windows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        claim = self.claim
        return {
            "name": claim.name,
            "text": claim.text,
            "verdict": self.word,
            "reproduced": self.is_reproduced,
            "metric": claim.metric,
            "effect": claim.effect,
            "published": claim.published,
            "published_figures": claim.figures,
            "source": claim.source,
            "note": claim.note,
            "needed": claim.needed,
            "measured": self.effect,
            "measured_values": dict(self.values),
            "windows": list(self.windows),
        }


def judge(claim: Claim, value: Callable[[str, int | None], float], windows: int) -> Verdict:
    """Test a claim.

    Args:
        claim: The claim.
        value: Its metric by setting, of one window or, for `None`, of all.
        windows: Number of windows.
    """

    def effect(window: int | None) -> float:
        return claim.measure(lambda name: value(name, window))

    values = {name: value(name, None) for name in claim.settings}
    return Verdict(claim, values, effect(None), tuple(effect(window) for window in range(windows)))


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """A line or two for each verdict, with both numbers."""
    lines = []
    for verdict in verdicts:
        claim = verdict.claim
        measured = ", ".join(f"{name}: {value:.4g}" for name, value in verdict.values.items())
        published = "direction only" if claim.published is None else f"{claim.effect} {claim.published:.3g}"
        lines.append(f"[{verdict.word}] {claim.text}")
        lines.append(f"    published: {published} ({claim.figures}; {claim.source})")
        lines.append(
            f"    measured:  {claim.effect} {verdict.effect:.3g}, needed {claim.needed:.3g}, alone in "
            f"{verdict.agreeing} of {len(verdict.windows)} windows ({claim.metric}; {measured})"
        )
    return lines
