"""Tensor parallelism, several devices and disk offload: the tokens of one process with one device."""

import pytest
import torch
from harness import CACHE_KW, quant_cache, tensors_of
from launch import PROCESSES, torchrun
from models import ROOT
from tensor_parallel import CACHES, evaluated, generated
from transformers import AutoModelForCausalLM

from kvquant_hf import MemoryReport

WORKER = ROOT / "tests" / "tensor_parallel.py"


@pytest.fixture(scope="module")
def alone(lm_model_dir):
    return generated(AutoModelForCausalLM.from_pretrained(lm_model_dir).eval())


@pytest.fixture(scope="module")
def together(lm_model_dir, tmp_path_factory):
    """What each of two processes found."""
    out = tmp_path_factory.mktemp("tensor-parallel")
    done = torchrun(str(WORKER), str(lm_model_dir), str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(out / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", ["dense", *CACHES])
def test_tensor_parallel_text_is_that_of_one_process(alone, together, name):
    for process in together:
        assert process["tp_size"] == PROCESSES
        assert torch.equal(process["generated"][name]["ids"], alone[name]["ids"])
    if name != "dense":
        assert not torch.equal(alone[name]["ids"], alone["dense"]["ids"])  # the codes were read


@pytest.mark.parametrize("name", CACHES)
def test_each_process_quantizes_its_heads(alone, together, name):
    parts = [process["generated"][name] for process in together]
    assert all(part["quantized"] == alone[name]["quantized"] > 0 for part in parts)
    for layer, expected in enumerate(alone[name]["layers"]):
        for side in (0, 1):
            found = torch.cat([part["layers"][layer][side] for part in parts], dim=1)
            # Sums over processes round otherwise, and a value near the border of two codes may take the other one.
            differ = (found - expected[side]).abs() > 1e-4
            assert found.shape == expected[side].shape and differ.float().mean() < 0.002


def test_reports_count_the_share_of_a_process(alone, together):
    for name in CACHES:
        whole = alone[name]["report"]
        assert "tensor parallel" not in alone[name]["table"] and whole["shards"] == 1
        for process in together:
            part = process["generated"][name]
            assert part["report"]["shards"] == PROCESSES
            assert part["table"].endswith("tensor parallel: the share of this process, 1 of 2")
            assert PROCESSES * part["report"]["total_bytes"] == whole["total_bytes"]
            assert part["report"]["tokens"] == whole["tokens"]
            assert part["report"]["bits_per_value"] == whole["bits_per_value"]


def test_joined_reports_are_of_the_whole_cache(alone, together):
    def report(figures) -> MemoryReport:
        return MemoryReport(**{name: figures[name] for name in MemoryReport.__dataclass_fields__})

    shares = [report(process["generated"]["k2v2"]["report"]) for process in together]
    assert MemoryReport.joined(shares) == report(alone["k2v2"]["report"])
    assert "tensor parallel" not in str(MemoryReport.joined(shares))
    with pytest.raises(ValueError, match="`reports` must be those of one cache"):
        MemoryReport.joined([shares[0], report(together[1]["generated"]["k4v4"]["report"])])


def test_tensor_parallel_evaluation(lm_model_dir, together):
    pytest.importorskip("lm_eval", reason="needs the `eval` extra")
    expected = evaluated(str(lm_model_dir))
    assert expected["processes"] == {"count": 1, "tensor_parallel": False}
    for process in together:
        found = process["evaluated"]
        assert found["processes"] == {"count": PROCESSES, "tensor_parallel": True}
        assert found["texts"] == expected["texts"]
        assert found["sums"] == pytest.approx(expected["sums"], abs=1e-3)
        assert found["reports"] == expected["reports"]  # of the whole cache
        assert all(report["quantized_tokens"] for report in found["reports"])


def placed(*devices) -> dict:
    """A device for each part of the tiny model, from the embeddings to the head."""
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    return {"device_map": dict(zip(parts, devices, strict=True)) | {"model.rotary_emb": devices[0]}}


ON_THE_CPU = {
    "cpu": {"device_map": "cpu"},
    "auto": {"device_map": "auto"},
    "one layer on disk": placed("cpu", "cpu", "disk", "cpu", "cpu"),
    "embeddings and head on disk": placed("disk", "disk", "cpu", "cpu", "disk"),
    "too little memory": {"device_map": "auto", "max_memory": {"cpu": 200_000}},
}


def text_and_cache(directory, quant="k2v2", **where):
    model = AutoModelForCausalLM.from_pretrained(directory, **where).eval()
    ids = torch.randint(2, 200, (2, 90), generator=torch.Generator().manual_seed(0))
    cache = quant_cache(model, quant, residual_length=16)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    at = "cpu" if model.device.type == "meta" else model.device
    options = {"attention_mask": mask.to(at), "max_new_tokens": 30, "do_sample": False}
    return model.generate(ids.to(at), **options, **{CACHE_KW: cache}).cpu(), cache, model


@pytest.fixture(scope="module")
def on_one_device(tiny_model_dir):
    return {quant: text_and_cache(tiny_model_dir, quant)[0] for quant in ("dense", "k2v2")}


@pytest.mark.parametrize("quant", ["dense", "k2v2"])
@pytest.mark.parametrize("where", ON_THE_CPU)
def test_offloaded_weights_change_nothing(tiny_model_dir, on_one_device, tmp_path, where, quant):
    ids, cache, model = text_and_cache(tiny_model_dir, quant, offload_folder=tmp_path, **ON_THE_CPU[where])
    offloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert bool(offloaded) == (where not in ("cpu", "auto"))
    assert torch.equal(ids, on_one_device[quant])
    assert {tensor.device.type for _, tensor in tensors_of(cache)} == {"cpu"}
    assert bool(cache.quantized_length(1)) == (quant == "k2v2")


def on_devices(directory, *devices):
    """Text, and where the cache layers lie, with the parts of the model on these devices."""
    ids, cache, _ = text_and_cache(directory, **placed(*devices))
    assert cache.quantized_length(1)
    keys = [cache.dequantize(i)[0] for i in range(2)]
    return ids, [str(key.device) for key in keys]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_layer_of_the_cache_lies_where_its_layer_of_the_model_does(tiny_model_dir):
    expected, _ = on_devices(tiny_model_dir, 0, 0, 0, 0, 0)
    ids, devices = on_devices(tiny_model_dir, 0, 0, 1, 1, 1)
    assert devices == ["cuda:0", "cuda:1"]
    assert torch.equal(ids, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("away", ["cpu", "disk"])
def test_weights_offloaded_from_a_gpu_change_nothing(tiny_model_dir, tmp_path, away):
    expected, _ = on_devices(tiny_model_dir, 0, 0, 0, 0, 0)
    where = placed(0, 0, away, 0, 0) | {"offload_folder": tmp_path}
    ids, cache, _ = text_and_cache(tiny_model_dir, **where)
    assert {str(cache.dequantize(i)[0].device) for i in range(2)} == {"cuda:0"}
    assert torch.equal(ids, expected)
