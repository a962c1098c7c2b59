"""Run files of the analysis: models, text, cache settings, and the published claims they are to test."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kvquant_hf.analysis.claims import Claim
from kvquant_hf.checks import check_choice, check_keys
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.eval.score import Protocol
from kvquant_hf.eval.settings import parse_quant

_OWN_KEYS = ("base",)


@dataclass(frozen=True)
class Ablation:
    """What to measure.

    Attributes:
        name: Names the output directory.
        settings: Cache settings by name.
        text: UTF-8 text.
        models: Directories, hub ids or `prepared:NAME`.
        title: Heading of the report.
        description: What the report says first.
        start: Where the text begins, see `kvquant_hf.eval.locate`.
        windows: Windows of the text.
        protocol: How windows are fed.
        queries: Queries whose attention is looked at: those of the last tokens of each window.
        scores: Whether predictions through the stored history are scored, too.
        claims: Published findings to test.
    """

    name: str
    settings: Mapping[str, KVQuantConfig]
    text: Path
    models: tuple[str, ...]
    title: str = "Errors of attention"
    description: str = ""
    start: str = "0"
    windows: int = 2
    protocol: Protocol = field(default_factory=Protocol)
    queries: int = 128
    scores: bool = True
    claims: tuple[Claim, ...] = ()

    def __post_init__(self) -> None:
        for name in ("windows", "queries"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be an integer >= 1, got {value!r}.")
        for name in ("settings", "models"):
            if not getattr(self, name):
                raise ValueError(f"`{name}` must name at least one.")
        check_choice("scores", self.scores, (False, True))
        scored = [claim.name for claim in self.claims if claim.is_scored]
        if scored and not self.scores:
            raise ValueError(f"`scores` must be true for the claims {scored}, got False.")

    def replace(self, **changes: Any) -> "Ablation":
        """A copy with other fields; those that are `None` stay as they are."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, all settings resolved; the text by its name only."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain |= {
            "text": self.text.name,
            "models": list(self.models),
            "protocol": asdict(self.protocol),
            "settings": {name: config.to_dict() for name, config in self.settings.items()},
            "claims": [asdict(claim) for claim in self.claims],
        }
        return plain


def load_ablation(path: Path) -> Ablation:
    """An ablation from a YAML file.

    The fields are those of `Ablation`. `base` holds cache settings that all of `settings` start from; each of these is
    a mapping of changes to it, or the words of a command line (`k2v2,residual_length=64`). The path of the text is
    relative to the file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not YAML, or a field is unknown, missing or not allowed; the file is named.
    """
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _from_dict(path, plain)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is no ablation: {error}") from error


def _from_dict(path: Path, plain: Any) -> Ablation:
    known = tuple(item.name for item in fields(Ablation) if item.name != "name")
    check_keys("ablation", plain, (*known, *_OWN_KEYS))
    missing = [name for name in ("settings", "text", "models") if name not in plain]
    if missing:
        raise ValueError(f"it lacks {missing}.")
    settings = _settings(plain["settings"], plain.get("base", {}))
    given = {name: value for name, value in plain.items() if name not in _OWN_KEYS}
    protocol = given.get("protocol", {})
    check_keys("protocol", protocol, tuple(item.name for item in fields(Protocol)))
    claims = given.get("claims", [])
    if not isinstance(claims, Sequence) or isinstance(claims, str):
        raise ValueError(f"`claims` must be a list, got {claims!r}.")
    given |= {
        "settings": settings,
        "text": path.parent / str(plain["text"]),
        "models": tuple(plain["models"]),
        "start": str(given.get("start", "0")),
        "protocol": Protocol(**protocol),
        "claims": tuple(Claim.from_dict(claim, list(settings)) for claim in claims),
    }
    return Ablation(name=path.stem, **given)


def _settings(plain: Any, base: Any) -> dict[str, KVQuantConfig]:
    if not isinstance(plain, Mapping):
        raise ValueError(f"`settings` must map names to cache settings, got {plain!r}.")
    start = KVQuantConfig.resolve(base) if not isinstance(base, str) else parse_quant(base)
    return {
        str(name): parse_quant(change) if isinstance(change, str) else start.replace(**(change or {}))
        for name, change in plain.items()
    }
