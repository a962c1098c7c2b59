"""The whole way of an evaluation on a tiny model: command line, results, resumption, report, comparison."""

import functools
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs the `eval` extra")

from eval_tools import write_choices_task
from models import load_script

from kvquant_hf import KVQuantConfig
from kvquant_hf.eval import runner
from kvquant_hf.eval.cli import main
from kvquant_hf.eval.lm import KVQuantLM
from kvquant_hf.eval.report import retrieval_grids
from kvquant_hf.eval.runs import find_runs, read_run

COARSE = {"name": "coarse", "quant": {"key": {"nbits": 2}, "value": {"nbits": 2}, "residual_length": 16}}
CHOICES = [
    {"question": "the colour of " + "the sky " * n, "choices": ["blue", "red"], "answer": n % 2} for n in range(8, 13)
]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory, lm_model_dir) -> Path:
    """Generation, retrieval and multiple choice, five samples each, with a dense and a coarse cache."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tasks").mkdir()
    write_choices_task(folder / "tasks", CHOICES)
    run = {
        "description": "Five samples of everything.",
        "model_args": {"pretrained": str(lm_model_dir), "dtype": "float32"},
        "tasks": ["gsm8k_local", "needle", "choices"],
        "include_path": str(folder / "tasks"),
        "num_fewshot": 0,
        "limit": 5,
        "batch_size": 2,
        "gen_kwargs": {"max_gen_toks": 8},
        "metadata": {"needle_lengths": [400], "needle_trials": 1},
        "caches": ["dense", COARSE],
        "output_path": str(folder / "out"),
    }
    path = folder / "five.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


@pytest.fixture(scope="module")
def output(run_file) -> Path:
    assert main(["run", "--config", str(run_file)]) == 0
    return run_file.parent / "out"


def test_each_cache_has_its_directory(output, lm_model_dir):
    dense, coarse = find_runs([output])
    assert (dense.name, coarse.name) == ("dense", "coarse")
    assert not dense.is_quantized and coarse.is_quantized
    for run in (dense, coarse):
        assert {task for task, _, _ in run.samples} == {"gsm8k_local", "needle", "choices"}
        assert len(run.samples) == 5 * 4  # gsm8k has two filters
        metrics = run.metrics()
        assert {"exact_match", "retrieved", "acc"} <= {metric for _, metric, _ in metrics}
        for text in run.directory.iterdir():
            assert str(lm_model_dir.parent) not in text.read_text(), text.name
    assert dense.config["model"] == "tiny-llama"


def test_results_tell_what_the_cache_held(output):
    dense, coarse = find_runs([output])
    assert KVQuantConfig.from_dict(coarse.config["quant"]) == KVQuantConfig.from_dict(COARSE["quant"])
    info = coarse.results["config"]
    assert info["kvquant"]["key"]["nbits"] == 2 and info["kvquant_loglikelihood"]["mode"] == "decode"
    assert coarse.stats["quantized_tokens"] > 0 and dense.stats["quantized_tokens"] == 0
    assert coarse.stats["bits_per_value"] < dense.stats["bits_per_value"]
    assert coarse.stats["kv_bytes_largest_call"] < dense.stats["kv_bytes_largest_call"]
    assert coarse.stats["new_tokens_per_s"] > 0
    assert coarse.stats["loglikelihood_calls"] == dense.stats["loglikelihood_calls"] > 0
    assert any("different lengths" in text for text in coarse.cautions) and not dense.cautions
    changed = [key for key in dense.samples if dense.samples[key]["resps"] != coarse.samples[key]["resps"]]
    assert {"choices", "needle"} <= {task for task, _, _ in changed}


def test_the_report_opens_with_its_plots(output):
    text = (output / "report.md").read_text()
    head = text.split("\n\n")
    assert head[0] == "# five" and head[1].startswith("![quality](quality.png)")
    assert "Five samples of everything." in text and "different lengths" in text
    assert "## Against `dense`" in text and "| coarse | needle, retrieved |" in text
    for name in ("quality", "retrieval"):
        assert (output / f"{name}.png").read_bytes()[1:4] == b"PNG"
        assert "<svg" in (output / f"{name}.svg").read_text()
    report = json.loads((output / "report.json").read_text())
    assert [cache["name"] for cache in report["caches"]] == ["dense", "coarse"]
    assert report["caches"][0]["against_baseline"] is None and report["caches"][1]["against_baseline"]
    grid = retrieval_grids(find_runs([output])[0])["needle"]
    assert list(grid) == [(400, depth) for depth in (0.0, 0.25, 0.5, 0.75, 1.0)]


def test_repeating_the_command_runs_nothing_again(run_file, output, monkeypatch):
    before = [read_run(run.directory) for run in find_runs([output])]
    (output / "report.md").unlink()

    def forbidden(*_, **__):
        raise AssertionError("everything was answered already")

    monkeypatch.setattr(KVQuantLM, "_model_generate", forbidden)
    monkeypatch.setattr(KVQuantLM, "_decode_batch", forbidden)
    assert main(["run", "--config", str(run_file)]) == 0
    assert (output / "report.md").is_file()
    for old in before:
        new = read_run(old.directory)
        assert new.stats == old.stats and new.metrics() == old.metrics() and new.cautions == old.cautions


def test_an_interrupted_run_goes_on(run_file, output, tmp_path, monkeypatch, capsys):
    whole = find_runs([output])[1]
    arguments = ["run", "--config", str(run_file), "--output_path", str(tmp_path)]
    real, batches = KVQuantLM._model_generate, []

    def killed_in_the_ninth(self, *args, **kwargs):
        batches.append(args)
        if len(batches) == 9:  # of six for each cache
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(KVQuantLM, "_model_generate", killed_in_the_ninth)
    assert main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()
    assert len(find_runs([tmp_path])) == 1
    assert main(arguments) == 0
    assert len(batches) == 9 + 4
    resumed = find_runs([tmp_path])[1]
    assert resumed.name == "coarse" and resumed.metrics() == whole.metrics()
    assert {key: row["resps"] for key, row in resumed.samples.items()} == {
        key: row["resps"] for key, row in whole.samples.items()
    }


def test_compare_script_on_the_output(output, tmp_path, capsys):
    compare = load_script("compare")
    assert compare.main([str(output), "--json", str(tmp_path / "c.json"), "--markdown", str(tmp_path / "c.md")]) == 0
    printed = capsys.readouterr().out
    assert "| coarse | needle, retrieved | " in printed and "significant at 5 %" in printed
    assert (tmp_path / "c.md").read_text() == printed
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["baseline"]["name"] == "dense"
    assert {item["task"] for item in report["runs"][0]["comparisons"]} == {"gsm8k_local", "needle", "choices"}


def test_options_without_a_command_mean_run(lm_model_dir, tmp_path):
    arguments = ["--model", "kvquant", "--model_args", f"pretrained={lm_model_dir},dtype=float32,quant=k4v4"]
    arguments += ["--tasks", "gsm8k_local", "--limit", "1", "--num_fewshot", "0", "--gen_kwargs", "max_gen_toks=2"]
    assert main([*arguments, "--output_path", str(tmp_path)]) == 0
    (run,) = find_runs([tmp_path])
    assert run.name == "k4v4" and len(run.samples) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--use_cache", "answers"], "`use_cache` is refused"),
        (["--caches", "k4v5"], "preset name"),
        (["--model_args", "loglikelihood_mode=fast"], "`loglikelihood_mode` must be one of"),
        (["--metadata", '{"needle_lengths": [1]}', "--tasks", "needle"], "`needle_lengths` must be integers >= 64"),
    ],
)
def test_refuses_with_one_line(run_file, tmp_path, capsys, arguments, message):
    assert main(["run", "--config", str(run_file), "--output_path", str(tmp_path), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_an_unknown_task_is_named(run_file, tmp_path, capsys, monkeypatch):
    # lm-eval's own tasks take half a minute to read and are left out here.
    own = functools.partial(lambda make, **kwargs: make(**kwargs | {"include_defaults": False}), runner.TaskManager)
    monkeypatch.setattr(runner, "TaskManager", own)
    assert main(["run", "--config", str(run_file), "--output_path", str(tmp_path), "--tasks", "gsm8k_lokal"]) == 1
    error = capsys.readouterr().err
    assert "got ['gsm8k_lokal']" in error and "'gsm8k_local'" in error


def test_the_module_names_the_extra_where_lm_eval_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # any import of it raises
    with pytest.raises(SystemExit, match=re.escape("kvquant-hf[eval]")):
        runpy.run_module("kvquant_hf.eval", run_name="__main__")
