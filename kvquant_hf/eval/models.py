"""Which model an evaluation runs on: names of prepared models, and what tells two sets of weights apart."""

import hashlib
import os
from pathlib import Path

PREFIX = "prepared:"
_LAST_BYTES = 1 << 20


def models_dir() -> Path:
    """Where `scripts/get_model.py` keeps prepared models."""
    if root := os.environ.get("KVQUANT_HF_MODELS"):
        return Path(root).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).expanduser() / "kvquant_hf" / "models"


def resolve_model(name: str) -> str:
    """What `from_pretrained` takes: the directory of `prepared:NAME`, and any other name as it is.

    Raises:
        FileNotFoundError: That model is not prepared; the message says how to prepare it.
    """
    if not name.startswith(PREFIX):
        return name
    directory = models_dir() / name.removeprefix(PREFIX)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"The model {name!r} is not prepared. Run `python scripts/get_model.py {name.removeprefix(PREFIX)}`, or "
            "name a directory or hub id instead."
        )
    return str(directory)


def model_name(resolved: str) -> str:
    """How results name a model: the last part of a directory, or the hub id."""
    return Path(resolved).resolve().name if Path(resolved).is_dir() else resolved


def model_fingerprint(resolved: str) -> str:
    """Hash that changes with the weights of a model.

    Of a directory: its `config.json` and the size and last MiB of each weight file, so that gigabytes need not be
    read. A hub id stands for itself.
    """
    directory = Path(resolved)
    digest = hashlib.sha256()
    if not directory.is_dir():
        digest.update(resolved.encode())
        return digest.hexdigest()
    files = sorted(path for pattern in ("*.safetensors", "*.bin", "*.gguf") for path in directory.glob(pattern))
    for path in (directory / "config.json", *files):
        if path.is_file():
            size = path.stat().st_size
            with path.open("rb") as file:
                file.seek(max(size - _LAST_BYTES, 0))
                digest.update(f"{path.name} {size} ".encode() + file.read())
    return digest.hexdigest()
