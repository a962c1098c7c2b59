"""Who takes part in the attention benchmark at one shape and context, and what a pair of times makes of a result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from _report import verdict
from _targets import attention_target
from _timing import Rotation, Timing, shared_basis
from _views import (
    Shape,
    dense_pool,
    kernel_call,
    packed_view,
    refusal,
    sdpa_call,
    unquantized_view,
    view_bytes,
    view_pool,
)

from kvquant_hf import KVQuantConfig

BASELINES = ("sdpa", "sdpa-bf16", "same-kernel-bf16", "post-rope")
_FORMS = ("rows", "gqa")
_DTYPES = {"sdpa": torch.float32, "sdpa-bf16": torch.bfloat16}


@dataclass
class Contest:
    """Calls to be timed at one shape and context.

    Attributes:
        shape: Sizes.
        context: Tokens stored.
        backend: Who should compute attention over packed caches.
        calls: By name.
        read_bytes: Bytes that one call reads, by name.
        refused: Reasons of those that cannot take part, by name.
    """

    shape: Shape
    context: int
    backend: str
    calls: dict[str, Rotation] = field(default_factory=dict)
    read_bytes: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def ours(quant: str, baseline: str) -> str:
    """Name of the call that is compared with a baseline: in float32, or in bfloat16 where the baseline is."""
    return f"{quant}/{'bf16' if baseline.endswith('bf16') else 'fp32'}"


def rival(quant: str, baseline: str, timings: Mapping[str, Timing]) -> str:
    """Name of the call that a baseline stands for: of PyTorch's forms, the one that was fastest."""
    if baseline not in _DTYPES:
        return f"{quant}/{baseline}"
    forms = [f"{baseline}/{form}" for form in _FORMS]
    return min((name for name in forms if name in timings), key=lambda name: timings[name].seconds)


def memory_needed(
    shape: Shape, context: int, configs: Mapping[str, KVQuantConfig], baselines: Sequence[str], pool_bytes: int
) -> int:
    """Bytes of all pools, and of making them, as an upper estimate."""
    dense = {dtype: shape.dense_bytes(context, dtype) for dtype in (torch.float32, torch.bfloat16)}
    items = [dense[dtype] for name, dtype in _DTYPES.items() if name in baselines]
    for config in configs.values():
        packed = int(config.nominal_bits(shape.head_dim) / 32 * dense[torch.float32])
        items += [packed, packed, packed]
        if "same-kernel-bf16" in baselines:
            items.append(dense[torch.bfloat16])
    return sum(max(pool_bytes, item) + item for item in items) + sum(dense.values())


def prepare(
    shape: Shape,
    context: int,
    configs: Mapping[str, KVQuantConfig],
    baselines: Sequence[str],
    backend: str,
    pool_bytes: int,
) -> Contest:
    """Fill the pools of one shape and context.

    Raises:
        RuntimeError: A backend gives wrong outputs.
    """
    contest = Contest(shape, context, backend)
    states = shape.states(context)
    halves = (states[0].bfloat16(), states[1].bfloat16())
    for baseline, dtype in _DTYPES.items():
        if baseline not in baselines:
            continue
        pool = dense_pool(states if dtype == torch.float32 else halves, pool_bytes)
        for form in _FORMS:
            contest.calls[f"{baseline}/{form}"] = Rotation(sdpa_call(form, shape, pool), len(pool))
            contest.read_bytes[f"{baseline}/{form}"] = shape.dense_bytes(context, dtype)
    for quant, config in configs.items():
        views = {}
        if {"sdpa", "post-rope"} & set(baselines):
            views[f"{quant}/fp32"] = packed_view(config, states, backend)
        if {"sdpa-bf16", "same-kernel-bf16"} & set(baselines):
            views[f"{quant}/bf16"] = packed_view(config, halves, backend)
        if "post-rope" in baselines and views[f"{quant}/fp32"].rotation is not None:
            post = config.replace(key={"rope": "post"})
            views[f"{quant}/post-rope"] = packed_view(post, states, backend)
        if "same-kernel-bf16" in baselines and views[f"{quant}/bf16"].num_blocks:
            views[f"{quant}/same-kernel-bf16"] = unquantized_view(views[f"{quant}/bf16"], halves)
        for name, view in views.items():
            reason = refusal(shape, view)
            if reason is not None:
                contest.refused[name] = reason
                continue
            views_of_one = view_pool(view, pool_bytes)
            contest.calls[name] = Rotation(kernel_call(shape, views_of_one), len(views_of_one))
            contest.read_bytes[name] = view_bytes(view)
    return contest


