"""`scripts/join_scores.py`: what a joint report holds, and which reports do not go together."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from models import load_script
from transformers import AutoModelForCausalLM

score, join_scores = load_script("score"), load_script("join_scores")


@pytest.fixture(scope="module")
def other_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights, under another name."""
    directory = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(tiny_model_dir, directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.lm_head.weight.data.mul_(1.5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def reports(tiny_model_dir: Path, other_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with a cache each, and one cache more of the first."""
    base = tmp_path_factory.mktemp("reports")
    text = base / "text.txt"
    text.write_text("\n".join(f"Line {line}: some words to read." for line in range(400)), encoding="utf-8")
    runs = {"a": (tiny_model_dir, "k4v4"), "b": (other_model_dir, "k4v4"), "c": (tiny_model_dir, "k2v2")}
    for name, (model, quant) in runs.items():
        arguments = ["--model", str(model), "--text", str(text), "--context", "160", "--prefill", "40", "--step", "24"]
        arguments += ["--quant", f"{quant},residual_length=32", "--chunks", "2", "--report", str(base / name)]
        assert score.main(arguments) == 0
    return [base / name for name in runs]


def test_rows_of_all_reports_come_together(reports: list[Path], tmp_path: Path) -> None:
    # A directory and a file may stand for a report.
    assert join_scores.main([str(reports[0] / "report.json"), *map(str, reports[1:]), "--report", str(tmp_path)]) == 0
    joint = json.loads((tmp_path / "report.json").read_text())
    parts = [json.loads((report / "report.json").read_text()) for report in reports]
    models = [part["results"][0]["model"] for part in parts]
    names = [(row["model"], row["quant"]) for row in joint["results"]]
    k4, k2 = "k4v4,residual_length=32", "k2v2,residual_length=32"
    first = [(models[0], "DynamicCache"), (models[0], k4), (models[0], k2)]
    assert names == [*first, (models[1], "DynamicCache"), (models[1], k4)]
    measured = [row for part in parts for row in part["results"]]
    assert all(row in measured for row in joint["results"])
    assert joint["configs"] == {k4: parts[0]["configs"][k4], k2: parts[2]["configs"][k2]}
    assert [joint[name] for name in ("protocol", "texts")] == [parts[0][name] for name in ("protocol", "texts")]
    assert joint["environments"] == [part["environment"] for part in parts]

    lines = (tmp_path / "report.md").read_text().splitlines()
    (head,) = [at for at, line in enumerate(lines) if line == "## KL to the dense cache"]
    table = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines[head + 2 : head + 6]]
    kl = {(row["model"], row["quant"]): f"{row['kl']:.5f}" for row in measured}
    assert table[0][2:] == [models[0], models[1]]
    assert [table[2][0], *table[2][2:]] == [k2, kl[models[0], k2], "-"]
    assert [table[3][0], *table[3][2:]] == [k4, kl[models[0], k4], kl[models[1], k4]]
    assert all(f"## {model}" in lines for model in models[:2])
    assert all((tmp_path / f"pareto_quantized.{kind}").stat().st_size > 0 for kind in ("png", "svg"))


def test_a_joint_report_can_be_joined(reports: list[Path], tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert join_scores.main([str(reports[0]), str(reports[1]), "--report", first]) == 0
    assert join_scores.main([first, str(reports[2]), "--report", second]) == 0
    joint, parts = (json.loads((path / "report.json").read_text()) for path in (Path(second), Path(first)))
    assert len(joint["environments"]) == 3 and len(joint["results"]) == len(parts["results"]) + 1


def test_a_report_named_twice_is_refused(
    reports: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        join_scores.main([str(reports[0]), str(reports[0] / "report.json"), "--report", str(tmp_path / "joint")]) == 1
    )
    assert "`paths` must name each report once" in capsys.readouterr().err


def test_reports_of_older_settings_join(reports: list[Path], tmp_path: Path) -> None:
    """A setting that a report does not know yet has its default."""
    older = changed(reports[1], tmp_path, lambda report: report["configs"].popitem()[1]["key"].pop("channel_order"))
    assert join_scores.main([str(reports[0]), str(older), "--report", str(tmp_path / "joint")]) == 0


def changed(report: Path, tmp_path: Path, change: Any) -> Path:
    """A copy of a report after a change of its JSON value."""
    copy = json.loads((report / "report.json").read_text())
    change(copy)
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(copy), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        (1, lambda report: report["protocol"].update(step=32), "`protocol` must be the same in all reports"),
        (1, lambda report: report["texts"][0].update(chunks=1), "`texts` must be the same in all reports"),
        (1, lambda report: report.update(bits_dtype="float32"), "`bits_dtype` must be the same in all reports"),
        (
            1,
            lambda report: next(iter(report["configs"].values())).update(sink_length=1),
            "`k4v4,residual_length=32` must mean the same in all reports",
        ),
        (0, lambda report: None, "`k4v4,residual_length=32` must be scored once on tiny-llama"),
        (2, lambda report: report["results"][0].update(perplexity=1.0), "The dense perplexity of tiny-llama must be"),
        (1, lambda report: report.pop("texts"), r"is no report of scripts/score.py: it lacks \['texts'\]"),
    ],
    ids=["protocol", "texts", "bits", "settings", "twice", "model", "no-report"],
)
def test_what_does_not_go_together_is_named(
    which: int, change: Any, message: str, reports: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(reports[which], tmp_path, change)
    assert join_scores.main([str(reports[0]), str(other), "--report", str(tmp_path / "joint")]) == 1
    assert not (tmp_path / "joint").exists()
    printed = capsys.readouterr().err
    assert re.search(message, printed) and str(other) in printed


def test_files_that_are_not_there_or_not_json_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone.json"
    assert join_scores.main([str(gone), "--report", str(tmp_path / "joint")]) == 1
    assert "gone.json" in capsys.readouterr().err
    gone.write_text("no json")
    assert join_scores.main([str(gone), "--report", str(tmp_path / "joint")]) == 1
    assert "gone.json is not JSON" in capsys.readouterr().err
