"""Answers of a run, kept batch by batch, so that an interrupted run goes on where it stopped.

lm-eval's own `--use_cache` looks answers up by the request alone and gives those of one cache configuration to
another. A journal belongs to one directory, whose name carries the hash of everything that decides the answers.
"""

import hashlib
import json
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvquant_hf.eval.calls import CallRecord


class ResponseJournal:
    """Answers and call records of one configuration; takes the place of lm-eval's `CacheHook`.

    A line of the file is one batch. A batch that was cut off is computed again as a whole, so that the batches of a
    continued run are those of an uninterrupted one.

    Args:
        directory: Where `responses-<rank>.jsonl` lies; made if it is not there.
        rank: Number of this process; it writes a file of its own. Process 0 reads the files of all, also of an earlier
            run of more processes, and tells the others.

    Attributes:
        calls: Records of the calls whose answers were found.
    """

    def __init__(self, directory: Path, rank: int = 0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"responses-{rank}.jsonl"
        self._answers: dict[str, deque[Any]] = defaultdict(deque)
        self._pending: list[tuple[str, Any]] = []
        self._pending_calls: list[CallRecord] = []
        self._expected: int | None = None
        self.calls: list[CallRecord] = []
        for path in sorted(directory.glob("responses-*.jsonl")) if rank == 0 else [self._path]:
            if path.is_file():
                self._read(path)
        if rank:
            self._answers.clear()
            self.calls.clear()

    def _read(self, path: Path) -> None:
        whole, size = path.read_bytes(), 0
        for line in whole.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # the process was killed while it wrote this batch
            batch = json.loads(line)
            size += len(line)
            for key, answer in batch["responses"]:
                self._answers[key].append(answer)
            self.calls += [CallRecord.from_dict(call) for call in batch["calls"]]
        if size < len(whole) and path == self._path:
            os.truncate(path, size)

    @staticmethod
    def _key(kind: str, arguments: Iterable[Any]) -> str:
        text = json.dumps([kind, list(arguments)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def add_partial(self, attr: str, req: Iterable[Any], res: Any) -> None:
        """Note one answer, as lm-eval's models do after each request; `commit` writes it.

        Args:
            attr: Kind of the request, the name of the model's method.
            req: Its arguments.
            res: The answer.
        """
        self._pending.append((self._key(attr, req), res))
        if len(self._pending) == self._expected:
            self.commit()

    def add_call(self, call: CallRecord, answers: int | None = None) -> None:
        """Note the call that the next answers come from.

        Args:
            call: The call.
            answers: How many answers it gives, after which the batch is written; unknown where `None`.
        """
        self._pending_calls.append(call)
        self._expected = answers

    def commit(self) -> None:
        """Write the answers noted since the last time, as one batch."""
        if not self._pending:
            return
        batch = {"responses": self._pending, "calls": [call.to_dict() for call in self._pending_calls]}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(batch) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._pending, self._pending_calls, self._expected = [], [], None

    def find(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        """Answers that an earlier run gave, `None` where it gave none.

        Args:
            kind: Name of the model's method.
            requests: Instances of lm-eval.
        """
        found = (self._answers.get(self._key(kind, request.args)) for request in requests)
        return [_as_answered(known.popleft()) if known else None for known in found]


def _as_answered(answer: Any) -> Any:
    """JSON has no tuples, which log-likelihoods and their kin are."""
    return tuple(answer) if isinstance(answer, list) else answer
