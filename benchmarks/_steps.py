"""Decode steps of several caches of one model side by side, and what they make of results."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from _backends import no_fallback
from _caches import PeakMemory, feed
from _report import verdict
from _targets import step_target
from _timing import Clock, Sample, Timing, computes_alone, in_turn, shared_basis
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvquant_hf import QuantCache
from kvquant_hf.eval import held_bits

WARM_UP = 2


@dataclass(frozen=True)
class CacheSteps:
    """Decode steps with one cache at one context. What could not be measured is `None`, and `reason` says why.

    Attributes:
        cache: Its name: settings of ours, or a baseline.
        context: Tokens stored before the first step.
        dtype: Type of the model.
        threads: CPU threads.
        backend: Who computed attention over our packed caches; `None` for baselines.
        step_ms: Median time of a step, milliseconds.
        tokens_per_s: Its inverse.
        slowest_step: The longest step over the median one; in processor time where that is to be had (one CPU
            thread), which does not count waiting for the CPU.
        basis: What `step_ms` is: wall time of steps without an involuntary context switch; where these are too few,
            processor time (of a single thread) or wall time of all steps.
        timing: All medians.
        kv_bytes: What the cache holds after the steps.
        peak_bytes: Growth of memory at its highest while the cache was filled and fed its first tokens.
        steps_ms: All steps in their order, milliseconds.
        reason: Why there are no times.
    """

    cache: str
    context: int
    dtype: str
    threads: int
    backend: str | None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    slowest_step: float | None = None
    basis: str | None = None
    timing: Timing | None = None
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    steps_ms: tuple[float, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Result:
    """One quantized cache against one baseline, both by the same kind of time; fields as in `CacheSteps`.

    Attributes:
        model: Name of the model.
        quant: Settings of the cache.
        baseline: What it is compared with.
        ratio: Step of the baseline over step of the cache: how many times faster.
        target: What `ratio` should be at least.
        verdict: `met`, `missed` or `not measured` where there is a target.
    """

    model: str
    quant: str
    context: int
    dtype: str
    threads: int
    backend: str | None
    tokens_per_s: float | None
    baseline: str
    baseline_tokens_per_s: float | None
    ratio: float | None
    kv_bytes: int | None
    baseline_kv_bytes: int | None
    peak_bytes: int | None
    baseline_peak_bytes: int | None
    basis: str | None
    target: float | None
    verdict: str
    reason: str | None


@dataclass(frozen=True)
class Bench:
    """What all caches of a run share.

    Attributes:
        model: Causal language model in eval mode.
        ids: Tokens of the text, on the model's device; at least the longest context and its steps.
        dtype: Name of the model's dtype.
        backend: Backend of our caches.
        steps: Steps that are timed.
        seed: Of the orders.
        clock: Where times come from.
    """

    model: PreTrainedModel
    ids: torch.Tensor
    dtype: str
    backend: str
    steps: int
    seed: int
    clock: Clock

    def warm_up(self, makers: Mapping[str, Callable[[], Cache]], fill: Callable[[Cache], None], context: int) -> None:
        """Fill a cache of each kind and forget it: compilation and tables are not part of anybody's peak memory."""
        for make in makers.values():
            with suppress(Exception):  # `time_steps` meets it again and reports it
                self._filled(make, fill, context)

    def time_steps(
        self,
        makers: Mapping[str, Callable[[], Cache]],
        fill: Callable[[Cache], None],
        context: int,
        ours: Collection[str],
        progress: Callable[[int], object] | None = None,
    ) -> list[CacheSteps]:
        """Fill fresh caches with `context` tokens and time the same decode steps of each, one of all at a time.

        Args:
            makers: Makers of caches by name.
            fill: Puts the first `context` tokens into a cache.
            context: Tokens.
            ours: Names of the quantized caches.
            progress: Called with 1 after each step of all.
        """
        caches: dict[str, Cache] = {}
        peaks: dict[str, int | None] = {}
        refused: dict[str, str] = {}
        for name, make in makers.items():
            try:
                caches[name], peaks[name] = self._filled(make, fill, context)
            except Exception as error:  # a rival that breaks, in whatever way, must not end the run of the others
                refused[name] = f"{type(error).__name__}: {error}"
        calls = {name: partial(self._step, cache, context + WARM_UP) for name, cache in caches.items()}
        taken = in_turn(calls, self.steps, seed=self.seed, clock=self.clock, progress=progress)
        measured = []
        for name in makers:
            backend = self.backend if name in ours else None
            row = CacheSteps(name, context, self.dtype, torch.get_num_threads(), backend, reason=refused.get(name))
            measured.append(self._summary(row, caches[name], taken[name], peaks[name]) if name in caches else row)
        return measured

    def _filled(
        self, make: Callable[[], Cache], fill: Callable[[Cache], None], context: int
    ) -> tuple[Cache, int | None]:
        """A cache with `context` tokens and the warm-up's, and the memory that took."""
        memory = PeakMemory(self.model.device)
        memory.start()
        cache = make()
        fill(cache)
        with no_fallback(self.backend if isinstance(cache, QuantCache) else "dense"):
            for number in range(WARM_UP):
                self._step(cache, context, number)
        self.clock.synchronize()
        return cache, memory.growth()

    def _step(self, cache: Cache, first: int, number: int) -> None:
        feed(self.model, cache, self.ids[first + number : first + number + 1])

    def _summary(self, row: CacheSteps, cache: Cache, samples: Sequence[Sample], peak: int | None) -> CacheSteps:
        alone = computes_alone(self.model.device)
        timing = Timing.of(samples, alone)
        basis, (seconds,) = shared_basis(timing)
        times = [sample.busy(alone) for sample in samples]
        return replace(
            row,
            step_ms=1e3 * seconds,
            tokens_per_s=1 / seconds,
            slowest_step=max(times) / statistics.median(times),
            basis=basis,
            timing=timing,
            kv_bytes=held_bits(cache).memory_bytes,
            peak_bytes=peak,
            steps_ms=tuple(1e3 * sample.wall for sample in samples),
        )


def compare(model: str, mine: CacheSteps, theirs: CacheSteps) -> Result:
    """The result of a quantized cache and a baseline at one context."""
    basis, seconds = shared_basis(*(row.timing for row in (mine, theirs) if row.timing))
    ratio = seconds[1] / seconds[0] if mine.timing and theirs.timing else None
    target = step_target(model, mine.cache, mine.dtype, mine.context, theirs.cache)
    reasons = [f"{row.cache}: {row.reason}" for row in (mine, theirs) if row.reason]
    return Result(
        model=model,
        quant=mine.cache,
        context=mine.context,
        dtype=mine.dtype,
        threads=mine.threads,
        backend=mine.backend,
        tokens_per_s=1 / seconds[0] if mine.timing else None,
        baseline=theirs.cache,
        baseline_tokens_per_s=1 / seconds[-1] if theirs.timing else None,
        ratio=ratio,
        kv_bytes=mine.kv_bytes,
        baseline_kv_bytes=theirs.kv_bytes,
        peak_bytes=mine.peak_bytes,
        baseline_peak_bytes=theirs.peak_bytes,
        basis=basis if seconds else None,
        target=target,
        verdict=verdict(ratio, target),
        reason="; ".join(reasons) or None,
    )
