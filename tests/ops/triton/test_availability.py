"""Without Triton, without a GPU, without the interpreter: what is said, and by whom."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvquant_hf.ops import available_backends, decode_attention
from kvquant_hf.ops.triton import availability, launch, tuning
from tests.ops.test_decode_attention import filled_layer

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the backend is there")
def test_on_the_cpu_the_backend_names_what_is_missing():
    assert "triton" not in available_backends()
    missing = "only under TRITON_INTERPRET=1" if availability.is_installed() else "Triton is not installed"
    view = filled_layer(100, backend="triton").view()
    with pytest.raises(ValueError, match=rf"`backend` must be one of .*'triton'\..*{missing}"):
        decode_attention(torch.zeros(2, 4, 1, 32), view)
    with pytest.raises(ValueError, match=rf"`backend='triton'` is not available for these tensors: .*{missing}"):
        launch.decode_attention(torch.zeros(2, 4, 1, 32), view, None, 1.0)


def test_importing_the_backend_imports_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import kvquant_hf.ops.triton as t; import torch;"
        "print(t.why_unavailable(torch.device('cpu')), t.why_unavailable(torch.device('cuda')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("Triton is not installed") == 2


@pytest.mark.parametrize(
    ("head_dim", "nbits", "arch", "head_of_entry"),
    [(64, 4, "90", 64), (16, 8, "80", 64), (96, 3, "90", 128), (128, 2, "100", 128), (192, 4, "90", 256)],
)
def test_the_table_serves_sizes_between_its_entries(head_dim, nbits, arch, head_of_entry):
    found = tuning.launch_parameters(head_dim, nbits, arch)
    entries = [entry for entry in tuning._table()["entries"] if entry["head_dim"] == head_of_entry]
    assert any(all(getattr(found, name) == entry.get(name) for name in vars(found)) for entry in entries)


def test_unknown_hardware_gets_the_default():
    default = tuning._table()["default"]
    assert vars(tuning.launch_parameters(128, 4, "interpreter")) == {**default, "max_registers": None}


def test_a_nearer_entry_wins(monkeypatch):
    entry = {"head_dim": 128, "nbits": 4, "arch": "90", "BN": 256, "BND": 64, "num_warps": 8, "num_stages": 3}
    table = {**tuning._table(), "entries": [*tuning._table()["entries"], entry]}
    monkeypatch.setattr(tuning, "_table", lambda: table)
    tuning.launch_parameters.cache_clear()
    try:
        assert tuning.launch_parameters(128, 4, "90").BN == 256
        assert tuning.launch_parameters(128, 8, "90").BN == 256
        assert tuning.launch_parameters(128, 2, "90").BN != 256
        assert tuning.launch_parameters(128, 4, "80").BN != 256
    finally:
        tuning.launch_parameters.cache_clear()
