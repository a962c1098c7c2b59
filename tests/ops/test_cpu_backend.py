"""The compiled CPU backend: compiling, choosing, refusing. Its numbers are checked in `test_decode_attention.py`."""

import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kvquant_hf.ops import cpu, decode_attention, notice, reference
from kvquant_hf.ops.cpu import build, encoding
from kvquant_hf.rope import KeyRotation
from kvquant_hf.spec import QuantSpec
from tests.ops.test_decode_attention import check, filled_layer

ROOT = Path(__file__).parents[2]
QUERY = torch.randn(2, 4, 1, 32)


@pytest.fixture
def clean_slate(monkeypatch, tmp_path):
    """An empty kernel directory and no memory of earlier compilations or warnings."""
    monkeypatch.setenv("KVQUANT_HF_CACHE", str(tmp_path))
    monkeypatch.setattr(notice, "_told", set())
    caches = (build.compiler, build._compiler_version, cpu.kernel._function, encoding._library_or_error)
    for function in caches:
        function.cache_clear()
    yield tmp_path
    for function in caches:
        function.cache_clear()


@pytest.fixture
def variant():
    """What one variant of the kernel is compiled with; comes before `clean_slate`, since filling a layer compiles."""
    return (*cpu.kernel._plan(filled_layer(100).view()).defines, ("R", 2))


def test_auto_uses_the_kernel(monkeypatch):
    monkeypatch.setattr(reference, "decode_attention", lambda *args: pytest.fail("the reference was used"))
    decode_attention(QUERY, filled_layer(100).view())


def test_a_variant_is_compiled_once_and_kept(clean_slate):
    layer = filled_layer(100)
    decode_attention(QUERY, layer.view())
    libraries = sorted((clean_slate / "kernels").iterdir())
    assert [path.name.partition("-")[0] for path in libraries] == ["decode", "encode"]
    assert {path.suffix for path in libraries} == {".so"}
    written = [path.stat().st_mtime_ns for path in libraries]
    cpu.kernel._function.cache_clear()
    encoding._library_or_error.cache_clear()
    decode_attention(QUERY, filled_layer(100).view())
    assert sorted((clean_slate / "kernels").iterdir()) == libraries
    assert [path.stat().st_mtime_ns for path in libraries] == written


