"""The benchmarks' modules, found in their folder as when they are run, and a clock that moves only when told to."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from _timing import Clock


class FakeTime:
    """Wall and processor time that pass only in `work`, and a counter of preemptions."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.switches = 0
        self.clock = Clock(lambda: self.wall, lambda: self.cpu, lambda: self.switches)

    def work(self, seconds: float, waiting: float = 0.0) -> None:
        """Compute for some seconds; with `waiting`, lose the CPU once for so long."""
        self.wall += seconds + waiting
        self.cpu += seconds
        self.switches += waiting > 0


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()
