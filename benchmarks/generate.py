#!/usr/bin/env python3
"""Time decode steps of a model with quantized caches against other caches, and what a cache costs besides.

    python benchmarks/generate.py --model DIR_OR_HUB_ID --json out/generate.json --plot out/generate.png
    python benchmarks/generate.py --model DIR_OR_HUB_ID --quick
    python benchmarks/generate.py --model DIR_OR_HUB_ID --quant k4v4 --baseline dynamic hf-quanto hf-hqq --context 4096

Baselines: `dynamic` and `static` are Transformers' dense caches, hf-… its QuantizedCache (optionally with the width,
as in hf-quanto:2). See benchmarks/README.md for the protocol.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _backends import fast_backend
from _caches import NAMES, PeakMemory
from _command_line import check_threads, positive
from _end_to_end import Check, Findings, Plan, measure
from _report import (
    check_plots,
    context_axis,
    environment,
    footnotes,
    mark,
    markdown_table,
    number,
    save_plot,
    tally,
    write_json,
)
from _steps import CacheSteps, Result
from transformers.utils import logging

from kvquant_hf.checks import check_choice
from kvquant_hf.eval import parse_quant
from kvquant_hf.ops import available_backends

DEFAULT_TEXT = Path(__file__).parent.parent / "data" / "pride_and_prejudice_excerpt.txt"
DTYPES = ("float32", "bfloat16", "float16")
BASELINES = ("dynamic", "static", "hf-quanto", "hf-hqq", "hf-fp8")
QUICK_BASELINES = ("dynamic", "static")
FILLS = ("copy", "prefill")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory or hub id")
    parser.add_argument("--quant", nargs="+", metavar="NAME", help="presets or YAML paths, with optional settings")
    parser.add_argument(
        "--baseline", nargs="+", metavar="NAME", help=f"of {', '.join(NAMES)} (all that are installed)"
    )
    parser.add_argument("--context", nargs="+", type=positive, help="tokens stored (default: 512 4096 8192)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="of the model (default: float32 bfloat16)")
    parser.add_argument("--steps", type=positive, help="timed at each context (default 40)")
    parser.add_argument("--prefill", type=positive, help="tokens of the prompt that is timed (default 4096)")
    parser.add_argument(
        "--fill", choices=FILLS, default="copy", help="how a context comes to be (default %(default)s)"
    )
    parser.add_argument("--chunk", type=positive, default=512, help="tokens fed at once (default %(default)s)")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="repeated as often as needed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", metavar="NAME", help="of our caches (default: the fused one of the device)")
    parser.add_argument("--attn", default="sdpa", metavar="NAME", help="attention implementation (default sdpa)")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the orders (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="short contexts, few caches: under a minute for SmolLM2")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything to this file")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw tokens/s and bytes, as PNG and SVG")
    options = parser.parse_args(arguments)
    quick = options.quick
    options.quant = options.quant or (["k4v4"] if quick else ["k4v4", "k2v2"])
    options.context = sorted(set(options.context or ((256, 512) if quick else (512, 4096, 8192))))
    options.dtype = options.dtype or (["float32"] if quick else ["float32", "bfloat16"])
    options.steps = options.steps or (34 if quick else 40)
    options.prefill = options.prefill or (256 if quick else 4096)
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """What a command line asks for, everything named being known and possible.

    Raises:
        ValueError: Something is not; the message names the argument, what is allowed and what was given.
        ImportError: A plot is wanted and cannot be drawn.
    """
    for name in options.baseline or ():
        check_choice("baseline", name.partition(":")[0], NAMES)
    check_threads(options.threads)
    if options.plot:
        check_plots()
    device = torch.device(options.device)
    backend = options.backend or fast_backend(device)
    check_choice("backend", backend, ("dense", *available_backends()))
    return Plan(
        model=options.model,
        configs={quant: parse_quant(quant).replace(backend=backend) for quant in options.quant},
        baselines=options.baseline or (QUICK_BASELINES if options.quick else BASELINES),
        all_baselines=bool(options.baseline),
        contexts=options.context,
        steps=options.steps,
        prompt=options.prefill,
        cycles=3 if options.quick else 8,
        fill=options.fill,
        chunk=options.chunk,
        text=options.text,
        device=device,
        backend=backend,
        attention=options.attn,
        seed=options.seed,
    )


def caches_table(steps: Sequence[CacheSteps]) -> str:
    """What each cache does and holds."""
    header = ["dtype", "context", "cache", "step, ms", "tokens/s", "slowest step", "KV, MB", "peak, MB"]
    rows = [
        [
            row.dtype,
            f"{row.context:,}",
            row.cache,
            "not available" if row.step_ms is None else number(row.step_ms, 1) + mark(row.basis),
            number(row.tokens_per_s, 1),
            number(row.slowest_step),
            number(megabytes(row.kv_bytes), 1),
            number(megabytes(row.peak_bytes), 1),
        ]
        for row in steps
    ]
    return markdown_table(header, rows)


def megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6


def results_table(results: Sequence[Result], checks: Sequence[Check]) -> str:
    """Ratios and other figures against their targets."""
    header = ["dtype", "context", "quant", "against", "value", "target", ""]
    rows = [
        [r.dtype, f"{r.context:,}", r.quant, r.baseline, _times(r.ratio, r.basis), _bound(r.target, ">="), r.verdict]
        for r in results
    ]
    rows += [
        [
            c.dtype,
            f"{c.context:,}",
            c.quant,
            f"{c.check}, {c.unit}",
            number(c.value),
            _bound(c.target, "<="),
            c.verdict,
        ]
        for c in checks
    ]
    return markdown_table(header, rows)


def _times(ratio: float | None, basis: str | None) -> str:
    return "not available" if ratio is None else f"{ratio:.2f} x{mark(basis)}"


def _bound(target: float | None, sign: str) -> str:
    return "-" if target is None else f"{sign} {target:.2f}"


def draw(steps: Sequence[CacheSteps], figure: Any, panels: Any) -> None:
    """Tokens per second and bytes held against context: a row of panels per dtype."""
    names = list(dict.fromkeys(row.cache for row in steps))
    for i, dtype in enumerate(dict.fromkeys(row.dtype for row in steps)):
        of_dtype = [row for row in steps if row.dtype == dtype]
        for panel, label in zip(panels[i], ("tokens/s", "keys and values held, MB"), strict=True):
            for k, name in enumerate(names):
                cells = [row for row in of_dtype if row.cache == name and row.step_ms is not None]
                values = [row.tokens_per_s if label == "tokens/s" else megabytes(row.kv_bytes) for row in cells]
                panel.plot([row.context for row in cells], values, "o-", color=f"C{k}", label=name)
            panel.set(title=dtype, xlabel="tokens stored", ylabel=label)
            context_axis(panel, [row.context for row in of_dtype])
            panel.set_ylim(bottom=0)
            panel.legend(fontsize="small")
    figure.suptitle("Decoding with each cache")


def show(plan: Plan, threads: int, machine: dict[str, object], findings: Findings) -> None:
    where = f"{threads} thread(s)" if plan.device.type == "cpu" else str(plan.device)
    print(f"{plan.name} on {machine['device']}, {where}, backend {plan.backend}, {plan.steps} steps")
    print(caches_table(findings.steps) + "\n")
    print(results_table(findings.results, findings.checks) + "\n")
    for cost in findings.prefill:
        print(
            f"prefill of {cost['tokens']:,} tokens, {cost['dtype']}: dynamic {cost['dense_seconds']:.2f} s, "
            f"{cost['quant']} {cost['seconds']:.2f} s, of which storing {cost['store_seconds']:.3f} s"
        )
    for cost in findings.overhead:
        print(
            f"{cost['quant']}, {cost['dtype']}, layer and step at {cost['history']} tokens: {cost['step']:.1f} us, "
            f"before any token is read {cost['overhead']:.1f} us, of which flushes {cost['flush']:.1f} us"
        )
    print(tally([*(row.verdict for row in findings.results), *(row.verdict for row in findings.checks)]))
    for line in footnotes([row.basis for row in findings.steps]):
        print(line)
    for reason in dict.fromkeys(f"{row.cache} not available: {row.reason}" for row in findings.steps if row.reason):
        print(reason)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    logging.disable_progress_bar()
    findings = Findings([], [], [], [], [])
    try:
        plan = plan_of(options)
        torch.set_num_threads(options.threads)
        machine = environment(plan.device)
        for dtype in options.dtype:
            findings.extend(measure(plan, dtype))
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    show(plan, options.threads, machine, findings)
    if options.json:
        report = {
            "environment": machine,
            "protocol": {"steps": plan.steps, "fill": plan.fill, "attention": plan.attention, "seed": plan.seed},
            "peak_bytes_method": PeakMemory(plan.device).method,
            "text": plan.text.name,
            "configs": {quant: config.to_dict() for quant, config in plan.configs.items()},
            **asdict(findings),
        }
        write_json(options.json, report)
    if options.plot:
        save_plot(options.plot, 2, len(options.dtype), lambda figure, panels: draw(findings.steps, figure, panels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
