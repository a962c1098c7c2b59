"""Tasks of this package: where their YAML files and their data lie."""

import os
from pathlib import Path

# Shipped inside the package in a wheel; beside it in a checkout, where they are edited.
_ROOTS = (Path(__file__).parent.parent.parent, Path(__file__).parent.parent.parent.parent)
DATA_VARIABLE = "KVQUANT_HF_DATA"


def tasks_dir() -> Path:
    """Directory of the task files.

    Raises:
        FileNotFoundError: The package was installed without them.
    """
    for root in _ROOTS:
        if (found := root / "configs" / "tasks").is_dir():
            return found
    raise FileNotFoundError("kvquant_hf was installed without its task files; reinstall the package.")


def data_file(name: str, data_dir: str | Path | None = None) -> Path:
    """A data file: in `data_dir`, else in the directory that `KVQUANT_HF_DATA` names, else in the checkout's `data/`.

    Args:
        name: File name.
        data_dir: Directory that alone is searched.

    Raises:
        FileNotFoundError: It is in none of them; the message names the places and how to give another one.
    """
    variable = os.environ.get(DATA_VARIABLE)
    places = [Path(data_dir)] if data_dir else [Path(variable)] if variable else [_ROOTS[1] / "data"]
    for place in places:
        if (path := place.expanduser() / name).is_file():
            return path
    raise FileNotFoundError(
        f"There is no {name} in {', '.join(map(str, places))}. Name its directory with `--metadata data_dir=DIR` or "
        f"the environment variable {DATA_VARIABLE}; what the file must hold is written in the task's loader."
    )
