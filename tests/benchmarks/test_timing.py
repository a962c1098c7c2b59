"""Interleaving measures what it says: turns, orders, bursts, rotation, and what is made of disturbed samples."""

from functools import partial
from typing import Any

import pytest
from _timing import MIN_CLEAN, MOST_ROUNDS, UNDISTURBED, Rotation, Sample, Timing, in_turn, shared_basis, take
from _timing import interleave as interleave_any

MS = 1e-3
interleave = partial(interleave_any, alone=True)


def test_every_round_has_one_burst_of_each_in_a_new_order(time: Any) -> None:
    log: list[str] = []

    def call(name: str, seconds: float) -> None:
        log.append(name)
        time.work(seconds)

    costs = {"a": 2 * MS, "b": 3 * MS, "c": 5 * MS}
    calls = {name: partial(call, name, seconds) for name, seconds in costs.items()}
    done: list[int] = []
    timings = interleave(calls, samples=20, clock=time.clock, progress=done.append)
    assert {name: timing.seconds for name, timing in timings.items()} == pytest.approx(costs)
    assert all(timing.samples == timing.clean == 20 for timing in timings.values())
    assert done == [1] * 20

    rounds = log[-60:]  # what came before was calibration
    rounds_of_three = [tuple(rounds[i : i + 3]) for i in range(0, 60, 3)]
    assert all(set(one) == set(costs) for one in rounds_of_three)
    assert len(set(rounds_of_three)) > 2, "always the same order"


def test_short_calls_are_timed_in_bursts(time: Any) -> None:
    calls = {"short": partial(time.work, 0.1 * MS), "long": partial(time.work, 4 * MS), "tiny": partial(time.work, 0)}
    start = time.wall
    timings = interleave(calls, samples=10, burst=1 * MS, clock=time.clock)
    assert timings["short"].seconds == pytest.approx(0.1 * MS) and timings["long"].seconds == pytest.approx(4 * MS)
    calibration = 3
    assert time.wall - start == pytest.approx((10 * 10 + calibration) * 0.1 * MS + (10 + calibration) * 4 * MS)
    assert timings["tiny"].seconds == 0


def test_disturbed_samples_are_taken_again_and_left_out(time: Any) -> None:
    count = iter(range(10_000))

    def sometimes() -> None:
        time.work(2 * MS, waiting=50 * MS if next(count) % 3 == 0 else 0)

    timing = interleave({"x": sometimes}, samples=12, clock=time.clock)["x"]
    assert timing.clean == 12 and timing.samples == 18
    assert timing.seconds == timing.cpu == pytest.approx(2 * MS)
    assert timing.wall == pytest.approx(2 * MS)


def test_a_machine_that_never_rests_is_owned_up_to(time: Any) -> None:
    calls = {"x": partial(time.work, 2 * MS, 1 * MS)}
    timing = interleave(calls, samples=12, clock=time.clock)["x"]
    assert timing.samples == MOST_ROUNDS * 12 and timing.clean == 0 and timing.undisturbed is None
    assert timing.seconds == timing.cpu == pytest.approx(2 * MS) and timing.wall == pytest.approx(3 * MS)
    several_threads = interleave(calls, alone=False, samples=12, clock=time.clock)["x"]
    assert several_threads.seconds == pytest.approx(3 * MS)


def test_few_undisturbed_samples_are_no_basis() -> None:
    fast, slow = Sample(1.0, 1.0, 0), Sample(9.0, 2.0, 2)
    assert Timing.of([fast] * MIN_CLEAN + [slow] * 30, alone=True).seconds == 1
    assert Timing.of([fast] * (MIN_CLEAN - 1) + [slow] * 30, alone=True).seconds == 2
    assert Timing.of([fast] * (MIN_CLEAN - 1) + [slow] * 30, alone=False).seconds == 9


def test_undisturbed_times_are_not_compared_with_disturbed_ones() -> None:
    """Both take one second of work; one of them always lost the CPU for another five."""
    for alone, basis, ratio in ((True, "processor time", 1.0), (False, "wall time", 6.0)):
        calm = Timing.of([Sample(1.0, 1.0, 0)] * 30, alone)
        shaken = Timing.of([Sample(6.0, 1.0, 1)] * 30, alone)
        kind, (mine, theirs) = shared_basis(calm, shaken)
        assert kind == basis and theirs / mine == ratio
        assert shared_basis(calm, calm) == (UNDISTURBED, [1.0, 1.0])


def test_steps_of_all_come_before_the_next_of_any(time: Any) -> None:
    log: list[tuple[int, str]] = []

    def step(name: str, number: int) -> None:
        log.append((number, name))
        time.work((number + 1) * (2 if name == "b" else 1))

    taken = in_turn({name: partial(step, name) for name in "abc"}, 8, clock=time.clock)
    assert [number for number, _ in log] == [number for number in range(8) for _ in "abc"]
    assert sorted(log) == [(number, name) for number in range(8) for name in "abc"]
    assert [sample.wall for sample in taken["b"]] == [2 * (number + 1) for number in range(8)]


def test_a_pool_is_gone_through_before_anything_comes_again() -> None:
    seen: list[int] = []
    call = Rotation(seen.append, 3)
    for _ in range(7):
        call()
    assert seen == [0, 1, 2, 0, 1, 2, 0]


def test_the_device_is_waited_for_before_the_clock_is_read(time: Any) -> None:
    from dataclasses import replace

    clock = replace(time.clock, synchronize=lambda: time.work(1))
    assert take(lambda: None, clock).wall == 1  # the wait before the start is not counted, the one at the end is
