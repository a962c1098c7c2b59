"""What the command lines of both benchmarks have in common."""

import argparse

from _report import usable_cpus


def positive(text: str) -> int:
    """An integer of at least 1, for `argparse`."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def check_threads(threads: int) -> None:
    """Raise unless there is a CPU for each thread.

    Raises:
        ValueError: There are fewer.
    """
    if threads > usable_cpus():
        raise ValueError(
            f"`threads` must be at most the {usable_cpus()} CPUs this process may use, got {threads}: threads that "
            "wait for each other give no speed."
        )
