"""Everything that is measured of one model in one dtype."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _caches import Maker, baseline_maker, copy_states, feed, prefill
from _overhead import cache_overhead, prefill_costs
from _report import verdict
from _steps import WARM_UP, Bench, CacheSteps, Result, compare
from _targets import OVERHEAD_US, QUANT, QUANTIZE_SHARE, SLOWEST_STEP, is_target_model
from _timing import Clock
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvquant_hf import KVQuantConfig, QuantCache
from kvquant_hf.eval import load_text

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        model: Directory or hub id.
        configs: Settings of our caches by name, all with the same backend.
        baselines: Names of the caches they are compared with.
        all_baselines: Whether each of them must exist; else those that do are taken.
        contexts: Tokens stored, ascending.
        steps: Decode steps timed at each context.
        prompt: Tokens of the prompt that is timed.
        cycles: Cycles from flush to flush over which the cache alone is timed.
        fill: `copy` hands every cache the keys and values of one prefill, `prefill` computes them for each.
        chunk: Tokens fed at once while a context is made.
        text: UTF-8 text, repeated as often as needed.
        device: Where.
        backend: Backend of our caches.
        attention: Attention implementation of the model.
        seed: Of the orders.
    """

    model: str
    configs: Mapping[str, KVQuantConfig]
    baselines: Sequence[str]
    all_baselines: bool
    contexts: Sequence[int]
    steps: int
    prompt: int
    cycles: int
    fill: str
    chunk: int
    text: Path
    device: torch.device
    backend: str
    attention: str
    seed: int

    @property
    def name(self) -> str:
        """The model's name without the way to it."""
        return Path(self.model).name if Path(self.model).is_dir() else self.model


@dataclass(frozen=True)
class Check:
    """A figure that is no comparison of two caches, and its target (at most).

    Attributes:
        check: `slowest step`, `quantize share` or `overhead`.
        quant: Settings of the cache.
        dtype: Type of the model.
        context: Tokens stored.
        value: The figure.
        unit: Its unit.
        target: What it should be at most.
        verdict: `met`, `missed` or `not measured` where there is a target.
    """

    check: str
    quant: str
    dtype: str
    context: int
    value: float | None
    unit: str
    target: float | None
    verdict: str


@dataclass
class Findings:
    """Measurements of one or more dtypes, each a list of JSON objects in the end.

    Attributes:
        steps: Decode steps of every cache.
        results: Quantized caches against baselines.
        checks: Further figures with targets.
        prefill: A prompt fed at once.
        overhead: The cache beside its attention kernel.
    """

    steps: list[CacheSteps]
    results: list[Result]
    checks: list[Check]
    prefill: list[dict[str, Any]]
    overhead: list[dict[str, Any]]

    def extend(self, other: "Findings") -> None:
        """Add what was found for another dtype."""
        for name in ("steps", "results", "checks", "prefill", "overhead"):
            getattr(self, name).extend(getattr(other, name))


def baseline_makers(plan: Plan, model: PreTrainedModel) -> dict[str, Maker]:
    """Makers of the baseline caches.

    Raises:
        ValueError: A baseline that must exist does not.
        ImportError: It needs a package that is not installed.
    """
    found = {}
    for name in plan.baselines:
        try:
            found[name] = baseline_maker(name, model)
        except (ValueError, ImportError) as error:
            if plan.all_baselines:
                raise
            tqdm.write(f"baseline {name} left out: {error}", sys.stderr)
    return found