def test_several_processes_may_compile_at_once(variant, clean_slate):
    code = (
        "import importlib.util as u; spec = u.spec_from_file_location('build', 'kvquant_hf/ops/cpu/build.py');"
        "build = u.module_from_spec(spec); spec.loader.exec_module(build);"
        f"print(build.load('decode', {variant!r}).kvquant_decode is not None)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [process.communicate(timeout=120)[0] for process in running] == ["True\n"] * 4
    assert [path.suffix for path in (clean_slate / "kernels").iterdir()] == [".so"]


def test_without_a_compiler_one_warning_names_the_fix(clean_slate, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(
        UserWarning, match=r"no C\+\+ compiler was found \(looked for no-such-compiler\).*apt install g"
    ) as warned:
        layer = filled_layer(100)
        output = decode_attention(QUERY, layer.view())
        layer.update(*(torch.randn(2, 2, 1, 32) for _ in range(2)))
    assert len(warned) == 1
    torch.testing.assert_close(output, reference.decode_attention(QUERY, filled_layer(100).view(), None, 32**-0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode_attention(QUERY, layer.view())
    strict = filled_layer(100, backend="cpu")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        decode_attention(QUERY, strict.view())


def test_a_failing_compiler_is_quoted(clean_slate, monkeypatch, tmp_path):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'internal compiler trouble' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.warns(UserWarning, match=r"internal compiler trouble"):
        decode_attention(QUERY, filled_layer(100).view())
    assert not list((clean_slate / "kernels").iterdir())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": torch.float64}, "keys in torch.float64 and values in torch.float64"),
        ({"key": {"metadata_nbits": 8}}, "`metadata_nbits=8`"),
        ({"value": {"metadata_nbits": 8}}, "`metadata_nbits=8`"),
        ({"key": {"shared_groups": 2}}, "groups that share a parameter"),
        ({"value": {"shared_groups": 2}}, "groups that share a parameter"),
        ({"head_dim": 40}, r"head sizes 40 and 40"),
    ],
)
def test_what_the_kernel_cannot_read_is_named_once(clean_slate, settings, reason):
    layer = filled_layer(100, **settings)
    query = torch.randn(2, 4, 1, layer.view().key_shape[3])
    with pytest.warns(UserWarning, match=reason):
        decode_attention(query, layer.view())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode_attention(query, layer.view())
    strict = filled_layer(100, backend="cpu", **settings)
    with pytest.raises(ValueError, match=f"`backend='cpu'` does not read {reason}"):
        decode_attention(query, strict.view())


def test_gradients_go_through_the_reference_or_are_refused():
    query = QUERY.clone().requires_grad_()
    decode_attention(query, filled_layer(100).view()).sum().backward()
    assert query.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="computes no gradients"):
        decode_attention(query, filled_layer(100, backend="cpu").view())


@pytest.mark.parametrize("tokens", [300, 3000])
def test_threads_change_nothing_but_rounding(tokens):
    layer, before = filled_layer(tokens, batch_size=1, kv_heads=1), torch.get_num_threads()
    query = torch.randn(1, 3, 1, 32)
    try:
        torch.set_num_threads(1)
        alone = decode_attention(query, layer.view())
        torch.set_num_threads(2)
        together = decode_attention(query, layer.view())
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_scales_in_float32_are_read():
    layer = filled_layer(100)
    big = 1e5 * torch.randn(2, 2, 64, 32)
    layer.update(big, big)
    assert layer._stores[0].scale.dtype == torch.float32
    view = layer.view(1)
    query = 1e-5 * QUERY
    # Outputs are sums of values of 1e5 that may cancel: the error of float32 is relative to those, not to the sum.
    torch.testing.assert_close(
        cpu.decode_attention(query, view, None, 0.2),
        reference.decode_attention(query, view, None, 0.2),
        rtol=1e-4,
        atol=2e-6 * big.abs().max().item(),
    )


SMALLER_MACHINES = {
    "no-avx512": ("-mno-avx512f",),
    "avx512-without-dot-products": ("-mno-avx512vnni",),
    "neither": ("-mno-avx512f", "-mno-avx2", "-mno-f16c"),
}
VARN = {"method": "variance_normalized"}
BYTES = {"nbits": 8, "levels": "e4m3", "granularity": "per_token", "group_size": 128}
NVFP4 = {"levels": "e2m1", "symmetric": True, "metadata_nbits": 8, "group_size": 16}
MIXED = {"granularity": "per_token", "rotation": "grouped_heads"}
STORED = {
    "k4v4": {"key": {"nbits": 4}, "value": {"nbits": 4}},
    "k2v3": {"key": {"nbits": 2}, "value": {"nbits": 3, "rotation": "hadamard"}, "dtype": torch.bfloat16},
    "k3v8": {"key": {"nbits": 3, "symmetric": True}, "value": {"nbits": 8, "group_size": 16}, "head_dim": 48},
    "k4v8": {"key": {"nbits": 4}, "value": {"nbits": 8}},
    "symmetric": {
        "key": {"nbits": 8, "symmetric": True},
        "value": {"nbits": 2, "group_size": 64, "symmetric": True},
    },
    "promoted": {"key": {"nbits": 2, "promoted": 0.25}, "value": {"nbits": 4}},
    "k16v2": {
        "key": {"nbits": 16},
        "value": {"nbits": 2, "group_size": 64},
        "head_dim": 96,
        "dtype": torch.float16,
    },
    "factors": {"key": {"nbits": 4} | VARN, "value": {"nbits": 2} | VARN, "uneven": True},
    "tables": {"key": {"levels": "gaussian", "nbits": 3}, "value": {"levels": "e2m1", "group_size": 16}},
    "fp8": {"key": BYTES, "value": BYTES | {"levels": "e5m2", "symmetric": True}},
    "across": {"key": {"granularity": "per_token"}, "value": {"granularity": "per_channel", "nbits": 2}},
    "nvfp4": {"key": NVFP4, "value": NVFP4},
    "outliers": {
        "key": {"nbits": 3, "outliers": 0.02},
        "value": {"nbits": 2, "outliers": 0.02, "levels": "gaussian"},
    },
    "mixed-heads": {"key": MIXED | {"nbits": 2}, "value": MIXED, "kv_heads": 4},
}
# Without AVX-512 all of the source that differs is compiled; other flags change less of it.
COMPILED = [("no-avx512", name) for name in STORED]
COMPILED += [("avx512-without-dot-products", name) for name in ("k4v4", "k2v3", "k4v8", "factors")]
COMPILED += [("neither", name) for name in ("k4v4", "k16v2", "outliers", "nvfp4")]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86 compilers")
@pytest.mark.parametrize(("machine", "stored"), COMPILED)
def test_code_for_smaller_machines_is_right(machine, stored, monkeypatch):
    """What a processor without the newest instructions would run, as far as this one can run it."""
    settings, flags = STORED[stored], SMALLER_MACHINES[machine]
    monkeypatch.setattr(build, "_NATIVE", (*build._NATIVE, *flags))
    cpu.kernel._function.cache_clear()
    encoding._library_or_error.cache_clear()
    try:
        head_dim = settings.get("head_dim", 64)
        rotation = KeyRotation(1 / 100 ** (torch.arange(head_dim // 2) / (head_dim // 2)), head_dim)
        layer = filled_layer(205, rotation=rotation, **({"head_dim": head_dim} | settings))
        assert layer.quantized_length
        heads = settings.get("kv_heads", 2)
        check(layer, heads, 3, torch.rand(2, 1, 3, 205) > 0.3)
        check(layer, 3 * heads, 1, None)
    finally:
        cpu.kernel._function.cache_clear()
        encoding._library_or_error.cache_clear()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86 compilers")
def test_blocks_encoded_on_smaller_machines_are_the_same(monkeypatch):
    spec = QuantSpec(4, "per_channel", rope="post")
    states = torch.randn(2, 2, 64, 48)
    want = cpu.encode(spec, states, 32)
    monkeypatch.setattr(build, "_NATIVE", (*build._NATIVE, *SMALLER_MACHINES["neither"]))
    encoding._library_or_error.cache_clear()
    try:
        got = cpu.encode(spec, states, 32)
    finally:
        encoding._library_or_error.cache_clear()
    for name in ("codes", "scale", "zero_point"):
        assert torch.equal(getattr(got, name), getattr(want, name))
