"""Files of a run: written whole or not at all, without paths of the machine they were made on."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = "results.json"
CONFIG = "config.json"


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON; what JSON lacks becomes text."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n")


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, default=_plain) + "\n" for row in rows))


def read_json(path: Path) -> Any:
    """The value that a JSON file holds.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not JSON; the file is named.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects that a file of JSON lines holds."""
    # Not `splitlines`: texts may hold other separators, such as U+2028, which JSON leaves as they are.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def replaced(value: Any, old: str, new: str) -> Any:
    """A copy of nested JSON values in which every text has `new` in place of `old`."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, Mapping):
        return {replaced(str(key), old, new): replaced(item, old, new) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replaced(item, old, new) for item in value]
    return value


def _plain(value: Any) -> Any:
    """Numbers of NumPy as Python's, anything else as text."""
    return value.item() if hasattr(value, "item") and not hasattr(value, "__len__") else str(value)
