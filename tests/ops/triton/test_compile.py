"""What the compiler makes of the decode kernel, without a GPU: a representative part of `benchmarks/triton_aot.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvquant_hf.ops.triton.availability import is_installed

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "benchmarks" / "results" / "triton_aot.json"


def test_the_table_kept_in_the_repository_is_clean():
    """Every shipped configuration: no spills, shared memory within the chip, wide loads, tensor cores."""
    rows = json.loads(TABLE.read_text())["configurations"]
    assert {row["arch"] for row in rows} == {"80", "90", "100", "gfx942"}
    assert {row["head_dim"] for row in rows if row["arch"] == "90"} == {64, 128, 256}
    for row in rows:
        assert row["spilled_bytes"] == 0, row
        assert row["shared_bytes"] <= row["shared_limit"], row
        assert row["wide_loads"] > 0 and row["tensor_core"], row


def compile_apart(tmp_path: Path, *arguments: str) -> str:
    """Output of the script, in a process of its own: the interpreter must be off where Triton is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "benchmarks/triton_aot.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not is_installed(), reason="Triton is not installed")
def test_every_branch_of_every_kernel_compiles_without_spills(tmp_path):
    """Masks, padding, odd sizes, unquantized sides, combining, quantizing: the interpreter accepts more than ptxas."""
    lines = compile_apart(tmp_path, "--variants").splitlines()
    assert {line.split()[0] for line in lines} == {"decode", "planar", "combine", "quantize"}
    assert len(lines) >= 78 and sum(" 0 bytes spilled" not in line for line in lines) <= 8  # KNOWN_SPILLS
    for kind in ("promoted", "bytes"):
        assert {line.split()[-8] for line in lines if line.startswith(f"decode {kind}")} == {"80", "90", "gfx942"}


@pytest.mark.skipif(not is_installed(), reason="Triton is not installed")
def test_representative_configurations_compile_clean(tmp_path):
    compile_apart(tmp_path, "--subset", "--json", str(tmp_path / "aot.json"))
    rows = {
        (row["arch"], row["head_dim"], row["nbits"][0]): row
        for row in json.loads((tmp_path / "aot.json").read_text())["configurations"]
    }
    assert {arch for arch, _, _ in rows} == {"80", "90", "100", "gfx942"}
    # The work per element is what the design is about: an unpacking that fell apart would show here first.
    assert rows["90", 128, 4]["instructions_per_element"] < 5.5
    assert rows["90", 128, 2]["instructions_per_element"] < 5.0
    # A thread treats 64 pairs: 32 of keys, each an exact subtraction, a multiply-add and two halves of a rotation,
    # and 32 of values, each a subtraction and a multiply-add. Nothing is converted from integers.
    loop = rows["90", 128, 4]["loop"]
    assert loop["HFMA2"] + loop["HADD2"] + loop["HMUL2"] == 192
    assert loop.get("I2F", 0) == loop.get("I2FP", 0) == 0
