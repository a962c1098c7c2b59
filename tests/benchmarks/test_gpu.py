"""`benchmarks/gpu.py` without a GPU: all its code on tiny shapes, and its refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvquant_hf.ops.triton.availability import is_installed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def run(*arguments: str, interpret: str = "1") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(not is_installed(), reason="Triton is not installed")
def test_a_dry_run_takes_every_part(tmp_path):
    done = run("--dry-run", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["dry_run"] and results["environment"]["commit"]
    assert [row["quant"] for row in results["attention"]] == ["k4v4", "k2v2", "k8v8"]
    assert all(row["speedup"] > 0 and row["gb_per_s"] > 0 for row in results["attention"])
    assert {(row["side"], row["nbits"]) for row in results["quantize"]} == {
        (side, nbits) for side in ("key", "value") for nbits in (2, 4, 8)
    }
    assert [row["quant"] for row in results["generate"]] == ["dynamic", "k4v4", "k2v2"]
    assert "graph_error" not in results["generate"][1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = run(interpret="0")
    assert done.returncode == 2 and "there is no CUDA device" in done.stderr


def test_a_dry_run_asks_for_the_interpreter():
    done = run("--dry-run", interpret="0")
    assert done.returncode == 2 and "TRITON_INTERPRET=1" in done.stderr
