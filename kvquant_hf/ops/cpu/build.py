"""Compiling the kernel with the system compiler: once per variant, shared by all processes of a user."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
# Sums of products may be reordered and fused; infinities stay meaningful (masked scores).
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-ffp-contract=fast",
    "-shared",
    "-fPIC",
)
_NATIVE = ("-march=native", "-mprefer-vector-width=512") if platform.machine() in ("x86_64", "AMD64") else ("-O3",)


# `enum Kind` in simd.h.
ELEMENT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class BuildError(RuntimeError):
    """The kernel could not be compiled; the message says what to install or shows the compiler's words."""


def cache_directory() -> Path:
    """Where compiled kernels are kept: `$KVQUANT_HF_CACHE`, else `kvquant_hf` in the user's cache directory."""
    named = os.environ.get("KVQUANT_HF_CACHE")
    if named:
        return Path(named) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvquant_hf" / "kernels"


@cache
def compiler() -> str:
    """Path of the C++ compiler: `$CXX` or the first of c++, g++, clang++.

    Raises:
        BuildError: There is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(
        f"no C++ compiler was found (looked for {wanted or ', '.join(_COMPILERS)}). Install one, for instance with "
        "`apt install g++`, or name it in the environment variable CXX."
    )


@cache
def _processor() -> str:
    """Name and instruction sets of this processor, since kernels are compiled for exactly it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


@cache
def _text(source: Path) -> str:
    """A source and what it includes."""
    return "".join(path.read_text(encoding="utf-8") for path in (source, *sorted(SOURCES.glob("*.h"))))


@cache
def _compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def load(name: str, defines: tuple[tuple[str, int], ...] = (), extra: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library of one variant of `<name>.cpp`, compiled if nobody has yet.

    Several processes may compile the same variant at once: each writes a file of its own and renames it into place.

    Args:
        name: Source file, without its suffix.
        defines: Its macros.
        extra: Further compiler flags.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    flags = [*_FLAGS, *_NATIVE, *extra, *(f"-D{macro}={value}" for macro, value in defines)]
    source = SOURCES / f"{name}.cpp"
    identity = "\0".join([_text(source), _compiler_version(), _processor(), *flags])
    directory = cache_directory()
    library = directory / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if not library.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(suffix=".so", dir=directory)
        os.close(handle)
        try:
            command = [compiler(), *flags, str(source), "-o", scratch]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-2000:]}")
            os.replace(scratch, library)
        finally:
            Path(scratch).unlink(missing_ok=True)
    return ctypes.CDLL(str(library))


@cache
def parallel_region() -> int:
    """Address of `GOMP_parallel` of the OpenMP runtime that torch has loaded, 0 where there is none.

    Running on torch's own threads keeps `torch.set_num_threads` in force, and a second runtime in the process would
    let two sets of threads spin against each other.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    paths = {line.split()[-1] for line in lines if "omp" in line.rsplit("/", 1)[-1] and ".so" in line}
    for path in sorted(paths):
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
