#!/usr/bin/env python3
"""Time decode attention of one layer over packed keys and values against PyTorch's attention over dense ones.

    python benchmarks/attention.py --json out/attention.json --plot out/attention.png
    python benchmarks/attention.py --quick --quant k4v4 k2v2 --threads 1

Baselines: `sdpa` is F.scaled_dot_product_attention over contiguous float32 keys and values in the form that is fastest
for the shape, `sdpa-bf16` the same in bfloat16, `same-kernel-bf16` our kernel over unquantized bfloat16 blocks, and
`post-rope` our kernel over keys quantized after RoPE. See benchmarks/README.md for the protocol.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _backends import fast_backend
from _command_line import check_threads, positive
from _contenders import BASELINES, Result, compare, memory_needed, prepare
from _report import (
    MEGABYTE,
    check_plots,
    context_axis,
    environment,
    footnotes,
    last_level_cache,
    mark,
    markdown_table,
    number,
    save_plot,
    tally,
    usable_cpus,
    write_json,
)
from _timing import interleave
from _views import Shape
from tqdm import tqdm

from kvquant_hf import KVQuantConfig
from kvquant_hf.checks import check_choice
from kvquant_hf.eval import parse_quant
from kvquant_hf.ops import available_backends

SHAPES = ("1,3,3,64", "1,8,4,128")
CONTEXTS = (1024, 4096, 16384, 65536)
QUICK_CONTEXTS = (1024, 4096)
POOL_MB, QUICK_POOL_MB = 128, 32


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quant",
        nargs="+",
        default=["k4v4"],
        metavar="NAME",
        help="preset or YAML path, each with optional settings: k2v2,residual_length=64 (default: k4v4)",
    )
    parser.add_argument(
        "--baseline", nargs="+", default=list(BASELINES), metavar="NAME", help=f"of {', '.join(BASELINES)} (all)"
    )
    parser.add_argument(
        "--shape", nargs="+", default=list(SHAPES), metavar="B,H_kv,G,D", help=f"sizes (default: {' '.join(SHAPES)})"
    )
    parser.add_argument("--context", nargs="+", type=positive, help="tokens stored (default: 1k 4k 16k 64k)")
    parser.add_argument("--threads", nargs="+", type=positive, help="CPU threads (default: 1 2, as far as usable)")
    parser.add_argument("--backend", default=fast_backend("cpu"), metavar="NAME", help="default %(default)s")
    parser.add_argument("--samples", type=positive, default=30, help="per candidate (default %(default)s)")
    parser.add_argument("--pool-mb", type=positive, help=f"data that each candidate cycles through ({POOL_MB})")
    parser.add_argument("--memory-mb", type=positive, default=8192, help="skip what needs more (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the samples (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="short contexts, one thread: under a minute")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything to this file")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw speedups, as PNG and SVG")
    options = parser.parse_args(arguments)
    options.context = options.context or (QUICK_CONTEXTS if options.quick else CONTEXTS)
    options.pool_mb = options.pool_mb or (QUICK_POOL_MB if options.quick else POOL_MB)
    if options.threads is None:
        options.threads = [count for count in ((1,) if options.quick else (1, 2)) if count <= usable_cpus()]
    return options


def check(options: argparse.Namespace) -> tuple[list[Shape], dict[str, KVQuantConfig]]:
    """Shapes and settings, everything named being known and possible.

    Raises:
        ValueError: Something is not; the message names the argument, what is allowed and what was given.
        ImportError: A plot is wanted and cannot be drawn.
    """
    for baseline in options.baseline:
        check_choice("baseline", baseline, BASELINES)
    check_choice("backend", options.backend, available_backends())
    for count in options.threads:
        check_threads(count)
    if options.plot:
        check_plots()
    configs = {quant: parse_quant(quant) for quant in options.quant}
    for quant, config in configs.items():
        if not config.is_quantized:
            raise ValueError(f"`quant` must quantize keys or values, got {quant!r}, which does neither.")
    return [Shape.parse(text) for text in options.shape], configs


def measure(options: argparse.Namespace) -> list[Result]:
    """Everything asked for."""
    shapes, configs = check(options)
    pool_bytes = options.pool_mb * MEGABYTE
    results = []
    rounds = len(shapes) * len(options.context) * len(options.threads) * options.samples
    with tqdm(total=rounds, desc="attention", unit="round", disable=None) as bar:
        for shape, context in ((shape, context) for shape in shapes for context in options.context):
            bar.set_postfix_str(f"{shape} at {context}", refresh=True)
            needed = memory_needed(shape, context, configs, options.baseline, pool_bytes)
            if needed > options.memory_mb * MEGABYTE:
                tqdm.write(f"{shape} at {context} tokens skipped: {needed / 1e6:,.0f} MB > --memory-mb", sys.stderr)
                bar.update(options.samples * len(options.threads))
                continue
            contest = prepare(shape, context, configs, options.baseline, options.backend, pool_bytes)
            for threads in options.threads:
                torch.set_num_threads(threads)
                timings = interleave(
                    contest.calls,
                    alone=threads == 1,
                    samples=options.samples,
                    seed=options.seed,
                    progress=bar.update,
                )
                for quant, config in configs.items():
                    results += [
                        compare(contest, quant, baseline, threads, timings)
                        for baseline in options.baseline
                        if baseline != "post-rope" or (config.key.is_quantized and config.key.rope == "pre")
                    ]
    return results


def table(results: Sequence[Result]) -> str:
    header = ["B,H_kv,G,D", "context", "threads", "quant", "ms", "GB/s", "baseline", "ms", "speedup", "target", ""]
    rows = [
        [
            str(r.shape),
            f"{r.context:,}",
            str(r.threads),
            r.quant,
            number(r.milliseconds, 3),
            number(r.gigabytes_per_s, 1),
            r.baseline + (f" ({r.baseline_form})" if r.baseline_form else ""),
            number(r.baseline_milliseconds, 3),
            "not available" if r.speedup is None else number(r.speedup) + mark(r.basis),
            number(r.target),
            r.verdict,
        ]
        for r in results
    ]
    lines = [markdown_table(header, rows), "", tally([r.verdict for r in results])]
    lines += footnotes([r.basis for r in results])
    lines += [f"not available: {reason}" for reason in dict.fromkeys(r.reason for r in results if r.reason)]
    return "\n".join(lines)


def draw(results: Sequence[Result], figure: Any, panels: Any) -> None:
    """Speedup against context: a row of panels per shape, a panel per number of threads."""
    shapes = list(dict.fromkeys(r.shape for r in results))
    threads = list(dict.fromkeys(r.threads for r in results))
    lines = list(dict.fromkeys((r.quant, r.baseline) for r in results))
    for i, j in ((i, j) for i in range(len(shapes)) for j in range(len(threads))):
        panel = panels[i][j]
        panel.axhline(1, color="0.5", linewidth=0.8)
        of_panel = [r for r in results if r.shape == shapes[i] and r.threads == threads[j]]
        for k, (quant, baseline) in enumerate(lines):
            cells = [r for r in of_panel if (r.quant, r.baseline) == (quant, baseline) and r.speedup is not None]
            if cells:
                x, y = [r.context for r in cells], [r.speedup for r in cells]
                panel.plot(x, y, "o-", color=f"C{k}", label=f"{quant} / {baseline}")
        title = f"B,H_kv,G,D = {shapes[i]}, {threads[j]} thread(s)"
        panel.set(title=title, xlabel="tokens stored", ylabel="times faster than the baseline")
        context_axis(panel, [r.context for r in of_panel])
        panel.set_ylim(bottom=0)
        panel.legend(fontsize="small")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        machine = {**environment(), "threads": options.threads}
        results = measure(options)
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        print(f"attention.py: {error}", file=sys.stderr)
        return 1
    print(
        f"{machine['device']}, backend {options.backend}, pools of {options.pool_mb} MB, medians of {options.samples}"
    )
    if (last_level_cache() or 0) > options.pool_mb * MEGABYTE:
        print("The last-level cache the system reports is larger than a pool: reads may not be cold, see --pool-mb.")
    print(table(results))
    if options.json:
        report = {
            "environment": machine,
            "protocol": {"samples": options.samples, "pool_bytes": options.pool_mb * MEGABYTE, "seed": options.seed},
            "configs": {quant: parse_quant(quant).to_dict() for quant in options.quant},
            "results": [asdict(result) for result in results],
        }
        write_json(options.json, report)
    if options.plot and results:
        shapes = len({r.shape for r in results})
        save_plot(options.plot, len(options.threads), shapes, lambda figure, panels: draw(results, figure, panels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
