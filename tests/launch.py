"""Two processes by `torchrun`, connected over gloo, for tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROCESSES = 2


def torchrun(*arguments: str, timeout: int = 600) -> subprocess.CompletedProcess[str]:
    """Run a script, or `-m MODULE`, in two processes; a free port is taken, and a hang ends with `timeout` seconds."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    process = subprocess.Popen(
        [*launcher, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its processes with it
        output, errors = process.communicate(timeout=60)
        raise AssertionError(f"still running after {timeout} s: {errors[-3000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
