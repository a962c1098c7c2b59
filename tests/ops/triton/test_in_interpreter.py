"""Runs the kernel tests in Triton's interpreter, in a process of its own.

`TRITON_INTERPRET` holds for a whole process and changes what `import triton` gives, also to Transformers and to
`torch.compile`; no other test should see it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvquant_hf.ops.triton.availability import is_installed

ROOT = Path(__file__).parents[3]
KERNELS = Path(__file__).parent / "kernels"


@pytest.mark.skipif(not is_installed(), reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel tests run on it")
@pytest.mark.parametrize("module", ["test_decode", "test_planar", "test_byte_scales", "test_quantize", "test_cache"])
def test_kernels_in_the_interpreter(module):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(KERNELS / f"{module}.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    least = {"test_decode": 100, "test_planar": 70, "test_byte_scales": 50, "test_quantize": 20, "test_cache": 50}
    assert passed and int(passed[1]) >= least[module]
    assert "skipped" not in done.stdout
