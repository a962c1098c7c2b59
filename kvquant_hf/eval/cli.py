"""`python -m kvquant_hf.eval`: lm-eval's `run` command for the model `kvquant`, with several caches in one run."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval._cli.run import Run
from lm_eval.utils import setup_logging

from kvquant_hf.eval.ranks import process_number, stop_processes
from kvquant_hf.eval.runfile import load_run_file
from kvquant_hf.eval.runner import run_all

_DESCRIPTION = """\
Evaluate quantized caches with lm-evaluation-harness.

    python -m kvquant_hf.eval run --config configs/runs/gsm8k.yaml
    python -m kvquant_hf.eval --model kvquant --model_args pretrained=DIR,quant=k4v4 --tasks gsm8k,coqa
    python -m kvquant_hf.eval run --config configs/runs/gsm8k.yaml --caches dense k2v2,residual_length=64 --limit 20

Options are those of `lm-eval run`; what is given here wins over the file. An interrupted run goes on when the same
command is repeated. Each cache gets a directory of its own below --output_path, whose name carries the hash of its
resolved settings; the report lies beside them.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m kvquant_hf.eval",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    Run.create(commands)
    run = commands.choices["run"]
    run.usage = "python -m kvquant_hf.eval run --config FILE [options]"
    run.epilog = _DESCRIPTION
    run.add_argument(
        "--caches",
        nargs="+",
        default=None,
        metavar="NAME",
        help="caches to run instead of those of the file: presets or YAML paths, with optional settings",
    )
    return top


def overrides_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line sets, as lm-eval decides it: anything given, and zero."""
    skipped = {"command", "func", "config"}
    return {
        name: value
        for name, value in vars(options).items()
        if name not in skipped and (value or (value == 0 and value is not False))
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 1 where the run was refused or could not be done, 130 where it was interrupted, each after
        one line that says so.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words.insert(0, "run")
    options = parser().parse_args(words)
    who = f" (process {process_number()})" if process_number() else ""
    setup_logging(logging.ERROR if who else logging.INFO)
    try:
        run = load_run_file(Path(options.config) if options.config else None, overrides_of(options))
        run_all(run)
    except KeyboardInterrupt:
        print(f"kvquant_hf.eval{who}: interrupted; the same command goes on where it stopped.", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:  # also of a hub that cannot be reached
        print(f"kvquant_hf.eval{who}: {error}", file=sys.stderr)
        return 1
    finally:
        stop_processes()
    if not who:
        print(f"Report: {run.output / 'report.md'}")
    return 0
