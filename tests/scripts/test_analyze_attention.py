"""`scripts/analyze_attention.py` on a tiny model: verdicts, files, resuming, refusals."""

import json
from pathlib import Path

import pytest
import yaml
from models import load_script

script = load_script("analyze_attention")

AXES = {"V token": {"value": {"granularity": "per_token"}}, "V channel": {"value": {"granularity": "per_channel"}}}


def claim(name: str, metric: str, **more: object) -> dict[str, object]:
    plain = {"name": name, "text": f"{name} holds.", "metric": metric, "effect": "ratio", "source": "a paper"}
    return plain | {"worse": "V channel", "better": "V token", "figures": "numbers"} | more


@pytest.fixture
def run_file(tmp_path: Path, text_file: Path) -> Path:
    """Values along both axes, a claim that any setting fulfils and one that none can."""
    path = tmp_path / "values.yaml"
    plain = {
        "title": "Which axis?",
        "description": "Values along both axes.",
        "models": ["prepared:none"],
        "text": str(text_file),
        "windows": 2,
        "protocol": {"context": 96, "prefill": 32, "step": 32},
        "queries": 16,
        "base": {
            "key": {"nbits": 8, "group_size": 16},
            "value": {"nbits": 2, "group_size": 16},
            "residual_length": 0,
            "sink_length": 0,
        },
        "settings": AXES,
        "claims": [
            claim("modest", "output_error_from_values", published=1e-9),
            claim("absurd", "kl", published=1e9),
        ],
    }
    path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    return path


def test_an_ablation_from_file_to_report(
    run_file: Path, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    out = tmp_path / "out"
    command = ["--ablation", str(run_file), "--models", str(tiny_model_dir), "--output_path", str(out)]
    assert script.main(command) == 0
    printed = capsys.readouterr().out
    assert "[reproduced] modest holds." in printed and "[not reproduced" in printed
    report = json.loads((out / "report.json").read_text())
    model = report["models"][0]
    assert model["model"] == "tiny-llama" and list(model["settings"]) == list(AXES)
    for setting in model["settings"].values():
        attention = setting["attention"]
        assert attention["layers"] == [0, 1]
        assert [len(row) for row in attention["heads"]["output_error"]] == [4, 4]
        assert [len(row) for row in attention["heads"]["value_error"]] == [2, 2]
        assert 0 < attention["mean"]["key_error"] < 0.01 < attention["mean"]["value_error"] < 1
        assert setting["scores"]["kl"] > 0 and setting["scores"]["tokens"] == 2 * 64
    assert model["dense"]["kl"] == 0
    modest, absurd = model["claims"]
    assert modest["reproduced"] and not absurd["reproduced"] and len(modest["windows"]) == 2
    means = [model["settings"][name]["attention"]["mean"]["output_error_from_values"] for name in AXES]
    assert modest["measured"] == pytest.approx(means[1] / means[0])
    assert report["ablation"]["settings"]["V token"]["value"]["nbits"] == 2
    assert {"versions", "commit", "threads"} <= set(report["environment"])

    text = (out / "report.md").read_text()
    assert text.startswith("# Which axis?\n\n![overview](overview.png)\n\nValues along both axes.")
    assert "**reproduced**" in text and "**not reproduced" in text and str(tmp_path) not in text
    assert (out / "layers.md").read_text().count("\n| 1 | ") == 3
    names = ["overview", "layers-tiny-llama", "heads-tiny-llama"]
    assert all((out / f"{name}.{kind}").stat().st_size for name in names for kind in ("png", "svg"))

    # Repeated, nothing is computed again; with another setting, only what is new.
    monkeypatch.setattr("kvquant_hf.analysis.run.analyze_window", None)
    monkeypatch.setattr("kvquant_hf.eval.score.predictions", None)
    assert script.main(command) == 0
    assert capsys.readouterr().out == printed
    with pytest.raises(TypeError):
        script.main([*command, "--queries", "8"])


def test_an_interrupted_run_goes_on(
    run_file: Path, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    from kvquant_hf.analysis import run

    real, calls = run.analyze_window, []

    def analyze(model, window, *more):
        if calls:
            raise KeyboardInterrupt
        calls.append(window)
        return real(model, window, *more)

    command = ["--ablation", str(run_file), "--models", str(tiny_model_dir), "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(run, "analyze_window", analyze)
    assert script.main(command) == 130
    assert "goes on where it stopped" in capsys.readouterr().err
    again = []
    monkeypatch.setattr(run, "analyze_window", lambda *given: again.append(given) or real(*given))
    assert script.main(command) == 0
    assert len(again) == 1 and not again[0][1].equal(calls[0])


def test_settings_of_the_command_line(
    tiny_model_dir: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    names = ["k8v8,residual_length=32", "k2v2,residual_length=32,sink_length=0"]
    command = ["--quant", *names, "--models", str(tiny_model_dir), "--text", str(text_file), "--windows", "1"]
    lengths = ["--context", "160", "--prefill", "64", "--step", "16", "--start", "Section 7"]
    assert script.main([*command, *lengths, "--output_path", str(out)]) == 0
    report = json.loads((out / "report.json").read_text())
    fine, coarse = (report["models"][0]["settings"][name] for name in names)
    assert fine["scores"] is None and report["models"][0]["claims"] == []
    for metric, value in fine["attention"]["mean"].items():
        assert 0 < value < coarse["attention"]["mean"][metric] / 5
    assert report["ablation"]["protocol"] == {"context": 160, "prefill": 64, "step": 16}
    assert text_file.read_text()[report["text"]["offset"] :].startswith("Section 7")
    assert names[1] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--quant", "k4v5"], "preset name"),
        (["--quant", "k4v4", "--windows", "1"], "No token of a window of 96"),
        (["--quant", "k4v4", "--windows", "1000"], "`chunks` must be between"),
        (["--quant", "k4v4", "--start", "Chapter 13"], "`start` must be"),
        (["--ablation", "none.yaml"], "none.yaml"),
    ],
)
def test_refuses_with_one_line(
    more: list[str], message: str, tiny_model_dir: Path, text_file: Path, tmp_path: Path, capsys
) -> None:
    common = ["--models", str(tiny_model_dir), "--text", str(text_file), "--output_path", str(tmp_path)]
    assert script.main([*common, "--context", "96", "--prefill", "32", *more]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    "command",
    [[], ["--quant", "k4v4"], ["--quant", "k4v4", "--ablation", "x"], ["--ablation", "x.yaml", "--scores"]],
)
def test_refuses_incomplete_command_lines(command: list[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(command)
