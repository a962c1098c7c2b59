"""`benchmarks/storing.py` on a tiny shape."""

import json
from pathlib import Path

import pytest
import storing


def test_times_every_cache_with_and_without_moments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "storing.json"
    arguments = ["--shape", "1,2,16", "--samples", "2", "--quant", "k2v2", "fp8"]
    assert storing.main([*arguments, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    rows = {row["quant"]: row for row in report["results"]}
    assert list(rows) == ["k2v2", "k2v2+q", "fp8"]
    for row in rows.values():
        assert row["prompt_microseconds_per_token"] > 0 and row["block_microseconds_per_token"] > 0
    printed = capsys.readouterr().out
    assert "| k2v2+q" in printed and f"{rows['k2v2']['block_microseconds_per_token']:,.2f}" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,2"], "--shape must be"),
        (["--shape", "1,2,5"], "--shape must be"),
        (["--quant", "none"], "preset"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = storing.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status
    assert message in capsys.readouterr().err
