"""`scripts/calibrate.py budget` on a tiny model: files, preset, resuming, refusals."""

import json
from pathlib import Path

import pytest
import yaml
from models import load_script
from transformers import AutoModelForCausalLM

from kvquant_hf import KVQuantConfig, QuantCache

script = load_script("calibrate")

CANDIDATES = {
    "key": {"k2": {"nbits": 2}, "k4": {"nbits": 4}},
    "value": {"v2": {"nbits": 2}, "v4": {"nbits": 4}},
}
SMALL = ["--context", "96", "--prefill", "64", "--step", "16", "--windows", "2", "--held-out", "1", "--residual", "16"]


@pytest.fixture
def command(tiny_model_dir: Path, text_file: Path, tmp_path: Path) -> list[str]:
    """`budget` on a small protocol, without a limit."""
    path = tmp_path / "candidates.yaml"
    path.write_text(yaml.safe_dump(CANDIDATES), encoding="utf-8")
    common = ["budget", "--model", str(tiny_model_dir), "--text", str(text_file), "--candidates", str(path)]
    return [*common, *SMALL, "--output_path", str(tmp_path / "out")]


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than measuring a tiny model."""
    monkeypatch.setattr("kvquant_hf.eval.plots.save", lambda figure, base: [])


def test_a_budget_from_command_to_preset(
    command: list[str], tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    out = tmp_path / "out"
    assert script.main([*command, "--bits", "4.2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("allocation: kl ") and "bits " in printed

    report = json.loads((out / "report.json").read_text())
    assert report["is_met"] and report["budget"] == {"bits": 4.2} and report["model"] == "tiny-llama"
    answer = report["results"]["allocation"]
    assert (
        answer["measured"]["bits"] == pytest.approx(answer["predicted"]["bits"]) and answer["measured"]["bits"] <= 4.2
    )
    assert answer["measured"]["kl"] == pytest.approx(answer["scores"]["kl"]) and answer["held_out"]["kl"] > 0
    assert answer["scores"]["tokens"] == 2 * 32 and answer["held_out"]["tokens"] == 32
    assert set(report["sensitivities"]["key"]) == {"0", "1"} == set(answer["pairs"])
    assert all(0 < errors["k4"] < errors["k2"] for errors in report["sensitivities"]["key"].values())
    assert len(report["rounds"]) > report["chosen_round"] and {"versions", "commit"} <= set(report["environment"])

    # The preset is what was measured, whole and with a description.
    plain = yaml.safe_load((out / "preset.yaml").read_text())
    config = KVQuantConfig.from_yaml(out / "preset.yaml")
    assert config.residual_length == 16 and KVQuantConfig.from_dict(yaml.safe_load(config.to_yaml())) == config
    written = KVQuantConfig.from_dict(report["preset"])
    said = plain["description"]
    assert said == report["description"] and said.startswith("average size of the quantized part at most 4.2 bits")
    assert f"{answer['predicted']['kl']:.4g} nats predicted, {answer['measured']['kl']:.4g} nats measured" in said
    for index, (key, value) in answer["pairs"].items():
        layer = config.for_layer(int(index), 2, "full_attention")
        assert layer == written.for_layer(int(index), 2, "full_attention")
        assert (f"k{layer.key.nbits}", f"v{layer.value.nbits}") == (key, value)
    QuantCache(AutoModelForCausalLM.from_pretrained(tiny_model_dir).config, out / "preset.yaml")

    text = (out / "report.md").read_text()
    assert text.startswith("# Budget of a quantized cache\n\n![sensitivity](sensitivity.png)\n")
    assert "it is met" in text and "| allocation |" in text and str(tmp_path) not in text
    assert str(tmp_path) not in (out / "report.json").read_text()
    assert all(
        (out / f"{name}.{kind}").stat().st_size for name in ("sensitivity", "allocation") for kind in ("png", "svg")
    )

    # Repeated, nothing is measured again.
    monkeypatch.setattr("kvquant_hf.eval.score.predictions", None)
    assert script.main([*command, "--bits", "4.2"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "limit",
    [["--key-kl", "0.5", "--value-error", "0.5"], ["--bytes", "40e3", "--context-length", "200"]],
)
def test_other_budgets(limit: list[str], command: list[str], tmp_path: Path, capsys, no_plots) -> None:
    assert script.main([*command, *limit, "--held-out", "0"]) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    figures = report["results"]["allocation"]["measured"]
    assert report["is_met"] and report["results"]["allocation"]["held_out"] is None
    assert all(figures[name] <= value for name, value in report["budget"].items() if name != "context_length")
    assert "held out" not in (tmp_path / "out" / "report.md").read_text().lower()


def test_an_interrupted_run_goes_on(command: list[str], tmp_path: Path, capsys, monkeypatch, no_plots) -> None:
    from kvquant_hf.eval import score

    real, calls, stop_at = score.predictions, [], [None]

    def predictions(*given, **more):
        if len(calls) == stop_at[0]:
            raise KeyboardInterrupt
        calls.append(given)
        return real(*given, **more)

    monkeypatch.setattr(score, "predictions", predictions)
    budget = ["--bits", "4.2", "--held-out", "0"]
    assert script.main([*command, *budget, "--output_path", str(tmp_path / "whole")]) == 0
    whole = len(calls)
    calls.clear()
    stop_at[0] = 5
    assert script.main([*command, *budget]) == 130
    assert "goes on where it stopped" in capsys.readouterr().err
    calls.clear()
    stop_at[0] = None
    assert script.main([*command, *budget]) == 0
    assert len(calls) == whole - 5 + 1  # of the five that were done, the dense pass is needed again
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("whole", "out")]
    assert reports[0] == reports[1]


def test_a_missed_budget_is_written_and_told(
    command: list[str], tmp_path: Path, capsys, monkeypatch, no_plots
) -> None:
    from kvquant_hf.analysis import calibration

    real = calibration._measured

    def measured(*given):
        done = real(*given)
        return calibration.replace(done, is_met=False)

    monkeypatch.setattr(calibration, "_measured", measured)
    assert script.main([*command, "--kl", "1.0"]) == 1
    assert "no solution meets the budget" in capsys.readouterr().err
    text = (tmp_path / "out" / "report.md").read_text()
    assert "**missed**" in text and "| allocation (misses the budget) |" in text
    assert "(MISSED)" in yaml.safe_load((tmp_path / "out" / "preset.yaml").read_text())["description"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "the budget must be exactly one of"),
        (["--kl", "0.1", "--bits", "3"], "got ['kl', 'bits']"),
        (["--key-kl", "0.1"], "`key_kl` with `value_error`"),
        (["--bytes", "1000"], "`bytes` with `context_length`"),
        (["--bits", "-3"], "`bits` must be a number above 0, got -3.0"),
        (["--bits", "1.5"], "`bits` must be at least"),
        (["--bits", "4", "--candidates", "none.yaml"], "none.yaml"),
        (["--bits", "4", "--held-out", "-1"], "`--held-out` must be an integer >= 0, got -1"),
        (["--bits", "4", "--windows", "0"], "`--windows` must be an integer >= 1, got 0"),
        (["--bits", "4", "--windows", "900"], "`chunks` must be between"),
        (["--bits", "4", "--residual", "-1"], "`residual_length` must be an integer >= 0"),
        (["--bits", "4", "--rounds", "0"], "`most_rounds` must be an integer >= 1, got 0"),
        (["--bits", "4", "--prefill", "96"], "`prefill` must be less than `context`"),
        (["--bits", "4", "--model", "prepared:none"], "not prepared"),
    ],
)
def test_refuses_with_one_line(more: list[str], message: str, command: list[str], capsys) -> None:
    assert script.main([*command, *more]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("more", [[], ["budget"], ["budgets"], ["budget", "--bytes", "1.5"]])
def test_refuses_incomplete_command_lines(more: list[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(more)