def text_ids(plan: Plan, tokens: int) -> torch.Tensor:
    """The first `tokens` tokens of the text, on the device.

    Raises:
        ValueError: The text is empty.
    """
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    text = load_text(plan.text)
    ids = tokenizer(text, add_special_tokens=False, verbose=False, return_tensors="pt").input_ids[0]
    if not len(ids):
        raise ValueError(f"`text` must hold text, {plan.text.name} has no tokens.")
    repeated: torch.Tensor = ids.repeat(-(-tokens // len(ids)))[:tokens].to(plan.device)
    return repeated


def measure(plan: Plan, dtype: str) -> Findings:
    """Load the model in one dtype and measure everything planned.

    Raises:
        ValueError: A baseline or a setting does not fit the model.
        ImportError: A baseline needs a package that is not installed.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        plan.model, dtype=getattr(torch, dtype), attn_implementation=plan.attention
    )
    model = model.to(plan.device).eval()
    on_gpu = plan.device.type == "cuda"
    clock = Clock(synchronize=partial(torch.cuda.synchronize, plan.device)) if on_gpu else Clock()
    others = baseline_makers(plan, model)
    ours = {quant: partial(QuantCache, model, config) for quant, config in plan.configs.items()}
    ids = text_ids(plan, max(*plan.contexts, plan.prompt) + WARM_UP + plan.steps)
    bench = Bench(model, ids, dtype, plan.backend, plan.steps, plan.seed, clock)
    each = min(plan.contexts) + sum(plan.contexts)  # the shortest is filled once more to warm up
    fed = max(plan.contexts) if plan.fill == "copy" else each * (len(ours) + len(others))
    total = fed + plan.steps * len(plan.contexts) + plan.prompt * (1 + len(ours))
    with tqdm(total=total, desc=f"{plan.name}, {dtype}", unit="tok", disable=None) as bar:
        steps = _decode(plan, bench, ours, others, bar.update)

        def prompts_done(count: int) -> None:
            bar.update(count * plan.prompt)

        prompt = partial(_feed_prompt, model, ids[: plan.prompt])
        costs = prefill_costs(ours, prompt, model, plan.prompt, clock=clock, progress=prompts_done)
    sample = DynamicCache(config=model.config)  # for the shapes of the model's keys and values
    feed(model, sample, ids[:2])
    by_cache = {(row.context, row.cache): row for row in steps}
    pairs = [(context, quant, other) for context in plan.contexts for quant in ours for other in others]
    findings = Findings(
        steps=steps,
        results=[compare(plan.name, by_cache[context, one], by_cache[context, two]) for context, one, two in pairs],
        checks=[],
        prefill=[{"quant": quant, "dtype": dtype, **asdict(cost)} for quant, cost in costs.items()],
        overhead=[
            {"quant": quant, "dtype": dtype, **asdict(cache_overhead(model, config, sample, plan.cycles, clock))}
            for quant, config in plan.configs.items()
            if _has_overhead(config) and not any(row.reason for row in steps if row.cache == quant)
        ],
    )
    findings.checks = _checks(plan, dtype, findings)
    return findings


def _decode(
    plan: Plan, bench: Bench, ours: Mapping[str, Callable[[], Cache]], others: Mapping[str, Maker], progress: Progress
) -> list[CacheSteps]:
    """Decode steps at all contexts."""
    rows: list[CacheSteps] = []
    source = DynamicCache(config=bench.model.config)
    for context in plan.contexts:
        ids = bench.ids[:context]
        if plan.fill == "copy":
            prefill(bench.model, source, ids[source.get_seq_length() :], plan.chunk, progress)
            fill: Callable[[Cache], None] = partial(copy_states, source, context=context)
        else:
            fill = partial(_prefilled, bench.model, ids, plan.chunk, progress)
        length = context + WARM_UP + plan.steps
        makers: dict[str, Callable[[], Cache]] = {
            **ours,
            **{name: partial(make, length) for name, make in others.items()},
        }
        if not rows:
            bench.warm_up(makers, fill, context)
        rows += bench.time_steps(makers, fill, context, ours, progress)
    return rows


def _prefilled(model: PreTrainedModel, ids: torch.Tensor, chunk: int, progress: Progress, cache: Cache) -> None:
    prefill(model, cache, ids, chunk, progress)


def _feed_prompt(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> None:
    feed(model, cache, ids)


def _has_overhead(config: KVQuantConfig) -> bool:
    """Whether all layers flush together, on which the measurement relies."""
    return config.is_quantized and not config.layers


def _checks(plan: Plan, dtype: str, findings: Findings) -> list[Check]:
    def check(what: str, quant: str, context: int, value: float | None, unit: str, target: float) -> Check:
        wanted = target if quant == QUANT and is_target_model(plan.name) else None
        return Check(what, quant, dtype, context, value, unit, wanted, verdict(value, wanted, at_most=True))

    found = [
        check("slowest step", row.cache, row.context, row.slowest_step, "median steps", SLOWEST_STEP)
        for row in findings.steps
        if row.cache in plan.configs
    ]
    for cost in findings.prefill:
        found.append(
            check("quantize share", cost["quant"], cost["tokens"], cost["share"], "of dense prefill", QUANTIZE_SHARE)
        )
    for cost in findings.overhead:
        found.append(check("overhead", cost["quant"], cost["history"], cost["overhead"], "us per layer", OVERHEAD_US))
    return found
