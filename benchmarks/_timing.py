"""Timing candidates against each other: interleaved in random order, on a clock that knows when it was disturbed."""

import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

# Fewer undisturbed samples than this are no better a basis than all of them.
MIN_CLEAN = 5
# A disturbed sample is taken again, up to this many times the samples asked for.
MOST_ROUNDS = 2
UNDISTURBED = "undisturbed wall time"


def preemptions() -> int:
    """Involuntary context switches of this process so far, all threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@dataclass(frozen=True)
class Clock:
    """Sources of time.

    Attributes:
        wall: Seconds since any moment.
        cpu: Seconds of processor time of the process, all threads.
        preemptions: Involuntary context switches of the process so far.
        synchronize: Waits until the device is done; called before the wall clock is read.
    """

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time
    preemptions: Callable[[], int] = preemptions
    synchronize: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Sample:
    """One measurement of one candidate.

    Attributes:
        wall: Seconds per call.
        cpu: Seconds of processor time per call.
        preemptions: Involuntary context switches while it ran.
    """

    wall: float
    cpu: float
    preemptions: int

    def busy(self, alone: bool) -> float:
        """Seconds without waiting for the CPU: processor time where one thread computes (`alone`), else wall time."""
        return self.cpu if alone else self.wall


def computes_alone(device: torch.device) -> bool:
    """Whether one CPU thread does all the work, so that processor time is its time."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def take(call: Callable[[], object], clock: Clock, calls: int = 1) -> Sample:
    """Time `calls` consecutive calls."""
    clock.synchronize()
    switches, cpu = clock.preemptions(), clock.cpu()
    start = clock.wall()
    for _ in range(calls):
        call()
    clock.synchronize()
    wall = clock.wall() - start
    return Sample(wall / calls, (clock.cpu() - cpu) / calls, clock.preemptions() - switches)


@dataclass(frozen=True)
class Timing:
    """What the samples of one candidate say, medians in seconds per call.

    Attributes:
        undisturbed: Wall time of the samples without an involuntary context switch, `None` where fewer than
            `MIN_CLEAN` are.
        wall: Wall time of all samples.
        cpu: Processor time of all samples.
        alone: Whether one CPU thread did all the work, so that processor time is time without waiting for the CPU.
        samples: Samples taken.
        clean: Of these, undisturbed ones.
    """

    undisturbed: float | None
    wall: float
    cpu: float
    alone: bool
    samples: int
    clean: int

    @classmethod
    def of(cls, samples: Sequence[Sample], alone: bool) -> "Timing":
        """Summary of samples, at least one."""
        clean = [sample.wall for sample in samples if not sample.preemptions]
        return cls(
            undisturbed=statistics.median(clean) if len(clean) >= MIN_CLEAN else None,
            wall=statistics.median(sample.wall for sample in samples),
            cpu=statistics.median(sample.cpu for sample in samples),
            alone=alone,
            samples=len(samples),
            clean=len(clean),
        )

    @property
    def seconds(self) -> float:
        """The best there is: undisturbed wall time, else processor time of a single thread, else wall time."""
        return shared_basis(self)[1][0]


def shared_basis(*timings: Timing) -> tuple[str, list[float]]:
    """Times that may be compared: all of the kind that is the best one all of them have.

    Wall time of undisturbed samples against that of disturbed ones would make any ratio.

    Returns:
        The kind, and the seconds per call of each.
    """
    undisturbed = [timing.undisturbed for timing in timings if timing.undisturbed is not None]
    if len(undisturbed) == len(timings):
        return UNDISTURBED, undisturbed
    if all(timing.alone for timing in timings):
        return "processor time", [timing.cpu for timing in timings]
    return "wall time", [timing.wall for timing in timings]


class Rotation:
    """Calls a function on the items of a pool in turn, so that none is read again before all others were.

    Args:
        function: Takes an item.
        pool: The items, at least one.
    """

    def __init__(self, function: Callable[[int], object], pool: int) -> None:
        self._function = function
        self._pool = pool
        self._next = 0

    def __call__(self) -> object:
        item, self._next = self._next, (self._next + 1) % self._pool
        return self._function(item)


def random_orders(names: Sequence[str], seed: int = 0) -> Iterator[list[str]]:
    """The names in one random order after another, for ever."""
    generator = random.Random(seed)
    while True:
        yield generator.sample(list(names), len(names))


def in_turn(
    steps: Mapping[str, Callable[[int], object]],
    count: int,
    *,
    seed: int = 0,
    clock: Clock | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, list[Sample]]:
    """Time `count` steps of several processes that go on side by side, each step of all before the next of any.

    Args:
        steps: Calls by name; each is given the number of the step.
        count: Steps.
        seed: Of the orders within a step.
        clock: Where times come from.
        progress: Called with 1 after each step of all.

    Returns:
        `count` samples by name, in the order of the steps.
    """
    clock = clock or Clock()
    orders = random_orders(list(steps), seed)
    taken: dict[str, list[Sample]] = {name: [] for name in steps}
    for number in range(count):
        for name in next(orders):
            taken[name].append(take(partial(steps[name], number), clock))
        if progress is not None:
            progress(1)
    return taken


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    alone: bool,
    samples: int = 30,
    burst: float = 1e-3,
    most_calls: int = 16,
    seed: int = 0,
    clock: Clock | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Timing]:
    """Time candidates by turns, so that whatever else the machine does hits all of them alike.

    Each round takes one sample of every candidate, in an order drawn anew. A sample is a burst of calls. Rounds go on
    until every candidate has enough undisturbed samples, at most `MOST_ROUNDS` times as many as asked for.

    Args:
        candidates: Calls to be timed, by name.
        alone: Whether one CPU thread does all the work.
        samples: Undisturbed samples wanted of each.
        burst: Seconds that a sample should last.
        most_calls: Most calls in a sample.
        seed: Of the orders.
        clock: Where times come from.
        progress: Called with 1 after each of the first `samples` rounds.

    Returns:
        Timings by name.
    """
    clock = clock or Clock()
    orders = random_orders(list(candidates), seed)
    calls = {name: _burst_calls(call, burst, most_calls, clock) for name, call in candidates.items()}
    taken: dict[str, list[Sample]] = {name: [] for name in candidates}
    for done in range(MOST_ROUNDS * samples):
        if done >= samples and all(_clean(of_one) >= samples for of_one in taken.values()):
            break
        for name in next(orders):
            taken[name].append(take(candidates[name], clock, calls[name]))
        if progress is not None and done < samples:
            progress(1)
    return {name: Timing.of(of_one, alone) for name, of_one in taken.items()}


def _burst_calls(call: Callable[[], object], burst: float, most: int, clock: Clock) -> int:
    """Calls that fill a burst. The first call pays for compilation and tables and is not counted."""
    call()
    quickest = min(take(call, clock).wall for _ in range(2))
    return max(1, min(most, round(burst / quickest) if quickest > 0 else most))


def _clean(samples: Sequence[Sample]) -> int:
    return sum(not sample.preemptions for sample in samples)
