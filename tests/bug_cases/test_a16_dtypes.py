"""A16: dtype and layout of the inputs are respected; a machine without Triton or extras works."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import (
    LOSSLESS,
    Q,
    dynamic_cache,
    expected_quantized,
    kl,
    plain,
    quant_cache,
    random_ids,
    random_states,
    roll,
    settings,
)
from tiny_models import tiny_model

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "autocast"])
def test_a16_dtype_out_is_dtype_in(dtype, attention):
    model = tiny_model("llama", attn_implementation=attention)
    if dtype != "autocast":
        model = model.to(getattr(torch, dtype))
    cache, seen = quant_cache(model), []
    original = cache.update

    def spy(key_states, value_states, *args, **kwargs):
        keys, values = original(key_states, value_states, *args, **kwargs)
        seen.append((key_states.dtype, keys.dtype, value_states.dtype, values.dtype))
        assert keys.device == key_states.device and values.device == value_states.device
        assert plain(keys).dtype == keys.dtype and plain(values).dtype == values.dtype
        return keys, values

    cache.update = spy
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        logits = roll(model, cache, random_ids(2, 60), random_ids(2, 20, seed=1))
    assert torch.isfinite(logits).all()
    assert cache.quantized_length(0) == expected_quantized(80)
    assert len(seen) == 2 * 21
    for key_in, key_out, value_in, value_out in seen:
        assert key_out == key_in
        assert value_out == value_in
    del cache.update
    assert {part.dtype for part in cache.dequantize(0)} <= {row for pair in seen for row in pair}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a16_half_precision_costs_no_quality(dtype):
    """Statistics are fp32: the error of K4V4 in a half-precision model is that of the fp32 model."""
    full = tiny_model("llama")
    half = tiny_model("llama").to(dtype)
    errors = []
    for model in (full, half):
        total = 0.0
        for seed in range(4):
            ids, steps = random_ids(2, 60, seed), random_ids(2, 20, seed + 9)
            total += kl(roll(model, dynamic_cache(model), ids, steps), roll(model, quant_cache(model), ids, steps))
        errors.append(total)
    assert errors[1] <= 1.5 * errors[0] + 0.01


@pytest.mark.parametrize("quant", [Q, LOSSLESS["16-bit"]], ids=["K4V4", "16-bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a16_strided_inputs_equal_contiguous_ones(quant, dtype):
    """Slices of a fused QKV tensor, and an expanded head, give bit for bit the same cache."""
    model = tiny_model("llama", num_hidden_layers=1)
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(2, 90, 4 + 2 + 2, 16, generator=generator).to(dtype)
    keys, values = fused[:, :, 4:6].transpose(1, 2), fused[:, :, 6:].transpose(1, 2)
    expanded = fused[:, :, :1].transpose(1, 2).expand(2, 2, 90, 16)
    assert not keys.is_contiguous() and not values.is_contiguous()
    for strided in ((keys, values), (expanded, values), (keys.flip(2), expanded)):
        actual, expected = quant_cache(model, quant), quant_cache(model, quant)
        for start, stop in ((0, 70), (70, 71), (71, 90)):
            actual.update(*(part[:, :, start:stop] for part in strided), 0)
            expected.update(*(part[:, :, start:stop].contiguous() for part in strided), 0)
        assert torch.equal(actual.dequantize(0)[0], expected.dequantize(0)[0])
        assert torch.equal(actual.dequantize(0)[1], expected.dequantize(0)[1])


def test_a16_inputs_are_not_modified():
    model = tiny_model("llama", num_hidden_layers=1)
    keys, values = random_states(2, 2, 90, 16)
    kept = keys.clone(), values.clone()
    cache = quant_cache(model)
    cache.update(keys[:, :, :70], values[:, :, :70], 0)
    for token in range(70, 90):
        cache.update(keys[:, :, token : token + 1], values[:, :, token : token + 1], 0)
    cache.dequantize(0)
    assert torch.equal(keys, kept[0]) and torch.equal(values, kept[1])


_BARE = """
import sys
absent = ("triton", "lm_eval", "optimum", "hqq", "matplotlib", "gguf", "accelerate", "flash_attn", "datasets")
for name in absent:
    sys.modules[name] = None  # `import` raises, `find_spec` finds nothing
try:
    import triton
except ImportError:
    pass
else:
    raise SystemExit("triton can be imported")
import torch
before = torch.cuda.is_initialized(), dict(__import__("os").environ), torch.get_num_threads()
import kvquant_hf
assert (torch.cuda.is_initialized(), dict(__import__("os").environ), torch.get_num_threads()) == before
assert not [name for name, module in sys.modules.items() if name.split(".")[0] in absent and module is not None]
sys.path.insert(0, "tests")
torch.set_num_threads(1)
from tiny_models import tiny_model
from harness import quant_cache, random_ids, roll, Q
model = tiny_model("llama")
cache = quant_cache(model)
logits = roll(model, cache, random_ids(2, 60), random_ids(2, 20, seed=1))
assert torch.isfinite(logits).all() and cache.quantized_length(0) == 48, cache.quantized_length(0)
print("fine", kvquant_hf.list_presets().keys())
"""


def test_a16_works_without_triton_or_extras():
    """In a process where the optional packages cannot be imported: import, prefill and decode."""
    done = subprocess.run(
        [sys.executable, "-c", _BARE], cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("fine")


def test_a16_importing_does_nothing():
    """No patch of Transformers or torch: their public functions are the same objects after the import."""
    code = """
import torch, transformers
from transformers import cache_utils, masking_utils, modeling_utils
F = torch.nn.functional
watched = lambda: {
    **{f"cache_utils.{n}": v for n, v in vars(cache_utils).items()},
    **{f"masking.{n}": v for n, v in vars(masking_utils).items()},
    **{f"F.{n}": v for n, v in vars(F).items()},
    **{f"Cache.{n}": v for n, v in vars(cache_utils.Cache).items()},
    **{f"attn.{n}": v for n, v in modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping.items()},
    "threads": torch.get_num_threads(), "grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype(),
}
before = watched()
import kvquant_hf
after = watched()
changed = [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)]
assert not changed, changed
assert kvquant_hf.__all__ == sorted(kvquant_hf.__all__), kvquant_hf.__all__
missing = {"QuantCache", "KVQuantConfig", "QuantSpec", "list_presets"} - set(kvquant_hf.__all__)
assert not missing, missing
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a16_dtype_of_the_window_is_the_models():
    """A bf16 model pays two bytes for a window value, not four."""
    model = tiny_model("llama", num_hidden_layers=1)
    sizes = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = quant_cache(model, settings(residual=4096))
        keys, values = random_states(1, 2, 300, 16)
        cache.update(keys.to(dtype), values.to(dtype), 0)
        sizes.append(cache.memory_report().residual)
    assert sizes[1] * 2 == sizes[0] > 0
