"""Types of command-line arguments that several scripts take, for `argparse`."""

from argparse import ArgumentTypeError
from pathlib import Path

import torch


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def usable_device(text: str) -> str:
    """A device on which this installation of PyTorch can make tensors."""
    try:
        torch.empty(0, device=text)
    # Builds without CUDA raise AssertionError, devices that are not there RuntimeError.
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArgumentTypeError(f"must be a device that can be used here, got {text!r}: {reason}") from error
    return text


def new_directory(text: str) -> Path:
    """A directory for results, which need not exist."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ArgumentTypeError(f"must be a directory or a path where nothing is yet, got the file {text!r}")
    return path
