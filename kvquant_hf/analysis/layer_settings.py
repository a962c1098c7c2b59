"""Cache settings that differ from layer to layer."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvquant_hf.analysis.candidates import EXACT
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.spec import QuantSpec


def single_config(frame: KVQuantConfig, index: int, side: str, spec: QuantSpec) -> KVQuantConfig:
    """Settings that quantize one side of one layer and leave all else exact."""
    return frame.replace(key=EXACT, value=EXACT, layers={index: {side: asdict(spec)}})


def allocation_config(frame: KVQuantConfig, specs: Mapping[int, tuple[QuantSpec, QuantSpec]]) -> KVQuantConfig:
    """Settings with keys and values of each layer as given.

    The most frequent pair is that of the whole cache; other layers are exceptions that name what differs, neighbours
    with the same exception in one range.

    Args:
        frame: Windows and backend.
        specs: Keys and values by layer.
    """
    (key, value), _ = Counter(specs.values()).most_common(1)[0]
    layers: dict[int | str, Mapping[str, Any]] = {}
    run: list[int] = []
    changes = {index: changes_between(key, value, *pair) for index, pair in specs.items()}
    for index in sorted(changes):
        if run and (index != run[-1] + 1 or changes[index] != changes[run[0]]):
            layers |= _entry(run, changes[run[0]])
            run = []
        run.append(index)
    if run:
        layers |= _entry(run, changes[run[0]])
    return frame.replace(key=key, value=value, layers=layers)


def changes_between(
    key: QuantSpec, value: QuantSpec, new_key: QuantSpec, new_value: QuantSpec
) -> dict[str, dict[str, Any]]:
    """What an exception must say of each side where other settings than the common ones hold."""
    found = {}
    for side, old, new in (("key", key, new_key), ("value", value, new_value)):
        before, after = asdict(old), asdict(new)
        differing = {name: after[name] for name in after if after[name] != before[name]}
        if differing:
            found[side] = differing
    return found


def _entry(run: list[int], change: Mapping[str, Any]) -> dict[int | str, Mapping[str, Any]]:
    if not change:
        return {}
    return {run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}": change}
