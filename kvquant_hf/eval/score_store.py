"""Scores of windows on disk, so that an interrupted scoring run goes on where it stopped."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvquant_hf.eval.score import ChunkScore


class FileStore:
    """One JSON line a window and configuration; a `ChunkStore`.

    Args:
        path: The file; made if it is not there. A line that was cut off is left out.
        setting: What decides the numbers besides the configuration: model, protocol, types, versions.
        configurations: What decides those of each configuration, by its name.

    Raises:
        ValueError: A line of the file is no record; it is named.
    """

    def __init__(self, path: Path, setting: Mapping[str, Any], configurations: Mapping[str, Any]) -> None:
        self._path = path
        self._setting = setting
        self._configurations = configurations
        self._known: dict[str, Any] = {}
        if path.is_file():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
                if line.endswith("\n"):
                    key, self._known[key] = _record(line, f"{path}, line {number}")
            self._mend()

    def _mend(self) -> None:
        """Drop a last line without an end, which the next one would be appended to."""
        whole = self._path.read_bytes()
        self._path.write_bytes(whole[: whole.rfind(b"\n") + 1])

    def _key(self, kind: str, name: str, window: torch.Tensor) -> str:
        parts = [kind, self._setting, _in_order(self._configurations.get(name, name)), window.tolist()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def _append(self, key: str, value: Any) -> None:
        self._known[key] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")

    def get_item(self, kind: str, name: str, window: torch.Tensor) -> Any:
        """What was kept about a configuration on a window, `None` if nothing was."""
        return self._known.get(self._key(kind, name, window))

    def put_item(self, kind: str, name: str, window: torch.Tensor, value: Any) -> None:
        """Keep a JSON value about a configuration on a window; `kind` says what it is and how it was measured."""
        self._append(self._key(kind, name, window), value)

    def get(self, name: str, window: torch.Tensor) -> ChunkScore | None:
        """The score of a configuration on a window, if it is known."""
        value = self.get_item("score", name, window)
        return None if value is None else ChunkScore(**{field: tuple(values) for field, values in value.items()})

    def put(self, name: str, window: torch.Tensor, score: ChunkScore) -> None:
        """Keep it."""
        self.put_item("score", name, window, asdict(score))

    def get_divergence(self, name: str, window: torch.Tensor, tokens: int) -> int | None:
        """The first divergence of a configuration after a window's prefill, if it is known."""
        value = self.get_item(f"divergence {tokens}", name, window)
        return None if value is None else int(value)

    def put_divergence(self, name: str, window: torch.Tensor, tokens: int, first: int) -> None:
        """Keep it."""
        self.put_item(f"divergence {tokens}", name, window, first)


def _record(line: str, place: str) -> tuple[str, Any]:
    try:
        row = json.loads(line)
        return row["key"], row["value"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place} is no record of a score ({error}); remove the line, and it is measured anew."
        ) from error


def _in_order(configuration: Any) -> Any:
    """Several exceptions by layer as a list: later ones win, and their selectors are numbers and texts."""
    if not isinstance(configuration, Mapping) or len(configuration.get("layers") or ()) < 2:
        return configuration
    return {**configuration, "layers": list(configuration["layers"].items())}
