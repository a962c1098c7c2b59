"""`benchmarks/generate.py` on a tiny model: what it stores and prints, how caches are filled, and what it refuses."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import _caches
import _overhead
import generate
import pytest
import torch
from _caches import PeakMemory, baseline_maker, copy_states, prefill
from _overhead import cache_overhead
from _timing import UNDISTURBED
from transformers import AutoModelForCausalLM, DynamicCache

from kvquant_hf import KVQuantConfig, QuantCache
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import dispatch, reference

# Groups of 32: blocks fill up within few tokens.
QUANT = f"{Path(__file__).parents[2]}/configs/groups_of_32/k4v4.yaml,residual_length=32,sink_length=0"
BYTES = 2 * 2 * (2 * 16) * 4  # of a token: K and V, layers, heads of 16, float32


@pytest.fixture
def arguments(tiny_model_dir: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(_overhead, "_MORE_BLOCKS", 4)
    monkeypatch.setattr(_caches.gc, "collect", lambda: 0)  # slow in a process that has run a test suite
    lengths = ["--context", "80", "--steps", "6", "--prefill", "96", "--chunk", "50", "--dtype", "float32"]
    return ["--model", str(tiny_model_dir), "--text", str(text_file), "--quant", QUANT, "--quick", *lengths]


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()


@pytest.fixture
def source(model: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    prefill(model, cache, torch.arange(3, 153), 64, lambda _: None)
    return cache


def test_compares_caches(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "generate.json"
    names = ["dynamic", "static", "hf-fp8"]
    more = ["--context", "160", "80", "--backend", "torch", "--baseline", *names]
    files = ["--json", str(out), "--plot", str(tmp_path / "plot.png")]
    assert generate.main([*arguments, *more, *files]) == 0
    report = json.loads(out.read_text())
    rows = report["results"]
    assert [(row["context"], row["baseline"]) for row in rows] == [(c, name) for c in (80, 160) for name in names]
    steps = {(row["context"], row["cache"]): row for row in report["steps"]}
    for row in rows:
        assert (row["model"], row["quant"], row["dtype"], row["threads"]) == ("tiny-llama", QUANT, "float32", 1)
        mine, theirs = steps[row["context"], QUANT], steps[row["context"], row["baseline"]]
        kind = {UNDISTURBED: "undisturbed", "processor time": "cpu"}[row["basis"]]
        assert row["ratio"] == pytest.approx(theirs["timing"][kind] / mine["timing"][kind])
        assert row["tokens_per_s"] == pytest.approx(1 / mine["timing"][kind]) and len(mine["steps_ms"]) == 6
        tokens = row["context"] + 2 + 6  # warm-up and timed steps
        if row["baseline"] != "hf-fp8":
            assert row["baseline_kv_bytes"] == pytest.approx(BYTES * tokens, abs=64)  # static layers count in a tensor
        assert row["kv_bytes"] == mine["kv_bytes"] < BYTES * tokens
        assert row["target"] is None and row["reason"] is None
    assert steps[160, QUANT]["backend"] == "torch" and steps[160, "static"]["backend"] is None
    assert [check["check"] for check in report["checks"]] == ["slowest step"] * 2 + ["quantize share", "overhead"]
    assert report["prefill"][0]["tokens"] == 96 and report["prefill"][0]["share"] > 0
    assert report["overhead"][0]["step"] > 0 and "peak_bytes_method" in report
    printed = capsys.readouterr().out
    assert f"{rows[0]['ratio']:.2f} x" in printed and "Targets: 0 met" in printed
    assert {"plot.png", "plot.svg"} <= {path.name for path in tmp_path.iterdir()}


def test_prefilling_every_cache_gives_the_same_lengths(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    more = ["--fill", "prefill", "--backend", "torch", "--baseline", "dynamic", "--json", str(out)]
    assert generate.main([*arguments, *more]) == 0
    row = json.loads(out.read_text())["results"][0]
    assert row["baseline_kv_bytes"] == BYTES * (80 + 2 + 6) and row["ratio"] > 0


def test_a_fallback_is_no_result(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(dispatch._BACKENDS, "cpu", reference.decode_attention)
    out = tmp_path / "x.json"
    assert generate.main([*arguments, "--baseline", "dynamic", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert all(row["ratio"] is None and "something else read" in row["reason"] for row in report["results"])
    assert report["results"][0]["baseline_tokens_per_s"] > 0 and not report["overhead"]
    assert "not available" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--quant", "k4v5"], "preset name"),
        (["--baseline", "hf-gptq"], "`baseline` must be one of ('dynamic', 'static', 'hf-quanto'"),
        (["--baseline", "dynamic:4"], "`baseline` must be one of"),
        (["--baseline", "hf-quanto:3"], "must be one of [2, 4]"),
        (["--backend", "tpu"], "`backend` must be one of"),
        (["--device", "meta"], "`device` must be one with a fused backend"),
        (["--threads", "4096"], "CPUs this process may use, got 4096"),
        (["--model", "./absent"], "absent"),
    ],
)
def test_refuses_with_one_line(
    arguments: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main([*arguments, *more]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_baseline_this_version_lacks(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named, it is refused; among the default ones it is left out with a notice."""

    def lacking(name: str, config: Any) -> Any:
        raise ValueError("Unknown quantization backend `fp8`")

    monkeypatch.setattr(_caches, "baseline_factory", lacking)
    assert generate.main([*arguments, "--backend", "torch", "--baseline", "hf-fp8"]) == 1
    assert "`baseline` 'hf-fp8' does not exist in transformers" in capsys.readouterr().err
    monkeypatch.setattr(generate, "QUICK_BASELINES", ("dynamic", "hf-fp8"))
    assert generate.main([*arguments, "--backend", "torch"]) == 0
    assert "hf-fp8 left out" in capsys.readouterr().err


