"""A cache in the GPU layout does everything that one in the common layout does, with the same stored values."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from kvquant_hf import QuantCache, QueryMoments
from kvquant_hf._compat import cache_kwargs
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import available_backends, decode_attention, reference
from kvquant_hf.ops.triton import WordLayout
from kvquant_hf.rope import KeyRotation

PRESETS = ["plain", "turned", "k3v3", "k8v8", "kivi-int2", "factors", "k2v2", "k3v4", "bytes"]
FACTORS = {
    "key": {"nbits": 2, "method": "variance_normalized"},
    "value": {"nbits": 3, "granularity": "per_token", "method": "variance_normalized", "rotation": "hadamard"},
}
BYTES = {
    "key": {"nbits": 2, "promoted": 0.25},
    "value": {"nbits": 3, "granularity": "per_token", "rotation": "hadamard", "symmetric": True, "metadata_nbits": 8},
}
PLAIN = {"key": {"nbits": 4}, "value": {"nbits": 4}}
TURNED = {"key": {"nbits": 2}, "value": {"nbits": 2, "rotation": "hadamard", "clip": "mse"}}
QUANTS = {"plain": PLAIN, "turned": TURNED, "factors": FACTORS, "bytes": BYTES}
CONFIG = LlamaConfig(
    num_hidden_layers=1,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=64,
    intermediate_size=64,
)
CHANGES = {"residual_length": 16, "sink_length": 4}


def states(tokens: int, seed: int, device: torch.device, batch_size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch_size, 2, tokens, 32, generator=generator).to(device)
    return keys, values


def pair_of_caches(preset: str, device: torch.device, tokens: int = 120):
    """The same tokens in the layout of the GPU backend and in the common one, by prompt and then one by one."""
    quant = QUANTS.get(preset, preset)
    caches = SimpleNamespace(
        words=QuantCache(CONFIG, quant, backend="triton", **CHANGES),
        common=QuantCache(CONFIG, quant, backend="torch", **CHANGES),
    )
    for cache in (caches.words, caches.common):
        cache.update(*states(tokens, 0, device), 0)
        for token in range(3):
            cache.update(*states(1, 1 + token, device), 0)
    return caches


def assert_same(caches) -> None:
    for mine, theirs in zip(caches.words.dequantize(0), caches.common.dequantize(0), strict=True):
        assert torch.equal(mine, theirs)
    assert caches.words.quantized_length(0) == caches.common.quantized_length(0)


def stores_of(cache: QuantCache):
    return cache.quantized_layer(0)._stores


def test_the_backend_is_there():
    assert "triton" in available_backends()


@pytest.mark.parametrize("preset", PRESETS)
def test_values_and_bytes_are_those_of_the_common_layout(preset, device):
    caches = pair_of_caches(preset, device)
    assert_same(caches)
    for store in stores_of(caches.words):
        assert isinstance(store.own_layout, WordLayout)
        assert store.codes.dtype == torch.int32
    mine, theirs = (cache.memory_report() for cache in (caches.words, caches.common))
    assert {**vars(mine), "unused": 0} == {**vars(theirs), "unused": 0}


@pytest.mark.parametrize("act", ["crop-window", "crop-blocks", "reorder", "repeat", "select", "offload", "copy"])
@pytest.mark.parametrize("preset", ["turned", "factors", "k2v3", "bytes"])
def test_whatever_is_done_to_the_cache(preset, act, device):
    caches = pair_of_caches(preset, device)
    for name, cache in vars(caches).items():
        if act == "crop-window":
            cache.crop(-5)
        elif act == "crop-blocks":
            cache.crop(-50)
        elif act == "reorder":
            cache.reorder_cache(torch.tensor([1, 1], device=device))
        elif act == "repeat":
            cache.batch_repeat_interleave(2)
        elif act == "select":
            cache.batch_select_indices(torch.tensor([1], device=device))
        elif act == "offload":
            cache.offload(0)
            stores = cache.quantized_layer(0)._block_stores()
            assert {tensor.device.type for store in stores for tensor in store.tensors()} == {"cpu"}
            cache.prefetch(0)
        else:
            setattr(caches, name, pickle.loads(pickle.dumps(copy.deepcopy(cache))))
    assert_same(caches)
    rows = caches.words.dequantize(0)[0].shape[0]
    for cache in (caches.words, caches.common):
        cache.update(*states(40, 9, device, rows), 0)
    assert_same(caches)


@pytest.mark.parametrize("preset", ["plain", "k3v3", "factors", "k2v2", "bytes"])
def test_saved_caches_load_into_either_layout(preset, device, tmp_path):
    caches = pair_of_caches(preset, device)
    files = {}
    for name, cache in vars(caches).items():
        cache.save(tmp_path / name)
        text = (tmp_path / name / "cache.json").read_text()
        for backend in ("triton", "torch"):
            (tmp_path / f"{name}-{backend}").mkdir()
            other = tmp_path / f"{name}-{backend}"
            saved = "triton" if name == "words" else "torch"
            (other / "cache.json").write_text(text.replace(f'"backend": "{saved}"', f'"backend": "{backend}"'))
            (other / "cache.safetensors").write_bytes((tmp_path / name / "cache.safetensors").read_bytes())
            files[name, backend] = QuantCache.load(other, CONFIG, device=device)
    assert (tmp_path / "words/cache.safetensors").read_bytes() == (tmp_path / "common/cache.safetensors").read_bytes()
    want = caches.common.dequantize(0)
    for (_, backend), cache in files.items():
        assert isinstance(stores_of(cache)[0].own_layout, WordLayout) == (backend == "triton")
        for mine, theirs in zip(cache.dequantize(0), want, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("preset", ["plain", "factors", "k2v2", "bytes"])
def test_numbers_too_large_turn_the_layer_to_the_common_layout(preset, device):
    caches = pair_of_caches(preset, device)
    for cache in (caches.words, caches.common):
        cache.update(*(1e5 * part for part in states(64, 5, device)), 0)
    assert_same(caches)
    assert all(store.own_layout is None for store in stores_of(caches.words))
    assert_same(caches)
    layer = caches.words.quantized_layer(0)
    query = 1e-5 * torch.randn(2, 4, 1, 32, generator=torch.Generator().manual_seed(6)).to(device)
    got, want = decode_attention(query, layer.view()), reference.decode_attention(query, layer.view(), None, 32**-0.5)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * want.abs().max().item())


@pytest.mark.parametrize(
    ("settings", "head_dim", "reason"),
    [
        ({"key": {"metadata_nbits": 8}}, 32, "keys with zero points of 8 bits"),
        ({"value": {"metadata_nbits": 8}}, 32, "values with zero points of 8 bits"),
        ({"key": {"rotation": "hadamard"}}, 272, "head sizes 272 and 272"),
        ({"key": {"shared_groups": 2}}, 32, "keys with groups that share a parameter"),
        ({"value": {"shared_groups": 2}}, 32, "values with groups that share a parameter"),
        ({}, 272, "head sizes 272 and 272"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused_by_name(settings, head_dim, reason, device):
    rotation = KeyRotation(1 / 100 ** (torch.arange(16) / 16), head_dim)
    layer = QuantLayer(KVQuantConfig(backend="triton", residual_length=16).replace(**settings), rotation)
    layer.update(*(torch.randn(1, 1, 100, head_dim, device=device) for _ in range(2)))
    query = torch.randn(1, 1, 1, head_dim, device=device)
    with pytest.raises(ValueError, match=f"`backend='triton'` does not read {reason}"):
        decode_attention(query, layer.view())
    assert torch.isfinite(reference.decode_attention(query, layer.view(), None, 0.1)).all()


def test_float64_is_left_to_others(device):
    layer = QuantLayer(KVQuantConfig(backend="triton", residual_length=16), None)
    layer.update(*(torch.randn(1, 1, 100, 32, device=device, dtype=torch.float64) for _ in range(2)))
    with pytest.raises(ValueError, match="does not read float64"):
        decode_attention(torch.randn(1, 1, 1, 32, device=device, dtype=torch.float64), layer.view())


def test_gradients_are_refused(device):
    layer = QuantLayer(KVQuantConfig(backend="triton", residual_length=16), None)
    layer.update(*(torch.randn(1, 1, 100, 32, device=device) for _ in range(2)))
    with pytest.raises(ValueError, match="computes no gradients"):
        decode_attention(torch.randn(1, 1, 1, 32, device=device, requires_grad=True), layer.view())


@pytest.mark.parametrize("quant", ["k4v4", FACTORS, "k2v2", BYTES], ids=["plain", "factors", "k2v2", "bytes"])
def test_a_model_decodes_with_it(quant, device):
    """Greedy tokens of a tiny model are those of the torch backend."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval().to(device)
    ids = torch.randint(3, 64, (2, 60), generator=torch.Generator().manual_seed(0)).to(device)
    produced = []
    for backend in ("triton", "torch"):
        cache = QuantCache(model.config, quant, backend=backend, **CHANGES)
        produced.append(model.generate(ids, **cache_kwargs(cache), max_new_tokens=4, do_sample=False, pad_token_id=0))
    assert torch.equal(*produced)


