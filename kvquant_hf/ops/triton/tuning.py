"""Launch parameters of the decode kernel: looked up, never tuned while decoding."""

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("tuning.json")


@dataclass(frozen=True)
class Launch:
    """Launch parameters.

    Attributes:
        BN: Packed tokens of a tile.
        BND: Exact tokens of a tile.
        num_warps: Warps of a program.
        num_stages: Tiles whose loads are in flight.
        max_registers: Registers a thread may use (NVIDIA), or `None` to leave it to the assembler, which may spill a
            few to fit one more program on a multiprocessor.
    """

    BN: int
    BND: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def _distance(entry: dict[str, Any], head_dim: int, nbits: int, arch: str) -> tuple[int, ...] | None:
    """How far an entry is from what is wanted, or `None` where it does not apply.

    An entry serves heads up to its size and widths from its own up; `cuda` stands for every NVIDIA GPU, a number
    (`90`) for one compute capability.
    """
    if entry["head_dim"] < head_dim or entry["nbits"] > nbits:
        return None
    if entry["arch"] != arch and not (entry["arch"] == "cuda" and arch.isdigit()):
        return None
    return entry["head_dim"] - head_dim, nbits - entry["nbits"], entry["arch"] != arch


@cache
def launch_parameters(head_dim: int, nbits: int, arch: str) -> Launch:
    """Parameters for a head size, the smaller width of keys and values, and a GPU.

    Args:
        head_dim: The larger of the two head sizes.
        nbits: The smaller of the two widths.
        arch: Compute capability without its point (`"90"`), or the name of an AMD GPU (`"gfx942"`).
    """
    found = [(d, entry) for entry in _table()["entries"] if (d := _distance(entry, head_dim, nbits, arch)) is not None]
    best = min(found, key=lambda pair: pair[0])[1] if found else _table()["default"]
    return Launch(**{field.name: best[field.name] for field in fields(Launch) if field.name in best})
