"""The shipped run files: every one can be loaded, has a dense baseline and names tasks that exist."""

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs the `eval` extra")

from lm_eval.tasks import TaskManager
from models import ROOT

from kvquant_hf.eval.runfile import load_run_file
from kvquant_hf.eval.tasks import tasks_dir

RUNS = sorted((ROOT / "configs" / "runs").rglob("*.yaml"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(ROOT / "configs" / "runs")))
def test_run_files(path, lm_model_dir):
    run = load_run_file(path, {"model_args": {"pretrained": str(lm_model_dir)}})
    assert run.description and len(run.caches) > 3
    first = next(iter(run.caches.values()))
    assert not first.is_quantized and all(cache.is_quantized for cache in list(run.caches.values())[1:])
    if "hub" not in path.parts:
        assert run.settings.device == "cpu"
        known = TaskManager(include_path=str(tasks_dir()), include_defaults=False)
        assert all(known.match_tasks([task]) for task in run.settings.tasks)
        assert yaml.safe_load(path.read_text())["model_args"]["pretrained"].startswith("prepared:")


def test_there_are_runs_of_every_kind():
    assert {"gsm8k", "gsm8k_cot", "coqa", "truthfulqa", "needle", "longbench"} <= {path.stem for path in RUNS}
