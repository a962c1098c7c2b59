"""The settings that a budget may choose from, for keys and for values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from kvquant_hf.checks import check_keys
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.spec import QuantSpec

SIDES = ("key", "value")
EXACT = QuantSpec(nbits=16, rope="post")
# The presets whose keys and values the default candidates are, one for each width.
_PRESETS = ("k2v2", "k3v3", "k4v4", "k8v8")
# Shares of promoted channels of 2-bit keys; wider keys have that of their preset.
_SHARES = (0.0, 0.25, 0.5)


@dataclass(frozen=True)
class Candidates:
    """Settings by name, for each side.

    Attributes:
        key: Settings of keys.
        value: Settings of values.

    Raises:
        ValueError: A side has none, or two names of a side stand for the same setting.
    """

    key: Mapping[str, QuantSpec]
    value: Mapping[str, QuantSpec]

    def __post_init__(self) -> None:
        for side in SIDES:
            specs = getattr(self, side)
            if not specs:
                raise ValueError(f"`candidates` must name at least one setting of `{side}`, got none.")
            names: dict[QuantSpec, str] = {}
            for name, spec in specs.items():
                if spec in names:
                    raise ValueError(f"`candidates` must differ, got {names[spec]!r} and {name!r} of `{side}` alike.")
                names[spec] = name
            object.__setattr__(self, side, MappingProxyType(dict(specs)))

    def of(self, side: str) -> Mapping[str, QuantSpec]:
        """Those of `key` or of `value`."""
        specs: Mapping[str, QuantSpec] = getattr(self, side)
        return specs

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested dictionary, as YAML takes it."""
        return {side: {name: asdict(spec) for name, spec in self.of(side).items()} for side in SIDES}


def default_candidates() -> Candidates:
    """2, 3, 4 and 8 bits as the presets store them, keys of 2 bits with other shares of promoted channels, too."""
    presets = [KVQuantConfig.from_preset(name) for name in _PRESETS]
    keys = [replace(presets[0].key, promoted=share) for share in _SHARES] + [preset.key for preset in presets[1:]]
    named = {f"k{key.nbits}" + (f"p{100 * key.promoted:.0f}" if key.promotes else ""): key for key in keys}
    return Candidates(named, {f"v{preset.value.nbits}": preset.value for preset in presets})


def load_candidates(path: Path) -> Candidates:
    """Candidates from a YAML file.

    It maps `key` and `value` each to named settings; what a setting leaves out is that of `KVQuantConfig()`. A side
    that is left out keeps its default candidates.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not YAML, or a setting is unknown or not allowed; the file is named.
    """
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_keys("candidates", plain, SIDES)
        default, base = default_candidates(), KVQuantConfig()
        return Candidates(
            **{
                side: _named(side, plain[side], getattr(base, side)) if side in plain else default.of(side)
                for side in SIDES
            }
        )
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} holds no candidates: {error}") from error


def _named(side: str, plain: Any, base: QuantSpec) -> dict[str, QuantSpec]:
    if not isinstance(plain, Mapping):
        raise ValueError(f"`{side}` must map names to settings, got {plain!r}.")
    specs = {}
    for name, setting in plain.items():
        check_keys(f"{side}.{name}", setting, tuple(item.name for item in fields(QuantSpec)))
        specs[str(name)] = replace(base, **setting)
    return specs
