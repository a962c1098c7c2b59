"""Bits that a cache holds, of any class, against counts by hand."""

import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache, QuantizedCache

from kvquant_hf import QuantCache
from kvquant_hf._compat import TRANSFORMERS_VERSION
from kvquant_hf.eval import baseline_factory, held_bits, replayed_bits, storage_bytes
from kvquant_hf.eval.bits import as_decided, layer_shapes

SHAPES = [(2, 16, 16), (2, 16, 16)]


def test_a_view_counts_its_whole_storage_once():
    whole = torch.zeros(100)
    holder = {"a": whole[:3], "b": [whole[50:]], "c": (torch.zeros(4, dtype=torch.uint8), None, "text")}
    assert storage_bytes(holder) == 400 + 4
    holder["self"] = holder
    assert storage_bytes(holder) == 400 + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamic_cache(dtype):
    bits = replayed_bits(lambda: DynamicCache(), SHAPES, [(0, 30), (30, 47)], dtype)
    assert bits.bits_per_value == 8 * dtype.itemsize and bits.bits_per_value_quantized is None
    assert bits.memory_bytes == 47 * 2 * 2 * 32 * dtype.itemsize


def test_quant_cache_answers_for_itself():
    model = tiny_model("llama")
    cache = QuantCache(model, "k4v4", residual_length=16)
    with pytest.raises(ValueError, match="empty"):
        held_bits(cache)
    make = lambda: cache  # noqa: E731 - the cache itself is looked at afterwards
    bits = replayed_bits(make, SHAPES, [(0, 100), (100, 150)], torch.bfloat16)
    report = cache.memory_report()
    assert report.tokens == 150 and report.quantized_tokens > 0
    assert bits.bits_per_value == report.bits_per_value
    assert bits.bits_per_value_quantized == report.bits_per_value_quantized
    assert bits.memory_bytes == report.total_bytes
    assert bits.memory_bytes == pytest.approx(storage_bytes(cache), rel=0.01)  # rotation tables are not reported


@pytest.mark.parametrize(("guard", "first", "second"), [(1.0, 4, 4), (1e9, 2, 2), (None, 2, 2)])
def test_outlier_guards_decide_by_the_text(guard, first, second):
    """Random numbers have no wide channels: replayed alone, a guarded cache would look smaller than it is."""
    model = tiny_model("llama")
    settings = {"key": {"nbits": 2}, "value": {"nbits": 2}, "residual_length": 16, "outlier_guard": guard}
    window = torch.randint(3, 128, (100,), generator=torch.Generator().manual_seed(0))
    pieces = [(0, 30), (30, 64), (64, 100)]
    make = as_decided(lambda: QuantCache(model, settings), model, window, pieces)
    cache = make()
    assert cache.get_seq_length() == 0
    assert [cache.quantized_layer(index).config.key.nbits for index in (0, 1)] == [first, second]
    bits = replayed_bits(make, SHAPES, pieces, torch.bfloat16)
    metadata = 2 * 16 / 32 / 2 + 2 * 16 / 16 / 2  # groups of 32 keys; of 16 values, the head size
    assert bits.bits_per_value_quantized == pytest.approx((first + second) / 4 + 1 + metadata, rel=1e-6)


def test_other_caches_are_made_as_they_are():
    make = lambda: DynamicCache()  # noqa: E731 - compared by identity
    assert as_decided(make, tiny_model("llama"), torch.zeros(8, dtype=torch.int64), [(0, 8)]) is make


def test_layers_without_keys_are_left_out():
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    cache.update(torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 24), 1)
    assert layer_shapes(cache) == [None, (2, 16, 24)]
    assert replayed_bits(lambda: DynamicCache(), layer_shapes(cache), [(0, 5)], torch.float16).bits_per_value == 16


def test_empty_dynamic_cache_is_refused():
    with pytest.raises(ValueError, match="empty"):
        held_bits(DynamicCache())


@pytest.mark.skipif(TRANSFORMERS_VERSION.release < (5, 21), reason="the fp8 backend came with Transformers 5.21")
def test_fp8_baseline():
    make = baseline_factory("hf-fp8", tiny_model("llama").config)
    assert isinstance(make(), QuantizedCache)
    bits = replayed_bits(make, SHAPES, [(0, 30), (30, 47)], torch.bfloat16)
    assert bits.bits_per_value == pytest.approx(8, abs=0.1) and bits.bits_per_value_quantized == pytest.approx(
        8, abs=0.1
    )


@pytest.mark.slow  # optimum-quanto compiles an extension at its first use
@pytest.mark.parametrize(("nbits", "expected"), [(4, 4.5), (2, 2.5)])
@pytest.mark.parametrize("name", ["hf-quanto", "hf-quanto-channel", "hf-hqq"])
def test_group_wise_baselines(name, nbits, expected):
    config = tiny_model("llama").config
    try:
        make = baseline_factory(f"{name}:{nbits}", config)
    except ImportError as error:
        pytest.skip(str(error))
    bits = replayed_bits(make, SHAPES, [(0, 128), (128, 192)], torch.bfloat16)
    assert bits.bits_per_value_quantized == pytest.approx(expected, abs=0.1)  # groups of 64, 16-bit scale and shift
    assert bits.bits_per_value == pytest.approx((128 * expected + 64 * 16) / 192, rel=0.05)


def test_missing_package_is_named(monkeypatch):
    def absent(*_, **__):
        raise ImportError("no module")

    monkeypatch.setattr("kvquant_hf.eval.baselines.QuantizedCache", absent)
    with pytest.raises(ImportError, match="needs hqq: run `make venv-baselines`"):
        baseline_factory("hf-hqq:2", tiny_model("llama").config)
