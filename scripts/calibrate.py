#!/usr/bin/env python3
"""Calibrate cache settings on a model and a text.

    python scripts/calibrate.py budget --model prepared:smollm2-135m --bits 3.0 \
        --text data/pride_and_prejudice_17_chapters.txt
    python scripts/calibrate.py budget --model DIR --kl 0.01 --text wiki.test.raw --windows 4 --context 1024
    python scripts/calibrate.py budget --model DIR --key-kl 0.02 --value-error 0.1 --text wiki.test.raw
    python scripts/calibrate.py budget --model DIR --bytes 40e6 --context-length 4096 --text wiki.test.raw

`budget` finds the settings of each layer's keys and values that meet an error with the least size, or a size with the
least error, see docs/budgets.md. It writes preset.yaml, which QuantCache takes, report.md (opens with the plot),
report.json and the plots as PNG and SVG. Repeat a command after an interruption and it goes on where it stopped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging

from kvquant_hf import KVQuantConfig
from kvquant_hf.analysis import Budget, Device, Meter, calibrate, default_candidates, load_candidates
from kvquant_hf.analysis.budget_markdown import PRESET, Source
from kvquant_hf.analysis.budget_report import write_budget_report
from kvquant_hf.analysis.run import load_inputs, open_store, text_facts
from kvquant_hf.eval import Protocol
from kvquant_hf.eval.models import model_name, resolve_model


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_budget(commands.add_parser("budget", help="settings by layer that meet an error or a size"))
    return parser.parse_args(arguments)


def add_common(parser: argparse.ArgumentParser, prefill: int) -> None:
    """Options of every command: model, text, how it is fed, where it runs."""
    parser.add_argument("--model", required=True, metavar="NAME", help="directory, hub id or prepared:NAME")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text or raw WikiText split")
    parser.add_argument(
        "--start", default="0", help='character offset, or how a line begins: "Chapter 13" (default 0)'
    )
    parser.add_argument("--windows", type=int, default=2, help="windows of the text (default %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window (default %(default)s)")
    parser.add_argument("--prefill", type=int, default=prefill, help="tokens fed at once first (default %(default)s)")
    parser.add_argument("--step", type=int, default=64, help="tokens of each later piece (default %(default)s)")
    parser.add_argument("--queries", type=int, default=128, help="attention of the last so many queries of a window")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1: safe on a shared machine)")
    parser.add_argument("--output_path", type=Path, metavar="DIR", help="default out/COMMAND-MODEL")


# ---- budget --------------------------------------------------------------------------------------------------------


def whole(text: str) -> int:
    """A whole number, also as `40e6`."""
    number = float(text)
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(number)


def add_budget(parser: argparse.ArgumentParser) -> None:
    add_common(parser, prefill=384)
    limits = parser.add_argument_group(
        "budget, exactly one", "an error with the least size, or a size with the least error"
    )
    limits.add_argument("--kl", type=float, metavar="NATS", help="KL of the predictions to the dense cache's")
    limits.add_argument(
        "--key-kl", type=float, metavar="NATS", help="KL of attention probabilities, with --value-error"
    )
    limits.add_argument("--value-error", type=float, metavar="RATIO", help="relative error of the attention output")
    limits.add_argument("--bits", type=float, help="average bits per value of the quantized part, metadata included")
    limits.add_argument(
        "--bytes", type=whole, help="bytes of the whole cache of one sequence of --context-length tokens"
    )
    limits.add_argument("--context-length", type=int, metavar="TOKENS", help="length that --bytes is about")
    parser.add_argument("--candidates", type=Path, metavar="FILE", help="YAML: named settings under `key` and `value`")
    parser.add_argument("--residual", type=int, default=128, help="newest tokens kept exact (default %(default)s)")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens kept exact (default %(default)s)")
    parser.add_argument(
        "--held-out",
        type=int,
        default=2,
        metavar="N",
        help="check the result on the next N windows (default %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=4, help="solutions at most (default %(default)s)")
    parser.set_defaults(run=run_budget)


def run_budget(options: argparse.Namespace) -> int:
    names = ("kl", "key_kl", "value_error", "bits", "bytes", "context_length")
    budget = Budget(**{name: getattr(options, name) for name in names})
    protocol = Protocol(options.context, options.prefill, options.step)
    frame = KVQuantConfig(residual_length=options.residual, sink_length=options.sinks)
    candidates = load_candidates(options.candidates) if options.candidates else default_candidates()
    if options.windows < 1:
        raise ValueError(f"`--windows` must be an integer >= 1, got {options.windows}.")
    if options.held_out < 0:
        raise ValueError(f"`--held-out` must be an integer >= 0, got {options.held_out}.")
    name = model_name(resolve_model(options.model))
    output = options.output_path or Path("out") / f"budget-{name}"
    device = Device(options.dtype, options.device)
    count = options.windows + options.held_out
    resolved, model, windows = load_inputs(options.model, device, options.text, options.start, options.context, count)
    meter = Meter(
        model,
        windows[: options.windows],
        windows[options.windows :],
        protocol,
        options.queries,
        frame,
        lambda settings: open_store(output, resolved, protocol, device, settings),
    )
    found = calibrate(meter, budget, candidates, options.rounds)
    text = text_facts(options.text, options.start, options.windows)
    held_out = text | {"windows": options.held_out} if options.held_out else None
    source = Source(name, protocol, min(options.queries, protocol.scored), text, held_out, device)
    report = write_budget_report(found, source, output)
    answer = found.answer
    for label, row in found.rows.items():
        figures = {**row.measured, **row.measured_size}
        print(f"{label}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    print(f"Report: {report}; settings: {output / PRESET}", file=sys.stderr)
    if not answer.is_met:
        print(f"calibrate.py: no solution meets the budget: {budget}. The best is reported.", file=sys.stderr)
        return 1
    return 0


# ---- the rest ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        print("calibrate.py: interrupted; the same command goes on where it stopped.", file=sys.stderr)
        return 130
    except (ValueError, ImportError, OSError) as error:
        print(f"calibrate.py: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