def test_keys_rounded_by_query_moments_are_the_same(device):
    queries = torch.randn(2, 200, 32, generator=torch.Generator().manual_seed(0)) + 2
    moments = QueryMoments({0: queries.transpose(-1, -2) @ queries}, 200)
    held = []
    for backend, used in (("triton", moments), ("torch", moments), ("triton", None)):
        cache = QuantCache(CONFIG, TURNED, backend=backend, query_moments=used, **CHANGES)
        cache.update(*states(120, 0, device), 0)
        held.append(cache.dequantize(0)[0])
    assert torch.equal(held[0], held[1])
    assert not torch.equal(held[0], held[2])


def attended(cache: QuantCache, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What the backend of a cache and the twin make of its first layer."""
    view = cache.quantized_layer(0).view(1)
    query = torch.randn(view.key_shape[0], 4, 1, 32, generator=torch.Generator().manual_seed(3)).to(device)
    return decode_attention(query, view), reference.decode_attention(query, view, None, 32**-0.5)


PROMOTED = {
    "key": {"nbits": 2, "promoted": 0.25},
    "layers": {0: {"key": {"nbits": 3, "promoted": 0.5}}},
    "value": {"nbits": 3, "granularity": "per_token"},
}


@pytest.mark.parametrize("act", ["append", "crop", "reorder", "repeat", "copy", "load"])
def test_promoted_channels_are_read_whatever_was_done(act, device, tmp_path):
    cache = QuantCache(CONFIG, PROMOTED, backend="triton", **CHANGES)
    cache.update(*states(150, 0, device), 0)
    store = stores_of(cache)[0]
    chosen = store.promoted[:, :, : store.num_blocks].flatten(0, 2)
    assert chosen.shape[1] == 16 and len({tuple(row.tolist()) for row in chosen}) > 4  # others in each block and head
    before = attended(cache, device)[0]
    if act == "append":
        for token in range(40):
            cache.update(*states(1, 1 + token, device), 0)
    elif act == "crop":
        cache.crop(-50)
        cache.update(*states(70, 1, device), 0)
    elif act == "reorder":
        cache.reorder_cache(torch.tensor([1, 0], device=device))
    elif act == "repeat":
        cache.batch_repeat_interleave(2)
    elif act == "copy":
        cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    else:
        cache.save(tmp_path)
        cache = QuantCache.load(tmp_path, CONFIG, device=device)
    got, want = attended(cache, device)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-4)
    assert got.shape != before.shape or torch.equal(got, before) == (act in ("copy", "load"))


@pytest.mark.parametrize("magnitude", [1e-7, 1e5], ids=["too-small", "too-large"])
def test_bases_that_float16_does_not_hold_stay_in_words(magnitude, device):
    """Bases become float32 when the first such block comes, and go on being what the bytes are relative to."""
    caches = pair_of_caches("bytes", device)
    store = stores_of(caches.words)[1]
    assert store.metadata.dtype == torch.uint8 and store.second_level.dtype == torch.float16
    for cache in (caches.words, caches.common):
        keys, values = states(64, 5, device)
        cache.update(keys, magnitude * values, 0)
    assert_same(caches)
    assert isinstance(store.own_layout, WordLayout) and store.second_level.dtype == torch.float32
    torch.testing.assert_close(*attended(caches.words, device), rtol=2e-3, atol=2e-4 * max(1, magnitude))


@pytest.mark.parametrize("name", ["metadata", "second_level"])
def test_the_bytes_and_the_bases_of_each_block_are_what_is_read(name, device):
    """Those of other tokens, blocks and heads give other results, for the kernel as for the twin."""
    cache = QuantCache(CONFIG, BYTES, backend="triton", **CHANGES)
    keys, values = states(150, 0, device)
    sizes = 2.0 ** torch.arange(150, device=device).div(32, rounding_mode="floor")
    cache.update(keys, values * sizes[:, None] * torch.tensor([1.0, 3.0], device=device)[:, None, None], 0)
    before = attended(cache, device)
    store = stores_of(cache)[1]
    held = getattr(store, name)
    held[:, :, : store.num_blocks] = held[:, :, : store.num_blocks].flip(2 if name == "second_level" else 3)
    after = attended(cache, device)
    for mine, theirs in (before, after):
        torch.testing.assert_close(mine, theirs, rtol=4e-3, atol=2e-3)
    for mine, theirs in zip(before, after, strict=True):
        assert (mine - theirs).norm() > 0.02 * mine.norm()


@pytest.mark.parametrize("name", ["extra", "promoted"])
def test_the_low_bits_and_the_numbers_of_channels_are_what_is_read(name, device):
    """Other ones give other results, for the kernel as for the twin."""
    cache = QuantCache(CONFIG, PROMOTED, backend="triton", **CHANGES)
    cache.update(*states(150, 0, device), 0)
    before = attended(cache, device)
    store = stores_of(cache)[0]
    changed = store.extra ^ 0x5555AAAA if name == "extra" else store.promoted.flip(0)
    setattr(store, name, changed.contiguous())
    after = attended(cache, device)
    torch.testing.assert_close(*after, rtol=2e-3, atol=2e-4)
    for mine, theirs in zip(before, after, strict=True):
        assert (mine - theirs).norm() > 0.02 * mine.norm()
