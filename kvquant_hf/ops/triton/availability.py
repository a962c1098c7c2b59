"""Whether Triton can run here, found out without importing it for nothing."""

import os
from functools import cache
from importlib.util import find_spec

import torch


@cache
def is_installed() -> bool:
    """Whether Triton can be imported."""
    try:
        return find_spec("triton") is not None
    except (ImportError, ValueError):  # a module put into `sys.modules` without a specification
        return False


@cache
def has_driver() -> bool:
    """Whether Triton finds a GPU driver; its presence alone says nothing."""
    if not is_installed():
        return False
    from triton.backends import backends

    return any(backend.driver.is_active() for backend in backends.values())


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (`TRITON_INTERPRET=1` before Triton's import)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes") and is_installed()


def why_unavailable(device: torch.device) -> str | None:
    """What keeps the kernels from running on tensors of a device, or `None`."""
    if not is_installed():
        return "Triton is not installed (`pip install kvquant-hf[triton]`)"
    if device.type == "cpu":
        return None if is_interpreted() else "on the CPU Triton kernels run only under TRITON_INTERPRET=1"
    if device.type != "cuda":
        return f"Triton kernels do not run on {device.type}"
    return None if is_interpreted() or has_driver() else "Triton finds no active GPU driver"
