"""The presets: YAML files shipped with the package, one cache configuration each."""

from functools import cache
from pathlib import Path

import yaml

from kvquant_hf.checks import nearest
from kvquant_hf.config import KVQuantConfig

# Shipped inside the package in a wheel; beside it in a checkout, where they are edited.
_PLACES = (
    Path(__file__).parent / "configs" / "presets",
    Path(__file__).parent.parent / "configs" / "presets",
)


@cache
def _preset_paths() -> dict[str, Path]:
    for place in _PLACES:
        if place.is_dir():
            return {path.stem: path for path in sorted(place.glob("*.yaml"))}
    raise FileNotFoundError("kvquant_hf was installed without its presets; reinstall the package.")


def preset_path(name: str) -> Path:
    """Path of the YAML file of a preset.

    Raises:
        ValueError: There is no preset of that name; all are named, and the nearest one.
    """
    paths = _preset_paths()
    if name not in paths:
        raise ValueError(
            f"`quant` must be a preset name ({', '.join(paths)}) or the path of a YAML file (*.yaml), got {name!r}."
            f"{nearest(name, paths)}"
        )
    return paths[name]


def list_presets() -> dict[str, str]:
    """Presets by name, each with one line: what it is and its bits per value (quantized part, head size 64)."""
    lines = {}
    for name, path in _preset_paths().items():
        description = yaml.safe_load(path.read_text(encoding="utf-8"))["description"]
        bits = KVQuantConfig.from_yaml(path).nominal_bits(head_dim=64)
        lines[name] = f"{description} ({bits:g} bits per value)"
    return lines
