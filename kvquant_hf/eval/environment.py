"""What a measurement ran on, to be stored beside its numbers."""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("kvquant-hf", "torch", "transformers", "numpy", "optimum-quanto", "hqq", "triton", "lm-eval")


def run_environment(device: torch.device | str = "cpu") -> dict[str, object]:
    """Versions, device, threads and, in a git checkout, the commit (with `+changes` if files differ from it)."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    return {
        "versions": {"python": platform.python_version(), **package_versions()},
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def environment_line(environment: Mapping[str, Any]) -> str:
    """What `run_environment` found, in one line for a report."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return f"{environment['device']}, {environment['threads']} threads; {versions}; commit {environment['commit']}."


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that can change a result, by name."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # an optional one
    return found


def _commit() -> str | None:
    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    # An installed package may lie inside somebody else's repository.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if commit and git("status", "--porcelain", "--untracked-files=no") else commit


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
