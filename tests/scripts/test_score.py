"""`scripts/score.py` on a tiny model: the printed and stored figures, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import load_script
from transformers import AutoModelForCausalLM

from kvquant_hf import KVQuantConfig, QuantCache, QueryMoments
from kvquant_hf._compat import cache_kwargs

score = load_script("score")
SHORT = ["--context", "160", "--prefill", "40", "--step", "24"]


@pytest.fixture
def arguments(tiny_model_dir: Path, text_file: Path) -> list[str]:
    return ["--model", str(tiny_model_dir), "--text", str(text_file), *SHORT]


def test_scores_presets_and_settings(
    arguments: list[str], tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "score.json"
    exact, coarse = "k4v4,residual_length=200", "k2v2,residual_length=32,sink_length=0"
    names = [exact, "k8v8,residual_length=32", coarse]
    assert score.main([*arguments, "--quant", *names, "--chunks", "2", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    rows = {row["quant"]: row for row in report["results"]}
    assert list(rows) == ["DynamicCache", *names]
    assert all(row["tokens"] == 2 * (160 - 40) and row["model"] == "tiny-llama" for row in rows.values())

    dense = rows["DynamicCache"]
    assert dense["kl"] == 0 and dense["top1"] == 1 and dense["ratio"] == 1 and dense["bits_per_value"] == 16
    assert dense["bits_per_value_quantized"] is None and rows[exact]["bits_per_value_quantized"] is None
    assert rows[exact]["kl"] < 1e-6 and rows[exact]["top1"] == 1
    assert 0 < rows["k8v8,residual_length=32"]["kl"] < rows[coarse]["kl"] / 10
    assert rows[coarse]["top1"] < 1

    resolved = KVQuantConfig.from_dict(report["configs"][coarse])
    assert resolved == KVQuantConfig.from_preset("k2v2").replace(residual_length=32, sink_length=0)
    assert report["texts"][0]["chunks"] == 2 and report["protocol"]["step"] == 24
    assert {"python", "torch", "transformers"} <= set(report["environment"]["versions"])

    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in rows)
    assert f"{rows[coarse]['perplexity']:.3f}" in printed


def test_bits_are_those_of_a_16_bit_model(arguments: list[str], tiny_model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "score.json"
    quant = "kivi-int4,residual_length=32"
    assert score.main([*arguments, "--quant", quant, "--chunks", "1", "--json", str(out)]) == 0
    row = json.loads(out.read_text())["results"][1]

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    cache = QuantCache(model, KVQuantConfig.from_preset("kivi-int4").replace(residual_length=32))
    for piece in torch.arange(2, 162)[None].split([40, 24, 24, 24, 24, 24], dim=1):
        with torch.no_grad():
            model(input_ids=piece, **cache_kwargs(cache))
    report = cache.memory_report()
    assert report.tokens == 160
    assert row["bits_per_value_quantized"] == report.bits_per_value_quantized
    assert row["bits_per_value"] == report.bits_per_value < 16
    assert row["memory_bytes"] == report.total_bytes


def test_texts_each_have_their_start_and_chunks(
    tiny_model_dir: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("abc " * 200, encoding="utf-8")
    out = tmp_path / "score.json"
    places = ["--text", str(text_file), "--start", "Section 7", "--chunks", "2", "--text", str(other), "--chunks", "1"]
    assert score.main(["--model", str(tiny_model_dir), *places, *SHORT, "--quant", "k8v8", "--json", str(out)]) == 0
    texts = json.loads(out.read_text())["texts"]
    assert [text["chunks"] for text in texts] == [2, 1]
    assert text_file.read_text()[texts[0]["offset"] :].startswith("Section 7")
    assert "3 windows of 160 tokens, 360 scored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--quant", "k4v5"], "preset name"),
        (["--quant", "k4v4,residual=3"], "residual_length"),
        (["--quant", "k4v4,key.nbits=5"], "nbits"),
        (["--quant", "none.yaml"], "none.yaml"),
        (["--quant", "k4v4", "--chunks", "1000"], "`chunks` must be between 1 and"),
        (["--quant", "k4v4", "--start", "Chapter 13"], "`start` must be"),
        (["--quant", "k4v4", "--prefill", "160"], "`prefill` must be less than"),
        (["--baseline", "hf-gptq"], "`baseline` must be one of"),
        (["--baseline", "hf-quanto:3"], "must be one of [2, 4]"),
        (["--baseline", "hf-fp8:8"], "must be one of []"),
    ],
)
def test_refuses_with_one_line(
    arguments: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score.main([*arguments, "--chunks", "1", *more] if "--chunks" not in more else [*arguments, *more]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("more", [[], ["--quant", "k4v4", "--chunks", "1", "--chunks", "2"]])
def test_refuses_incomplete_command_lines(arguments: list[str], more: list[str]) -> None:
    with pytest.raises(SystemExit):
        score.main([*arguments, *more])


def test_several_models_in_one_report(
    tiny_model_dir: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    other = tmp_path / "models" / "other"
    shutil.copytree(tiny_model_dir, other)
    out = tmp_path / "report"
    names = ["k8v8,residual_length=32", "k2v2,residual_length=32"]
    command = ["--model", str(tiny_model_dir), str(other), "--text", str(text_file), *SHORT, "--chunks", "2"]
    command += ["--quant", *names, "--divergence", "6", "--report", str(out)]
    assert score.main(command) == 0
    printed = capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    assert [(row["model"], row["quant"]) for row in report["results"]] == [
        (model, name) for model in ("tiny-llama", "other") for name in ("DynamicCache", *names)
    ]
    coarse = report["results"][2]
    low, high = coarse["intervals"]["kl"]
    assert low <= coarse["kl"] <= high and len(coarse["curves"]["kl"]) == 32
    assert coarse["first_divergence"]["tokens"] == 6 and len(coarse["first_divergence"]["first"]) == 2
    text = (out / "report.md").read_text()
    assert text.startswith("# Caches scored through the stored history\n\n![pareto](pareto.png)")
    assert "## tiny-llama" in text and "## other" in text and str(tmp_path) not in text
    plots = ("pareto", "pareto_quantized", "pareto_perplexity", "pareto_top1", "curves")
    assert all((out / f"{name}.{kind}").stat().st_size for name in plots for kind in ("png", "svg"))
    summary = text[text.index("## KL to the dense cache") :].splitlines()
    fewest, most = report["results"][2], report["results"][1]
    assert summary[2] == "| cache | bits (q) | tiny-llama | other |"
    for line, row in zip(summary[4:6], (fewest, most), strict=True):  # the smallest first, alike on equal weights
        kl = f"{row['kl']:.5f}"
        assert line == f"| `{row['quant']}` | {row['bits_per_value_quantized']:.2f} | {kl} | {kl} |"

    # The same weights under another name: nothing is scored twice, here or when the command is repeated.
    assert len((out / "chunks.jsonl").read_text().splitlines()) == 2 * (3 + 2)
    monkeypatch.setattr("kvquant_hf.eval.score.predictions", None)
    monkeypatch.setattr(score, "first_divergence", None)
    assert score.main(command) == 0
    assert capsys.readouterr().out == printed


def test_refuses_a_model_that_is_not_prepared(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score.main(["--model", "prepared:none", "--text", str(text_file), "--quant", "k4v4"]) == 1
    assert "get_model.py none" in capsys.readouterr().err


def test_query_moments_are_scored_beside_each_cache(
    arguments: list[str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    ids = torch.randint(1, 100, (1, 60), generator=torch.Generator().manual_seed(0))
    moments = tmp_path / "m.safetensors"
    QueryMoments.collect(model, ids).save(moments)
    names = ["k2v2,residual_length=32", "k8v8,residual_length=32,key.granularity=per_token", "dense"]
    report = tmp_path / "report"
    command = [
        *arguments,
        "--quant",
        *names,
        "--chunks",
        "1",
        "--query-moments",
        str(moments),
        "--report",
        str(report),
    ]
    assert score.main(command) == 0
    rows = {row["quant"]: row for row in json.loads((report / "report.json").read_text())["results"]}
    assert list(rows) == ["DynamicCache", names[0], f"{names[0]}+q", *names[1:]]
    plain, rounded = rows[names[0]], rows[f"{names[0]}+q"]
    assert plain["kl"] != rounded["kl"]
    assert plain["bits_per_value"] == rounded["bits_per_value"]
    # Another content of the same file is measured anew.
    QueryMoments.collect(model, ids.flip(-1)).save(moments)
    assert score.main(command) == 0
    again = {row["quant"]: row for row in json.loads((report / "report.json").read_text())["results"]}
    assert again[names[0]]["kl"] == plain["kl"] and again[f"{names[0]}+q"]["kl"] != rounded["kl"]


def test_each_model_needs_its_moments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        score.main([*arguments, "--quant", "k4v4", "--query-moments", "a", "b"])
    assert "2 files of --query-moments for 1 --model" in capsys.readouterr().err
    assert score.main([*arguments, "--quant", "k4v4", "--query-moments", "gone.safetensors"]) == 1
    assert "gone.safetensors" in capsys.readouterr().err
