#!/usr/bin/env python3
"""Compare evaluation runs sample by sample.

    python scripts/compare.py out/gsm8k
    python scripts/compare.py out/gsm8k/dense-1a2b3c4d5e out/gsm8k/k4v4-6f7a8b9c0d --json out/compare.json

Each argument is the directory of one cache, or the output directory of a run file, which stands for all caches in it.
The first run (in an output directory: its unquantized one) is the baseline. Samples are paired by the hashes of their
document, prompt and target; runs that differ in more than the cache are refused, with the reasons.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvquant_hf.eval.artifacts import write_json, write_text
from kvquant_hf.eval.compare import check_comparable, compare, comparison_table, stats_table
from kvquant_hf.eval.runs import find_runs


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="directories of runs, the baseline first")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write everything to this file")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="also write the tables to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        baseline, *others = find_runs(options.runs)
        if not others:
            raise ValueError(f"`runs` must be at least two, found {baseline.name} in {baseline.directory} alone.")
        notes = {run.name: check_comparable(baseline, run) for run in others}
        compared = [(run, compare(baseline, run)) for run in others]
    except (ValueError, FileNotFoundError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 1
    table = f"{stats_table([baseline, *others])}\n\n{comparison_table(baseline, compared)}"
    print(table)
    for name, differing in notes.items():
        for text in differing:
            print(f"compare.py: {name} also differs in {text}", file=sys.stderr)
    if options.markdown:
        write_text(options.markdown, table + "\n")
    if options.json:
        report = {
            "baseline": {"name": baseline.name, "stats": baseline.stats, "config": baseline.config},
            "runs": [
                {
                    "name": run.name,
                    "stats": run.stats,
                    "config": run.config,
                    "also_differs": notes[run.name],
                    "comparisons": [item.to_dict() for item in items],
                }
                for run, items in compared
            ],
        }
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
