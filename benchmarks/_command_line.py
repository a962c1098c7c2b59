"""What the command lines of both benchmarks have in common."""

from _report import usable_cpus

from kvquant_hf.eval.arguments import positive

__all__ = ["check_threads", "positive"]


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
