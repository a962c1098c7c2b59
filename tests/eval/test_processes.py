"""An evaluation by two real processes, and one with weights on disk: equal to one process, one device."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs the `eval` extra")

from eval_tools import SETTINGS, assert_same_answers, requests_of, write_choices_task
from launch import torchrun
from models import load_script

from kvquant_hf.eval import cli
from kvquant_hf.eval.cli import main
from kvquant_hf.eval.lm import KVQuantLM
from kvquant_hf.eval.runs import read_run


@pytest.fixture(scope="module")
def run_file(tmp_path_factory, lm_model_dir) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    rows = [{"question": "the sky " * n, "choices": ["blue", "red"], "answer": n % 2} for n in range(9, 16)]
    write_choices_task(folder, rows)
    run = {
        "model_args": {"pretrained": str(lm_model_dir), "dtype": "float32"},
        "tasks": ["gsm8k_local", "choices"],
        "include_path": str(folder),
        "num_fewshot": 0,
        "limit": 7,
        "batch_size": 2,
        "gen_kwargs": {"max_gen_toks": 6},
        "caches": [{"name": "four-bits", "quant": SETTINGS}],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def arguments(run_file: Path, output: Path) -> list[str]:
    return ["run", "--config", str(run_file), "--output_path", str(output)]


def test_two_processes_go_on_with_the_run_of_one_and_equal_it(run_file, tmp_path, monkeypatch):
    assert main(arguments(run_file, tmp_path / "one")) == 0
    (directory,) = (path for path in (tmp_path / "one").iterdir() if path.is_dir())
    one = read_run(directory)

    real, batches = KVQuantLM._model_generate, []

    def stopped_in_the_second(self, *args, **kwargs):
        batches.append(args)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(KVQuantLM, "_model_generate", stopped_in_the_second)
    assert main(arguments(run_file, tmp_path / "two")) == 130
    directory = tmp_path / "two" / directory.name  # the hash does not depend on the number of processes
    assert len((directory / "responses-0.jsonl").read_text().splitlines()) == 1

    done = torchrun("-m", "kvquant_hf.eval", *arguments(run_file, tmp_path / "two"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "going on after" in done.stdout
    assert done.stdout.count("Report:") == 1 and (tmp_path / "two" / "report.md").is_file()
    assert all((directory / f"responses-{rank}.jsonl").stat().st_size for rank in range(2))
    two = read_run(directory)
    assert two.samples == one.samples and two.metrics() == one.metrics() and two.cautions == one.cautions
    assert two.stats["quantized_tokens"] > 0
    assert {**two.stats, "new_tokens_per_s": None} == {**one.stats, "new_tokens_per_s": None}
    assert two.results["config"]["kvquant_processes"] == {"count": 2, "tensor_parallel": False}


def test_connections_are_closed_on_errors(run_file, tmp_path, monkeypatch, capsys):
    closed = []
    monkeypatch.setattr(cli, "stop_processes", lambda: closed.append(True))
    monkeypatch.setenv("RANK", "1")
    assert main([*arguments(run_file, tmp_path), "--caches", "k4v5"]) == 1 and closed == [True]
    assert "kvquant_hf.eval (process 1): " in capsys.readouterr().err
    monkeypatch.setattr(cli, "run_all", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(arguments(run_file, tmp_path))
    assert closed == [True, True]


@pytest.mark.filterwarnings("ignore:.*batches held prompts of different lengths")
def test_weights_on_disk_change_no_answer(lm_model_dir, tmp_path):
    settings = {"dtype": "float32", "device": "cpu", "max_length": 256, "batch_size": 2}
    plain = KVQuantLM(str(lm_model_dir), SETTINGS, **settings)
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    away = dict.fromkeys(parts, "disk") | {"model.layers.1": "cpu"}
    lm = KVQuantLM(
        str(lm_model_dir), SETTINGS, parallelize=True, device_map=away, offload_folder=str(tmp_path), **settings
    )
    assert lm.model.device.type == "meta"
    for kind in ("generate_until", "loglikelihood"):
        answers, expected = (getattr(model, kind)(requests_of(kind), disable_tqdm=True) for model in (lm, plain))
        assert_same_answers(answers, expected)
    assert lm.quantized_tokens == plain.quantized_tokens > 0


def test_scores_are_refused_to_several_processes(monkeypatch, capsys, text_file):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load_script("score").main(["--model", "none", "--quant", "k4v4", "--text", str(text_file)]) == 1
    assert "scores are computed by one process, got 2 (WORLD_SIZE)" in capsys.readouterr().err
