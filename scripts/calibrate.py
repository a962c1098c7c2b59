#!/usr/bin/env python3
"""Calibrate cache settings on a model and a text.

    python scripts/calibrate.py budget --model prepared:smollm2-135m --bits 3.0 \
        --text data/pride_and_prejudice_17_chapters.txt
    python scripts/calibrate.py budget --model DIR --kl 0.01 --text wiki.test.raw --windows 4 --context 1024
    python scripts/calibrate.py budget --model DIR --key-kl 0.02 --value-error 0.1 --text wiki.test.raw
    python scripts/calibrate.py budget --model DIR --bytes 40e6 --context-length 4096 --text wiki.test.raw
    python scripts/calibrate.py levels --model prepared:smollm2-135m --quant kvquant3 --q-norm \
        --text data/pride_and_prejudice_17_chapters.txt
    python scripts/calibrate.py order --model prepared:smollm2-135m --quant rotatekv2 \
        --text data/pride_and_prejudice_17_chapters.txt

`budget` finds the settings of each layer's keys and values that meet an error with the least size, or a size with the
least error, see docs/budgets.md. `levels` finds what the codes of each layer's keys and values should stand for
(KVQuant), see docs/levels.md. `order` finds in which order a rotation should take the channels of each layer's keys
and values (RotateKV), see docs/orders.md. All write preset.yaml, which QuantCache takes, report.md (opens with the
plot), report.json and the plots as PNG and SVG. Repeat `budget` after an interruption and it goes on where it stopped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from kvquant_hf import KVQuantConfig
from kvquant_hf.analysis import (
    Budget,
    Device,
    Meter,
    calibrate,
    calibrate_levels,
    calibrate_orders,
    default_candidates,
    load_candidates,
)
from kvquant_hf.analysis.budget_markdown import PRESET, Source
from kvquant_hf.analysis.budget_report import write_budget_report
from kvquant_hf.analysis.candidates import SIDES
from kvquant_hf.analysis.level_report import CalibrationSource, mean_ratio, write_level_report
from kvquant_hf.analysis.order_report import mean_ratio as mean_order_ratio
from kvquant_hf.analysis.order_report import write_order_report
from kvquant_hf.analysis.run import load_inputs, open_store, text_facts
from kvquant_hf.eval import Protocol, parse_quant
from kvquant_hf.eval.arguments import new_directory, positive, usable_device
from kvquant_hf.eval.models import model_name, resolve_model
from kvquant_hf.spec import TABLE_NBITS


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_budget(commands.add_parser("budget", help="settings by layer that meet an error or a size"))
    add_levels(commands.add_parser("levels", help="what codes stand for, by layer"))
    add_order(commands.add_parser("order", help="in which order rotations take channels, by layer"))
    return parser.parse_args(arguments)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options of every command: model, text, where it runs."""
    parser.add_argument("--model", required=True, metavar="NAME", help="directory, hub id or prepared:NAME")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text or raw WikiText split")
    parser.add_argument(
        "--start", default="0", help='character offset, or how a line begins: "Chapter 13" (default 0)'
    )
    parser.add_argument("--windows", type=int, default=2, help="windows of the text (default %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window (default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", type=usable_device, default="cpu")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads (default 1, for shared machines)")
    parser.add_argument("--output_path", type=new_directory, metavar="DIR", help="default out/COMMAND-MODEL")


def add_feeding(parser: argparse.ArgumentParser) -> None:
    """How caches are fed a window."""
    parser.add_argument("--prefill", type=int, default=384, help="tokens fed at once first (default %(default)s)")
    parser.add_argument("--step", type=int, default=64, help="tokens of each later piece (default %(default)s)")


def add_quant(parser: argparse.ArgumentParser, default: str) -> None:
    """The settings that are calibrated."""
    parser.add_argument(
        "--quant",
        default=default,
        metavar="PRESET",
        help="preset or YAML file with all other settings, [,setting=value…] (default %(default)s)",
    )


