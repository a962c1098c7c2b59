"""Settings every test runs under: no hub, one thread, poisoned fresh memory, upstream deprecations as errors."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# `harness`, `tiny_models` and `models` are imported by name, whatever import mode pytest runs in.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: needs a model of several hundred MB or minutes of CPU time")
    # A deprecated call made by this package fails the test that reaches it.
    for category in ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning"):
        config.addinivalue_line("filterwarnings", rf"error::{category}:kvquant_hf(\..*)?")


@pytest.fixture(scope="session", autouse=True)
def _hostile_torch() -> Iterator[None]:
    """Uninitialized memory holds NaN and 0xFF, so a read of capacity that was never written cannot go unnoticed."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