def test_copied_states_are_those_of_the_source(model: Any, source: DynamicCache) -> None:
    config = KVQuantConfig.from_preset("k8v8").replace(backend="torch")
    for make in (partial(baseline_maker("dynamic", model), 150), partial(QuantCache, model, config)):
        cache = make()
        copy_states(source, cache, 140)
        assert cache.get_seq_length() == 140
    exact = baseline_maker("dynamic", model)(150)
    copy_states(source, exact, 140)
    for copied, layer in zip(exact.layers, source.layers, strict=True):
        assert torch.equal(copied.keys, layer.keys[:, :, :140])
        assert copied.keys.data_ptr() != layer.keys.data_ptr()
    assert source.get_seq_length() == 150


def test_layers_that_forget_cannot_be_copied(source: DynamicCache) -> None:
    class Sliding(type(source.layers[0])):  # type: ignore[misc]
        pass

    source.layers[1].__class__ = Sliding
    with pytest.raises(ValueError, match="`fill` must be 'prefill' for a model with layers of class Sliding"):
        copy_states(source, DynamicCache(), 100)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_peak_memory_is_that_since_the_start() -> None:
    memory = PeakMemory(torch.device("cpu"))
    assert "VmHWM" in memory.method
    memory.start()
    kept = torch.ones(8 << 20)  # 32 MB
    passing = torch.ones(16 << 20)
    del passing
    growth = memory.growth()
    assert growth is not None and 90e6 < growth < 130e6
    memory.start()
    assert memory.growth() < 20e6  # type: ignore[operator]
    assert kept[0] == 1


def test_overhead_is_what_is_left_of_an_empty_history(
    model: Any, source: DynamicCache, time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 5 us, 0.25 us per token in blocks and 0.5 us per exact one, and 64 us more where a block is made."""

    def step(model: Any, cache: QuantCache, dense: DynamicCache) -> Any:
        key_states = torch.zeros(1, 2, 1, 16)

        def one(_: int) -> None:
            for layer_idx, layer in enumerate(cache.layers):
                assert isinstance(layer, QuantLayer)
                before = layer.quantized_length
                cache.update(key_states, key_states, layer_idx)
                coded = layer.quantized_length
                us = 5 + 0.25 * coded + 0.5 * (layer.get_seq_length() - coded) + 64 * (coded > before)
                time.work(1e-6 * us)

        return one

    monkeypatch.setattr(_overhead, "_step", step)
    config = KVQuantConfig().replace(backend="torch")
    found = cache_overhead(model, config, source, cycles=5, clock=time.clock)
    assert found.block_token == pytest.approx(0.25) and found.window_token == pytest.approx(0.5)
    assert found.overhead == pytest.approx(5 + 64 / 32)
    assert found.flush == pytest.approx(64 / 32, rel=0.2)