# ---- budget --------------------------------------------------------------------------------------------------------


def whole(text: str) -> int:
    """A whole number, also as `40e6`."""
    number = float(text)
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(number)


def add_budget(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    add_feeding(parser)
    parser.add_argument("--queries", type=positive, default=128, help="attention of a window's last so many queries")
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
    check_windows(options)
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


# ---- levels --------------------------------------------------------------------------------------------------------


def add_levels(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    add_quant(parser, "kvquant3")
    parser.add_argument("--nbits", type=int, choices=TABLE_NBITS, help="bits of codes (default: those of --quant)")
    parser.add_argument("--q-norm", action="store_true", help="levels that keep mean and standard deviation")
    parser.add_argument(
        "--unweighted", action="store_true", help="leave out the gradients of the loss, for comparison"
    )
    parser.set_defaults(run=run_levels)


def run_levels(options: argparse.Namespace) -> int:
    check_windows(options)
    quant = options.quant
    if options.nbits is not None:
        quant += f",key.nbits={options.nbits},value.nbits={options.nbits}"
    config = parse_quant(quant)
    source, output, model, windows = load_source(options, quant)
    with tqdm(total=len(windows), unit="window", disable=None) as bar:
        found = calibrate_levels(model, windows, config, options.q_norm, not options.unweighted, bar.update)
    report = write_level_report(found, source, output)
    for side in SIDES:
        even, gaussian = (mean_ratio(found, side, name) for name in ("even_error", "gaussian_error"))
        if even is not None and gaussian is not None:
            print(f"{side}s: weighted error {even:.3f} of evenly spaced levels', {gaussian:.3f} of Gaussian ones'")
    print(f"Report: {report}; settings: {output / PRESET}", file=sys.stderr)
    return 0


# ---- order ---------------------------------------------------------------------------------------------------------


def add_order(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    add_quant(parser, "rotatekv2")
    add_feeding(parser)
    parser.set_defaults(run=run_order)


def run_order(options: argparse.Namespace) -> int:
    check_windows(options)
    config = parse_quant(options.quant)
    protocol = Protocol(options.context, options.prefill, options.step)
    source, output, model, windows = load_source(options, options.quant)
    with tqdm(total=2 * len(windows), unit="window", disable=None) as bar:
        found = calibrate_orders(model, windows, config, protocol, bar.update)
    report = write_order_report(found, source, protocol, output)
    for side in SIDES:
        ratio = mean_order_ratio(found, side)
        if ratio is not None:
            print(f"{side}s: error {ratio:.3f} of that with the model's order")
    print(f"Report: {report}; settings: {output / PRESET}", file=sys.stderr)
    return 0


# ---- the rest ------------------------------------------------------------------------------------------------------


def load_source(
    options: argparse.Namespace, quant: str
) -> tuple[CalibrationSource, Path, PreTrainedModel, torch.Tensor]:
    """What is calibrated and on what, where results go, the model, and windows `[N, T]` of the text."""
    name = model_name(resolve_model(options.model))
    device = Device(options.dtype, options.device)
    _, model, windows = load_inputs(
        options.model, device, options.text, options.start, options.context, options.windows
    )
    text = text_facts(options.text, options.start, options.windows)
    base, comma, rest = quant.partition(",")
    source = CalibrationSource(name, Path(base).name + comma + rest, options.context, text, device)
    return source, options.output_path or Path("out") / f"{options.command}-{name}", model, windows


def check_windows(options: argparse.Namespace) -> None:
    if options.windows < 1:
        raise ValueError(f"`--windows` must be an integer >= 1, got {options.windows}.")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        on = "; the same command goes on where it stopped" if options.command == "budget" else ""
        print(f"calibrate.py: interrupted{on}.", file=sys.stderr)
        return 130
    except (ValueError, ImportError, OSError) as error:
        print(f"calibrate.py: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
