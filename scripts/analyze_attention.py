#!/usr/bin/env python3
"""Measure where quantized keys and values move attention, and test published findings about it.

    python scripts/analyze_attention.py --ablation configs/ablations/axis.yaml
    python scripts/analyze_attention.py --ablation configs/ablations/axis.yaml --models prepared:smollm2-135m DIR \
        --windows 4 --output_path out/axis
    python scripts/analyze_attention.py --models prepared:smollm2-135m --quant k4v4 k2v2,residual_length=64 kivi-int2 \
        --text data/pride_and_prejudice_17_chapters.txt --output_path out/attention

The first form runs a file: its models, text, cache settings and claims, with what else is given here in their place;
it prints a verdict for each claim. The second form analyzes cache settings of your own; --scores adds perplexity and
KL through the stored history. Both write report.md (opens with the plot), layers.md, report.json and plots as PNG and
SVG, and go on where they stopped when the command is repeated.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging

from kvquant_hf.analysis import Ablation, Device, Measured, load_ablation, measure, verdict_lines
from kvquant_hf.analysis.measures import ERRORS
from kvquant_hf.analysis.report import write_report
from kvquant_hf.eval import Protocol, parse_quant
from kvquant_hf.eval.arguments import new_directory, positive, usable_device


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--ablation", type=Path, metavar="FILE", help="run file, as in configs/ablations/")
    what.add_argument(
        "--quant", nargs="+", metavar="NAME", help="presets or YAML paths, with settings as in k2v2,residual_length=64"
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="directories, hub ids or prepared:NAME")
    parser.add_argument("--text", type=Path, help="UTF-8 text or raw WikiText split")
    parser.add_argument("--start", help='character offset, or how a line begins: "Chapter 13"')
    parser.add_argument("--windows", type=int, help="windows of the text")
    parser.add_argument("--queries", type=int, help="attention of the last so many queries of a window")
    parser.add_argument("--context", type=int, help="tokens of a window")
    parser.add_argument("--prefill", type=int, help="tokens fed at once first")
    parser.add_argument("--step", type=int, help="tokens of each later piece")
    parser.add_argument("--scores", action="store_true", help="with --quant: score predictions, too")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", type=usable_device, default="cpu")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads (default 1, for shared machines)")
    parser.add_argument("--output_path", type=new_directory, metavar="DIR", help="default out/NAME")
    options = parser.parse_args(arguments)
    if options.quant:
        for name in ("models", "text"):
            if not getattr(options, name):
                parser.error(f"--quant needs --{name}")
    elif options.scores:
        parser.error("--scores belongs to --quant; a run file says whether to score")
    return options


def requested(options: argparse.Namespace) -> Ablation:
    """What the command line asks for."""
    if options.ablation:
        ablation = load_ablation(options.ablation)
    else:
        settings = {name: parse_quant(name) for name in options.quant}
        ablation = Ablation("attention", settings, options.text, tuple(options.models), scores=options.scores)
    own = ablation.protocol
    lengths = {name: getattr(options, name) or getattr(own, name) for name in ("context", "prefill", "step")}
    return ablation.replace(
        models=tuple(options.models) if options.models else None,
        text=options.text,
        start=options.start,
        windows=options.windows,
        queries=options.queries,
        protocol=Protocol(**lengths),
    )


def table(ablation: Ablation, measured: Measured) -> str:
    """Mean errors of a model as aligned text."""
    titles = [measure.title for measure in ERRORS.values()] + ["KL", "top-1"] * bool(measured.scores)
    width = max(len(name) for name in ablation.settings)
    lines = [" " * width + "".join(f"  {title}" for title in titles)]
    for name in ablation.settings:
        cells = [f"{measured.value(metric, name):.4f}" for metric in ERRORS]
        if measured.scores:
            cells += [f"{measured.scores[name].kl:.4f}", f"{measured.scores[name].top1:.3f}"]
        row = "".join(f"  {cell:>{len(title)}}" for title, cell in zip(titles, cells, strict=True))
        lines.append(f"{name:<{width}}{row}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> Path:
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    ablation = requested(options)
    output = options.output_path or Path("out") / ablation.name
    device = Device(options.dtype, options.device)
    done: list[Measured] = []
    for model in ablation.models:
        measured = measure(ablation, model, output, device)
        done.append(measured)
        print(f"{measured.model}: {ablation.title}")
        print(table(ablation, measured))
        print("\n".join(verdict_lines(measured.verdicts)), flush=True)
    return write_report(ablation, done, output, device)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        report = run(options)
    except KeyboardInterrupt:
        print("analyze_attention.py: interrupted; the same command goes on where it stopped.", file=sys.stderr)
        return 130
    except (ValueError, ImportError, OSError) as error:
        print(f"analyze_attention.py: {error}", file=sys.stderr)
        return 1
    print(f"Report: {report}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
