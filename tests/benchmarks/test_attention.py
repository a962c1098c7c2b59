"""`benchmarks/attention.py` on tiny shapes: what it stores and prints, and numbers it must not give."""

import json
from pathlib import Path
from typing import Any

import attention
import pytest
import torch
from _contenders import BASELINES
from _views import Shape, packed_view, pool_size, unquantized_view, view_bytes, view_pool

from kvquant_hf import KVQuantConfig
from kvquant_hf.ops import decode_attention, dispatch, reference

QUANT = "k4v4,residual_length=32"
TINY = ["--shape", "2,2,2,16", "--context", "200", "--samples", "3", "--pool-mb", "1", "--threads", "1"]


def results(out: Path, *arguments: str) -> list[dict[str, Any]]:
    assert attention.main([*TINY, *arguments, "--json", str(out)]) == 0
    found: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    return found


def test_compares_with_every_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "attention.json"
    plot = ["--plot", str(tmp_path / "plot")]
    rows = results(out, "--quant", QUANT, "kivi-int2,residual_length=32", "--backend", "torch", *plot)
    # Keys that are stored after RoPE anyway are not compared with keys stored after RoPE.
    assert [(row["quant"], row["baseline"]) for row in rows] == [
        *((QUANT, name) for name in BASELINES),
        *(("kivi-int2,residual_length=32", name) for name in BASELINES if name != "post-rope"),
    ]
    for row in rows:
        assert (row["context"], row["batch"], row["threads"], row["backend"]) == (200, 2, 1, "torch")
        assert row["speedup"] == pytest.approx(row["baseline_milliseconds"] / row["milliseconds"])
        assert row["gigabytes_per_s"] > 0 and row["target"] is None and row["reason"] is None
    assert rows[0]["baseline_form"] in ("rows", "gqa") and rows[2]["baseline_form"] is None
    report = json.loads(out.read_text())
    assert {"python", "torch"} <= set(report["environment"]["versions"])
    assert KVQuantConfig.from_dict(report["configs"][QUANT]).residual_length == 32
    printed = capsys.readouterr().out
    assert f"{rows[0]['milliseconds']:.3f}" in printed and "Targets: 0 met" in printed
    assert (tmp_path / "plot.png").stat().st_size and (tmp_path / "plot.svg").stat().st_size


def test_a_fallback_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(dispatch._BACKENDS, "cpu", reference.decode_attention)
    rows = results(tmp_path / "x.json", "--quant", QUANT, "--backend", "cpu")
    assert [row["milliseconds"] for row in rows] == [row["speedup"] for row in rows] == [None] * 4
    assert rows[0]["baseline_milliseconds"] > 0
    assert all("something else read the cache" in row["reason"] for row in rows)
    assert "not available" in capsys.readouterr().out


def test_a_refusal_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two views, the backend reads only the one of codes."""

    def reads_codes_only(query: torch.Tensor, view: Any, *rest: Any) -> torch.Tensor:
        if not view.key_store.spec.is_quantized:
            raise ValueError("does not read an unquantized side")
        return query + 0

    monkeypatch.setitem(dispatch._BACKENDS, "cpu", reads_codes_only)
    monkeypatch.setattr("_views.reference_attention", lambda query, *_: query)
    rows = results(tmp_path / "x.json", "--quant", QUANT, "--backend", "cpu", "--baseline", "same-kernel-bf16", "sdpa")
    assert rows[0]["milliseconds"] > 0 and rows[0]["baseline_milliseconds"] is None and rows[0]["speedup"] is None
    assert "unquantized side" in rows[0]["reason"] and rows[1]["speedup"] > 0


def test_a_wrong_output_stops_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(dispatch._BACKENDS, "cpu", lambda query, *_: torch.zeros_like(query))
    assert attention.main([*TINY, "--backend", "cpu"]) == 1
    assert "float32 twin: no time is reported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--quant", "k4v5"], "preset name"),
        (["--quant", "dense"], "`quant` must quantize"),
        (["--baseline", "flash"], "`baseline` must be one of"),
        (["--backend", "tpu"], "`backend` must be one of"),
        (["--shape", "1,2,3"], "`shape` must be four positive integers B,H_kv,G,D such as 1,8,4,128, got '1,2,3'"),
        (["--threads", "4096"], "CPUs this process may use, got 4096"),
    ],
)
def test_refuses_with_one_line(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main([*TINY, *more]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_refuses_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention.main(["--context", "0"])
    assert "argument --context: must be an integer >= 1, got '0'" in capsys.readouterr().err


def test_skips_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main([*TINY, "--memory-mb", "1"]) == 0
    captured = capsys.readouterr()
    assert "2,2,2,16 at 200 tokens skipped" in captured.err and "Targets: 0 met" in captured.out


@pytest.fixture
def view() -> Any:
    config = KVQuantConfig().replace(residual_length=32)
    states = Shape(1, 2, 2, 16).states(200)
    return packed_view(config, (states[0].bfloat16(), states[1].bfloat16()), "torch")


def test_copies_of_a_view_share_no_memory_and_read_alike(view: Any) -> None:
    pool = view_pool(view, 3 * view_bytes(view))
    assert len(pool) == 3
    addresses = {item.key_store.codes.data_ptr() for item in pool} | {item.residual[1].data_ptr() for item in pool}
    assert len(addresses) == 6
    query = Shape(1, 2, 2, 16).query(torch.bfloat16)
    outputs = [decode_attention(query, item) for item in pool]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert pool_size(10, 35) == 4 and pool_size(100, 35) == 1


@pytest.mark.parametrize("quant", ["k4v4", "kvquant3", "turboquant2", "innerq3"])
def test_unquantized_blocks_hold_what_was_stored(quant: str) -> None:
    keys, values = (side.bfloat16() for side in Shape(1, 2, 2, 16).states(200))
    config = KVQuantConfig.from_preset(quant).replace(residual_length=32)
    view = packed_view(config, (keys, values), "torch")
    plain = unquantized_view(view, (keys, values))
    assert plain.num_blocks == view.num_blocks > 0 and plain.rotation is None
    dense = plain.dense()
    assert torch.equal(dense[0], keys) and torch.equal(dense[1], values)


def test_bytes_of_a_view(view: Any) -> None:
    blocks, exact = view.num_blocks * 32, 200 - view.num_blocks * 32
    codes, metadata = blocks * 16 // 2, blocks * 16 // 32 * 4 + blocks * 4  # a group per token holds 16 channels
    assert view_bytes(view) == 2 * (2 * codes + metadata + 2 * exact * 16 * 2)