@dataclass(frozen=True)
class Result:
    """One quantized cache against one baseline. A time that could not be taken is `None`, and `reason` says why.

    Attributes:
        quant: Settings of the cache.
        context: Tokens stored.
        batch: Rows.
        num_kv_heads: Key/value heads.
        group: Query heads per key/value head.
        head_dim: Size of a key or value vector.
        threads: CPU threads.
        backend: Who computed attention over the packed cache.
        baseline: What it is compared with.
        baseline_form: Which of its forms was fastest and is the baseline.
        milliseconds: Time of a call.
        baseline_milliseconds: Time of the baseline's call.
        speedup: How many times faster than the baseline.
        gigabytes_per_s: Bytes read (codes, scales, zero points, exact tokens) over the time of a call.
        basis: Kind of both times: wall time of samples without an involuntary context switch, processor time (of a
            single thread) or wall time of all samples where one of the two has too few of these.
        timing: All that was measured of a call.
        baseline_timing: All that was measured of the baseline's call.
        target: What `speedup` should be at least.
        verdict: `met`, `missed` or `not measured` where there is a target.
        reason: Why a time is missing.
    """

    quant: str
    context: int
    batch: int
    num_kv_heads: int
    group: int
    head_dim: int
    threads: int
    backend: str
    baseline: str
    baseline_form: str | None
    milliseconds: float | None
    baseline_milliseconds: float | None
    speedup: float | None
    gigabytes_per_s: float | None
    basis: str | None
    timing: Timing | None
    baseline_timing: Timing | None
    target: float | None
    verdict: str
    reason: str | None

    @property
    def shape(self) -> Shape:
        """The sizes."""
        return Shape(self.batch, self.num_kv_heads, self.group, self.head_dim)


def compare(contest: Contest, quant: str, baseline: str, threads: int, timings: Mapping[str, Timing]) -> Result:
    """The result of a quantized cache and a baseline."""
    name, other = ours(quant, baseline), rival(quant, baseline, timings)
    mine, theirs = timings.get(name), timings.get(other)
    basis, seconds = shared_basis(*(timing for timing in (mine, theirs) if timing))
    speedup = seconds[1] / seconds[0] if mine and theirs else None
    target = attention_target(quant, str(contest.shape), contest.context, baseline)
    reasons = [f"{who}: {contest.refused[who]}" for who in (name, other) if who in contest.refused]
    return Result(
        quant=quant,
        context=contest.context,
        batch=contest.shape.batch_size,
        num_kv_heads=contest.shape.num_kv_heads,
        group=contest.shape.group,
        head_dim=contest.shape.head_dim,
        threads=threads,
        backend=contest.backend,
        baseline=baseline,
        baseline_form=other.partition("/")[2] if baseline in _DTYPES else None,
        milliseconds=1e3 * seconds[0] if mine else None,
        baseline_milliseconds=1e3 * seconds[-1] if theirs else None,
        speedup=speedup,
        gigabytes_per_s=contest.read_bytes[name] / seconds[0] / 1e9 if mine else None,
        basis=basis if seconds else None,
        timing=mine,
        baseline_timing=theirs,
        target=target,
        verdict=verdict(speedup, target),
        reason="; ".join(reasons) or None,
    )
