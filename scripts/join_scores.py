#!/usr/bin/env python3
"""Make one report of several that `scripts/score.py --report` wrote: one table and one plot over all their models.

    python scripts/join_scores.py out/smollm2 out/qwen out/qwen-more-caches --report out/all

Reports must agree in protocol and texts, and in what a name of settings means; each cache of a model may appear once.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvquant_hf.eval.arguments import new_directory
from kvquant_hf.eval.score_join import join_reports
from kvquant_hf.eval.score_report import write_score_report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "reports", type=Path, nargs="+", metavar="REPORT", help="directories of reports, or their JSON"
    )
    parser.add_argument("--report", type=new_directory, required=True, metavar="DIR", help="where the joint one goes")
    options = parser.parse_args(arguments)
    try:
        report = join_reports(options.reports)
    except (ValueError, OSError) as error:
        print(f"join_scores.py: {error}", file=sys.stderr)
        return 1
    print(f"Report: {write_score_report(options.report, report)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
