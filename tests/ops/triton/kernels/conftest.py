"""Tests that launch kernels: on a GPU where there is one, else in Triton's interpreter.

The interpreter must be switched on before Triton is imported and stays on for the whole process, so without a GPU
these tests are collected only under `TRITON_INTERPRET=1`; `test_in_interpreter.py` runs them that way in a process of
their own.
"""

import pytest
import torch

from kvquant_hf.ops.triton import is_interpreted
from tests.ops.triton.kernels import emulation

ON_GPU = torch.cuda.is_available() and not is_interpreted()

if is_interpreted():
    emulation.install()
elif not ON_GPU:
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)  # before `-m gpu` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ON_GPU and "tests/ops/triton/kernels" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=True)
def _exact_reference() -> None:
    """The twin computes in full float32, also on a GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
