"""Rotations in stores and caches: fused or undone, cut anyhow, saved, counted, refused where they cannot be."""

import pytest
import torch
from harness import assert_reported_bytes, fed
from tiny_models import tiny_model
from torch.nn import functional as F

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec, QueryMoments
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import cpu, reference, triton
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rotation import rotate
from kvquant_hf.spec import ROTATIONS

NEW = ("hadamard_signs", "grouped_heads")


def quant(key: str, value: str, granularity: str = "per_token", rope: str = "pre", **top) -> dict:
    return {
        "key": {"nbits": 4, "granularity": granularity, "group_size": 16, "rope": rope, "rotation": key},
        "value": {"nbits": 3, "group_size": 16, "granularity": "per_token", "rotation": value, "clip": "mse"},
        "residual_length": 16,
        **top,
    }


def filled(settings: dict, heads: int = 2, head_dim: int = 32, rotary: bool = True, padding=None) -> QuantLayer:
    rotation = KeyRotation(1 / 100 ** (torch.arange(head_dim // 2) / (head_dim // 2)), head_dim) if rotary else None
    layer = QuantLayer(KVQuantConfig.from_dict(settings), rotation)
    if padding is not None:
        layer.set_padding(torch.tensor(padding))
    generator = torch.Generator().manual_seed(0)
    layer.update(*torch.randn(2, 2, heads, 150, head_dim, generator=generator))
    return layer


@pytest.mark.parametrize("value", ROTATIONS)
@pytest.mark.parametrize("key", ROTATIONS)
@pytest.mark.parametrize(("rope", "padding"), [("pre", None), ("post", None), ("post", [37, 0])])
def test_attention_reads_what_is_stored(key, value, rope, padding):
    """Rotations that are taken over give the scores and outputs of those that are undone."""
    layer = filled(quant(key, value, rope=rope), heads=4, padding=padding)
    keys, values = layer.dequantize()
    query = torch.randn(2, 8, 3, 32, generator=torch.Generator().manual_seed(1))
    want = F.scaled_dot_product_attention(query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1))
    got = reference.decode_attention(query, layer.view(3), None, 32**-0.5)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    tiles = [tile for tile in layer.view(3).tiles(fold_rotations=True) if tile.rotated_keys or tile.rotated_values]
    folded = padding is None and (value.startswith("hadamard") or (rope == "post" and key.startswith("hadamard")))
    assert bool(tiles) == folded


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_sides_kept_as_they_are_are_not_rotated(side, rotation):
    settings = quant("none", "none", rope="post")
    settings[side] |= {"nbits": 16, "rotation": rotation}
    layer = filled(settings)
    keys, values = layer.dequantize()
    query = torch.randn(2, 2, 1, 32, generator=torch.Generator().manual_seed(1))
    got = reference.decode_attention(query, layer.view(), None, 32**-0.5)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, keys, values), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("rotation", NEW)
@pytest.mark.parametrize(("granularity", "heads"), [("per_token", 4), ("per_channel", 4), ("per_token", 3)])
def test_errors_stay_within_half_a_step(rotation, granularity, heads):
    """In the basis that is quantized; the rotation back keeps a token's error as long as it is."""
    spec = {"nbits": 4, "granularity": granularity, "group_size": 32, "rotation": rotation, "rope": "post"}
    settings = {"key": spec, "value": spec, "residual_length": 0, "sink_length": 0}
    layer = QuantLayer(KVQuantConfig.from_dict(settings))
    states = torch.randn(2, heads, 96, 32, generator=torch.Generator().manual_seed(0))
    states[..., 3] *= 8
    layer.update(states, states)
    for back in layer.dequantize():
        errors, rows = (rotate(t, rotation).unflatten(2, (-1, 32)) for t in (back - states, states))
        dim = -1 if granularity == "per_token" else -2
        half_step = (rows.amax(dim) - rows.amin(dim)) / 15 / 2
        assert (errors.abs().amax(dim) <= 1.05 * half_step + 1e-5).all()


def test_an_outlier_channel_is_spread_over_channels_and_heads():
    """Within its head a rotation lowers the error; across heads it shares it out, and lowers the sum no further."""
    errors = {}
    states = torch.randn(1, 4, 160, 32, generator=torch.Generator().manual_seed(0))
    states[:, 1, :, 7] *= 30
    for rotation in ("none", "hadamard", "grouped_heads"):
        layer = QuantLayer(KVQuantConfig.from_dict(quant(rotation, "none")))
        layer.update(states, states)
        errors[rotation] = (layer.dequantize()[0] - states).square().mean((0, 2, 3))
    assert errors["hadamard"].sum() < 0.7 * errors["none"].sum()
    assert errors["grouped_heads"].max() < 0.5 * errors["hadamard"].max()
    assert errors["grouped_heads"].sum() < 1.5 * errors["hadamard"].sum()


@pytest.mark.parametrize("rotation", NEW)
@pytest.mark.parametrize("granularity", ["per_token", "per_channel"])
@pytest.mark.parametrize("padding", [None, [25, 0]])
def test_contents_do_not_depend_on_the_cuts(rotation, granularity, padding):
    assert_cuts_change_nothing(KVQuantConfig.from_dict(quant(rotation, rotation, granularity)), padding)


def assert_cuts_change_nothing(config: KVQuantConfig, padding: list[int] | None) -> None:
    """Keys before RoPE, four heads of 32 channels, fed at once or in pieces, some empty, with operations on rows."""
    states = torch.randn(2, 2, 4, 120, 32, generator=torch.Generator().manual_seed(0))
    held = []
    for cut in (120, 1, 17):
        layer = QuantLayer(config, KeyRotation(1 / 100 ** (torch.arange(16) / 16), 32))
        if padding is not None:
            layer.set_padding(torch.tensor(padding))
        for piece in states.split(cut, dim=3):
            layer.update(*piece)
            layer.update(*piece[:, :, :, :0])  # nothing
        layer.batch_repeat_interleave(2)
        layer.crop(-70)
        layer.batch_select_indices(torch.tensor([2, 1]))
        held.append(layer.dequantize())
    for other in held[1:]:
        assert all(torch.equal(a, b) for a, b in zip(held[0], other, strict=True))


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.mark.parametrize("rotation", NEW)
def test_caches_hold_what_they_report_and_come_back_from_files(model, tmp_path, rotation):
    ids = torch.randint(1, 128, (2, 90), generator=torch.Generator().manual_seed(0))
    settings = quant(rotation, rotation)
    cache = QuantCache(model.config, settings)
    fed(model, cache, ids, 13)
    assert_reported_bytes(cache)
    plain = KVQuantConfig.from_dict(quant("none", "none")).nominal_bits(model.config.head_dim)
    assert cache.memory_report().bits_per_value_quantized == pytest.approx(plain)
    cache.save(tmp_path)
    back = QuantCache.load(tmp_path, model.config)
    more = ids.flip(1)[:, :40]
    assert torch.equal(fed(model, back, more, 9), fed(model, cache, more, 9))
    assert rotation in repr(cache)


def test_heads_of_a_part_of_the_model_are_refused(model):
    """Under tensor parallelism each process hands over its own heads."""
    cache = QuantCache(model.config, quant("grouped_heads", "none"))
    states = torch.randn(1, 1, 40, model.config.head_dim)
    with pytest.raises(ValueError, match=r"mixes 2 of the model's 2 key/value heads at a time, this process holds 1"):
        cache.update(states, states, 0)
    assert cache.get_seq_length() == 0
    QuantCache(model.config, quant("hadamard_signs", "hadamard")).update(states, states, 0)
    unquantized = quant("grouped_heads", "none")
    unquantized["key"]["nbits"] = 16
    QuantCache(model.config, unquantized).update(states, states, 0)


@pytest.mark.parametrize("rotation", ["hadamard", "hadamard_signs"])
def test_query_moments_follow_the_rotation(rotation):
    """Feedback of the rotated moments is that of moments collected in the rotated basis."""
    queries = torch.randn(2, 500, 32, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 33).float()
    spec = QuantSpec(rotation=rotation)
    plain, turned = (q.transpose(-1, -2) @ q / 500 for q in (queries, rotate(queries[None], rotation)[0]))
    got = QueryMoments({0: plain}, 500).feedback(0, spec)
    want = QueryMoments({0: turned}, 500).feedback(0, QuantSpec())
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_query_moments_do_not_serve_mixed_heads():
    moments = QueryMoments({0: torch.eye(32).expand(2, 32, 32)}, 500)
    with pytest.raises(ValueError, match=r"`query_moments` serve keys whose .*, got 'grouped_heads' in layer 0"):
        moments.feedback(0, QuantSpec(rotation="grouped_heads"))


@pytest.mark.parametrize("rotation", NEW)
@pytest.mark.parametrize("side", ["key", "value"])
def test_what_compiled_code_reads_and_makes_of_rotations(side, rotation):
    settings = quant("none", "none", "per_channel", rope="post", backend="cpu")
    settings[side]["rotation"] = rotation
    layer = filled(settings, rotary=False)
    assert cpu.unsupported(layer.view()) is None
    assert cpu.can_encode(layer.config.key, torch.float32, layer.device, 16, 32) == (side != "key")
    assert triton.unsupported(layer.view()) is None


def test_unknown_rotations_are_named():
    with pytest.raises(ValueError, match=r"`rotation` must be one of .*'grouped_heads'.*, got 'fourier'"):
        QuantSpec(rotation="fourier")
