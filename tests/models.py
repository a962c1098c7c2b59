"""Real models for tests: the directory of a prepared one, or a skip that says how to prepare it."""

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@cache
def load_script(name: str) -> ModuleType:
    """`scripts/NAME.py` as a module; scripts are no package."""
    spec = importlib.util.spec_from_file_location(f"kvquant_scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def prepared_model(name: str) -> Path:
    """Directory of the prepared model `name`, as made by `scripts/get_model.py`.

    Tests never download. Where the model is not prepared the calling test is skipped, unless the comma-separated
    environment variable `KVQUANT_HF_REQUIRE_MODELS` names it (`make test` requires SmolLM2): then it fails.
    """
    get_model = load_script("get_model")
    if name not in get_model.RECIPES:
        raise ValueError(f"`name` must be one of {sorted(get_model.RECIPES)}, got {name!r}")
    directory: Path = get_model.models_dir() / name
    if get_model.ready(directory, get_model.RECIPES[name]):
        return directory
    reason = f"model {name} is not prepared; run `python scripts/get_model.py {name}`"
    if name in os.environ.get("KVQUANT_HF_REQUIRE_MODELS", "").split(","):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
