"""`scripts/calibrate.py levels` on a tiny model: files, preset, refusals."""

import json
from pathlib import Path

import pytest
import yaml
from models import load_script
from transformers import AutoModelForCausalLM

from kvquant_hf import KVQuantConfig, QuantCache
from kvquant_hf.eval.artifacts import read_json

script = load_script("calibrate")


@pytest.fixture
def command(tiny_model_dir: Path, text_file: Path, tmp_path: Path) -> list[str]:
    common = ["levels", "--model", str(tiny_model_dir), "--text", str(text_file), "--context", "96", "--windows", "2"]
    return [*common, "--output_path", str(tmp_path / "out")]


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than calibrating a tiny model."""
    monkeypatch.setattr("kvquant_hf.eval.plots.save", lambda figure, base: [])


def test_levels_from_command_to_preset(
    command: list[str], tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert script.main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("keys: weighted error 0.") and "values: weighted error 0." in printed

    report = read_json(out / "report.json")
    assert report["model"] == "tiny-llama" and report["settings"] == "kvquant3" and not report["q_norm"]
    assert set(report["levels"]) == {"0", "1"} and {"versions", "commit"} <= set(report["environment"])
    assert report["text"]["windows"] == 2 and report["protocol"]["context"] == 96
    assert 0 < report["mean_error_ratios"]["key"]["even"] < 1

    plain = yaml.safe_load((out / "preset.yaml").read_text())
    assert plain["description"] == report["description"] and "tiny-llama" in plain["description"]
    config = KVQuantConfig.from_yaml(out / "preset.yaml")
    assert config == KVQuantConfig.from_dict(json.loads(json.dumps(report["preset"])) | {"layers": plain["layers"]})
    base = KVQuantConfig.from_preset("kvquant3")
    assert (config.key, config.value) == (base.key, base.value)
    cache = QuantCache(AutoModelForCausalLM.from_pretrained(tiny_model_dir).config, out / "preset.yaml")
    for index, sides in report["levels"].items():
        layer = cache.quantized_layer(int(index)).config
        assert list(layer.key.levels) == sides["key"]["levels"] and layer.key.outliers == 0.01
        assert list(layer.value.levels) == sides["value"]["levels"] and len(layer.value.levels) == 8

    text = (out / "report.md").read_text()
    assert text.startswith("# Calibrated levels\n\n![levels](levels.png)\n") and "| 1 | values |" in text
    assert all(str(tmp_path) not in (out / name).read_text() for name in ("report.md", "report.json", "preset.yaml"))
    assert all((out / f"{name}.{kind}").stat().st_size for name in ("levels", "errors") for kind in ("png", "svg"))


def test_options_change_what_they_say(command: list[str], tmp_path: Path, capsys, no_plots) -> None:
    rows = {}
    for name, more in {
        "plain": [],
        "again": [],
        "q_norm": ["--q-norm"],
        "unweighted": ["--unweighted"],
        "two": ["--nbits", "2"],
        "own": ["--quant", "kvquant3,key.nbits=16,key.outliers=0,value.outliers=0"],
    }.items():
        assert script.main([*command, *more, "--output_path", str(tmp_path / name)]) == 0, capsys.readouterr().err
        rows[name] = read_json(tmp_path / name / "report.json")
    assert rows["plain"] == rows["again"]
    tables = {name: row["levels"]["0"]["value"]["levels"] for name, row in rows.items()}
    assert len({tuple(table) for table in tables.values()}) == 5
    assert len(tables["two"]) == 4 and rows["two"]["preset"]["key"]["nbits"] == 2
    assert set(rows["own"]["levels"]["0"]) == {"value"} and rows["own"]["preset"]["value"]["outliers"] == 0.0
    assert rows["q_norm"]["q_norm"] and "Q-Norm" in rows["q_norm"]["description"]
    assert not rows["unweighted"]["is_weighted"] and "squared scales alone" in rows["unweighted"]["description"]
    one = capsys.readouterr().out.splitlines()[-1]
    assert one.startswith("values:")  # nothing to say about keys of 16 bits
    # A preset may be calibrated again, by path, and the path stays out of the files.
    preset = tmp_path / "plain" / "preset.yaml"
    assert script.main([*command, "--quant", str(preset)]) == 0
    again = read_json(tmp_path / "out" / "report.json")
    assert again["levels"] == rows["plain"]["levels"] and again["settings"] == "preset.yaml"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--quant", "k3v3"], "no levels can be calibrated for keys of layer 0"),
        (["--quant", "kvquan"], "kvquant"),
        (["--quant", "none.yaml"], "none.yaml"),
        (["--quant", "k8v8"], "levels need keys or values of 2 to 4 bits"),
        (["--quant", "kvquant3,key.clip=mse"], "`clip` must be 'minmax'"),
        (["--windows", "0"], "`--windows` must be an integer >= 1, got 0"),
        (["--windows", "900"], "`chunks` must be between"),
        (["--context", "60"], "a block of 64 tokens, got 60"),
        (["--model", "prepared:none"], "not prepared"),
        (["--text", "gone.txt"], "gone.txt"),
    ],
)
def test_refuses_with_one_line(more: list[str], message: str, command: list[str], capsys, tmp_path: Path) -> None:
    assert script.main([*command, *more]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [["--nbits", "8"], ["--nbits", "x"], ["--kl", "1"]])
def test_refuses_unknown_options(more: list[str], command: list[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([*command, *more])


def test_an_interruption_promises_nothing(command: list[str], capsys, monkeypatch) -> None:
    def interrupted(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "calibrate_levels", interrupted)
    assert script.main(command) == 130
    assert capsys.readouterr().err.strip().endswith("calibrate.py: interrupted.")
