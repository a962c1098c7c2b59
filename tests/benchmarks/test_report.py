"""Tables, verdicts and files of the benchmarks."""

import json
from pathlib import Path
from typing import Any

import pytest
from _report import environment, last_level_cache, markdown_table, number, save_plot, tally, verdict, write_json
from _targets import attention_target, step_target


def test_table_lines_up_and_is_markdown() -> None:
    lines = markdown_table(["name", "ms"], [["a", "1.00"], ["longer", "-"]]).splitlines()
    assert lines == ["| name   |   ms |", "|--------|-----:|", "| a      | 1.00 |", "| longer |    - |"]


def test_verdicts() -> None:
    assert [verdict(*pair) for pair in ((2.0, 1.5), (1.5, 1.5), (1.4, 1.5), (None, 1.5), (9.0, None))] == [
        "met", "met", "missed", "not measured", "",
    ]  # fmt: skip
    assert verdict(2.0, 1.5, at_most=True) == "missed" and verdict(1.0, 1.5, at_most=True) == "met"
    assert verdict(float("nan"), 1.5) == verdict(float("nan"), 1.5, at_most=True) == "missed"
    assert tally(["met", "", "missed", "met"]) == "Targets: 2 met, 1 missed, 0 not measured"
    assert number(None) == "-" and number(1234.5, 1) == "1,234.5"


def test_json_is_strict_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "x.json"
    write_json(out, {"results": [1]})
    assert json.loads(out.read_text()) == {"results": [1]} and str(out) in capsys.readouterr().err
    with pytest.raises(ValueError):
        write_json(out, {"results": [float("nan")]})


def test_environment_names_what_times_depend_on() -> None:
    facts = environment()
    assert {"versions", "commit", "device", "threads", "usable_cpus", "last_level_cache_bytes"} <= set(facts)
    assert last_level_cache() is None or last_level_cache() > 1 << 16  # type: ignore[operator]


def test_plot_is_written_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def draw(figure: Any, panels: Any) -> None:
        assert panels.shape == (1, 2)
        panels[0][0].plot([1, 2], [3, 4])

    save_plot(tmp_path / "deep" / "speed.png", 2, 1, draw)
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"speed.png", "speed.svg"}


def test_targets_are_those_of_the_default_setting() -> None:
    assert attention_target("k4v4", "1,3,3,64", 4096, "sdpa") == 5.5
    assert attention_target("k4v4", "1,8,4,128", 65536, "sdpa") == 5.0
    assert attention_target("k4v4", "1,3,3,64", 1024, "same-kernel-bf16") is None
    assert attention_target("k2v2", "1,3,3,64", 4096, "sdpa") is None
    assert step_target("smollm2-135m", "k4v4", "bfloat16", 8192, "dynamic") == 6
    assert step_target("org/SmolLM2-135M-Instruct", "k4v4", "float32", 4096, "hf-quanto") == 2
    assert step_target("tiny-llama", "k4v4", "float32", 4096, "dynamic") is None
