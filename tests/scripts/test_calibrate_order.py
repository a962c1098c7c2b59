"""`scripts/calibrate.py order` on a tiny model: files, preset, refusals."""

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
    common = ["order", "--model", str(tiny_model_dir), "--text", str(text_file), "--context", "200", "--windows", "2"]
    return [*common, "--prefill", "100", "--step", "50", "--output_path", str(tmp_path / "out")]


def test_orders_from_command_to_preset(
    command: list[str], tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert script.main([*command, "--quant", "rotatekv2,residual_length=16"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["keys", "values"]
    ratios = [float(line.split()[2]) for line in printed]
    assert all(0 < ratio <= 1 for ratio in ratios)

    report = read_json(out / "report.json")
    assert report["model"] == "tiny-llama" and report["settings"] == "rotatekv2,residual_length=16"
    assert set(report["orders"]) == {"0", "1"} and {"versions", "commit"} <= set(report["environment"])
    assert report["text"]["windows"] == 2 and tuple(
        report["protocol"][name] for name in ("context", "prefill", "step")
    ) == (200, 100, 50)
    assert [round(report["mean_error_ratios"][side], 3) for side in ("key", "value")] == ratios

    plain = yaml.safe_load((out / "preset.yaml").read_text())
    assert plain["description"] == report["description"] and "tiny-llama" in plain["description"]
    config = KVQuantConfig.from_yaml(out / "preset.yaml")
    base = KVQuantConfig.from_preset("rotatekv2")
    assert (config.key, config.value, config.residual_length) == (base.key, base.value, 16)
    cache = QuantCache(AutoModelForCausalLM.from_pretrained(tiny_model_dir).config, out / "preset.yaml")
    for index, sides in report["orders"].items():
        layer = cache.quantized_layer(int(index)).config
        assert [list(layer.key.channel_order), list(layer.value.channel_order)] == [
            sides[side]["channel_order"] for side in ("key", "value")
        ]

    text = (out / "report.md").read_text()
    assert text.startswith("# Orders of channels\n\n![errors](errors.png)\n") and "| 1 | values |" in text
    assert all(str(tmp_path) not in (out / name).read_text() for name in ("report.md", "report.json", "preset.yaml"))
    assert all((out / f"errors.{kind}").stat().st_size for kind in ("png", "svg"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--quant", "k4v4,value.rotation=none"], "orders of channels need keys or values with a `rotation`"),
        (["--quant", "rotatekv"], "rotatekv2"),
        (["--windows", "0"], "`--windows` must be an integer >= 1, got 0"),
        (["--prefill", "200"], "`prefill` must be less than `context` = 200, got 200"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert script.main([*command, *more]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out and not (tmp_path / "out").exists()
