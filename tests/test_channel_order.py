"""Orders of channels: what the transform makes of them, in stores, caches and files, and what is refused."""

from dataclasses import replace

import pytest
import torch
from harness import assert_reported_bytes, fed
from tiny_models import tiny_model
from torch.nn import functional as F

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec, QueryMoments
from kvquant_hf.guard import guarded, imbalance, storage_of_keys
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import cpu, reference, triton
from kvquant_hf.rope_probe import find_rotations
from kvquant_hf.rotation import hadamard, hadamard_of_heads, rotate, rotate_bounded, signs, unrotate
from kvquant_hf.spec import ROTATIONS
from kvquant_hf.storage import BlockStore
from tests.test_rotated_caches import assert_cuts_change_nothing, filled, quant

TURNING = ROTATIONS[1:]


def shuffled(channels: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randperm(channels, generator=torch.Generator().manual_seed(seed)).tolist())


def ordered(settings: dict, channels: int, **sides: int) -> dict:
    """Settings with an order for each side that has a seed."""
    return settings | {
        side: {**settings[side], "channel_order": list(shuffled(channels, seed))} for side, seed in sides.items()
    }


# ---- the transform -----------------------------------------------------------------------------------------------


def test_the_transform_takes_the_channels_of_each_head_in_that_order():
    states, order = torch.randn(2, 4, 5, 24), shuffled(24)
    moved = states[..., list(order)]
    assert torch.equal(rotate(states, "hadamard", order), hadamard(moved))
    assert torch.equal(rotate(states, "hadamard_signs", order), hadamard(moved * signs(24, states.device)))
    assert torch.equal(rotate(states, "grouped_heads", order), hadamard(hadamard_of_heads(states)[..., list(order)]))
    assert rotate(states, "none", order) is states and unrotate(states, "none", order) is states


@pytest.mark.parametrize("rotation", TURNING)
def test_it_is_orthonormal_and_undone(rotation):
    order = shuffled(24)
    basis = torch.eye(96, dtype=torch.float64).reshape(96, 4, 1, 24)
    turned = rotate(basis, rotation, order)
    matrix = turned.reshape(96, 96)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(96, dtype=torch.float64))
    torch.testing.assert_close(unrotate(turned, rotation, order), basis)
    large = torch.randn(1, 4, 3, 24) * 2.0**110
    assert torch.equal(rotate_bounded(large, rotation, order), rotate(large * 2.0**-110, rotation, order) * 2.0**110)
    huge = torch.full((1, 4, 3, 24), 3e38)
    back = rotate_bounded(rotate_bounded(huge, rotation, order), rotation, order, inverse=True)
    assert torch.isfinite(back).all()


def test_the_order_of_the_channels_themselves_changes_nothing():
    states = torch.randn(2, 4, 5, 24)
    for rotation in TURNING:
        assert torch.equal(rotate(states, rotation, tuple(range(24))), rotate(states, rotation))


def test_wide_channels_side_by_side_make_narrower_ranges():
    """Eight channels next to each other in a matrix of 64 give few different sums; spread they give many."""
    sizes = torch.full((64,), 0.05)
    wide = [3, 9, 17, 22, 38, 41, 52, 60]
    sizes[wide] = 5.0
    means = sizes * torch.randn(64, generator=torch.Generator().manual_seed(0)).sign()
    states = means + 0.3 * sizes * torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    order = tuple(sizes.argsort(descending=True, stable=True).tolist())
    spans = [
        (turned.amax(-1) - turned.amin(-1)).mean()
        for turned in (rotate(states, "hadamard"), rotate(states, "hadamard", order))
    ]
    assert spans[1] < 0.85 * spans[0]


# ---- stores and caches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["per_token", "per_channel"])
@pytest.mark.parametrize("rotation", TURNING)
def test_errors_stay_within_half_a_step(rotation, granularity):
    spec = {"nbits": 4, "granularity": granularity, "group_size": 32, "rotation": rotation, "rope": "post"}
    spec["channel_order"] = shuffled(32)
    layer = QuantLayer(KVQuantConfig.from_dict({"key": spec, "value": spec, "residual_length": 0, "sink_length": 0}))
    states = torch.randn(2, 4, 96, 32, generator=torch.Generator().manual_seed(0))
    states[..., 3] *= 8
    layer.update(states, states)
    for back in layer.dequantize():
        errors, rows = (rotate(t, rotation, shuffled(32)).unflatten(2, (-1, 32)) for t in (back - states, states))
        dim = -1 if granularity == "per_token" else -2
        half_step = (rows.amax(dim) - rows.amin(dim)) / 15 / 2
        assert (errors.abs().amax(dim) <= 1.05 * half_step + 1e-5).all()


@pytest.mark.parametrize(("key", "value"), [(1, 2), (1, None), (None, 2)])
@pytest.mark.parametrize(
    ("rotations", "rope", "padding"),
    [
        (("hadamard", "hadamard"), "post", None),
        (("hadamard", "hadamard_signs"), "pre", None),
        (("hadamard_signs", "grouped_heads"), "post", [37, 0]),
        (("grouped_heads", "hadamard"), "pre", [37, 0]),
    ],
    ids=str,
)
def test_attention_reads_what_is_stored(key, value, rotations, rope, padding):
    """Orders that are taken over, in queries and outputs, give the scores and outputs of those that are undone."""
    seeds = {side: seed for side, seed in (("key", key), ("value", value)) if seed is not None}
    plain = quant(*rotations, rope=rope)
    layer = filled(ordered(plain, 32, **seeds), heads=4, padding=padding)
    keys, values = layer.dequantize()
    other = filled(plain, heads=4, padding=padding).dequantize()
    assert torch.equal(keys, other[0]) == (key is None) and torch.equal(values, other[1]) == (value is None)
    query = torch.randn(2, 8, 3, 32, generator=torch.Generator().manual_seed(1))
    want = F.scaled_dot_product_attention(query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1))
    for backend in (reference, cpu):
        got = backend.decode_attention(query, layer.view(3), None, 32**-0.5)
        torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("rotation", TURNING)
@pytest.mark.parametrize("padding", [None, [25, 0]])
def test_contents_do_not_depend_on_the_cuts(rotation, padding):
    config = KVQuantConfig.from_dict(ordered(quant(rotation, rotation), 32, key=1, value=2))
    assert_cuts_change_nothing(config, padding)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def test_caches_hold_what_they_report_and_come_back_from_files(model, tmp_path):
    ids = torch.randint(1, 128, (2, 90), generator=torch.Generator().manual_seed(0))
    head_dim = model.config.head_dim
    plain = quant("grouped_heads", "hadamard_signs")
    settings = ordered(plain, head_dim, value=2)
    settings["layers"] = {0: {"key": {"channel_order": list(shuffled(head_dim, 5))}}}
    config = KVQuantConfig.from_dict(settings)
    config.to_yaml(tmp_path / "settings.yaml")
    assert KVQuantConfig.from_yaml(tmp_path / "settings.yaml") == config
    cache = QuantCache(model.config, tmp_path / "settings.yaml")
    specs = [cache.quantized_layer(index).config for index in (0, 1)]
    assert [spec.key.channel_order for spec in specs] == [shuffled(head_dim, 5), ()]
    assert [spec.value.channel_order for spec in specs] == [shuffled(head_dim, 2)] * 2
    assert "ordered channels" in repr(cache)
    fed(model, cache, ids, 13)
    assert_reported_bytes(cache)
    bits = KVQuantConfig.from_dict(plain).nominal_bits(head_dim)
    assert cache.memory_report().bits_per_value_quantized == pytest.approx(bits)
    cache.save(tmp_path / "cache")
    back = QuantCache.load(tmp_path / "cache", model.config)
    more = ids.flip(1)[:, :40]
    assert torch.equal(fed(model, back, more, 9), fed(model, cache, more, 9))


@pytest.mark.parametrize("rotation", ["hadamard", "hadamard_signs"])
def test_query_moments_follow_the_order(rotation):
    """Feedback of the moments is that of moments collected in the basis of the codes, and one for each order."""
    queries = torch.randn(2, 500, 32, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 33).float()
    order = shuffled(32)
    plain, turned = (q.transpose(-1, -2) @ q / 500 for q in (queries, rotate(queries[None], rotation, order)[0]))
    moments = QueryMoments({0: plain}, 500)
    without = moments.feedback(0, QuantSpec(rotation=rotation))
    got = moments.feedback(0, QuantSpec(rotation=rotation, channel_order=order))
    want = QueryMoments({0: turned}, 500).feedback(0, QuantSpec())
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(got, without, atol=1e-3)


@pytest.mark.parametrize("size", [8, 64])
def test_query_moments_of_another_head_size_are_refused_by_name(size):
    moments = QueryMoments({0: torch.eye(32).expand(2, 32, 32)}, 500)
    with pytest.raises(ValueError, match=f"`channel_order` must list the 32 channels of a head, got {size}"):
        moments.feedback(0, QuantSpec(rotation="hadamard", channel_order=shuffled(size)))
    for turn in (rotate, unrotate):
        with pytest.raises(ValueError, match=f"`channel_order` must list the 32 channels of a head, got {size}"):
            turn(torch.zeros(1, 1, 1, 32), "hadamard", shuffled(size))


def test_guarded_layers_keep_their_order_and_are_judged_in_it():
    spec = QuantSpec(2, rotation="hadamard", channel_order=shuffled(32), rope="post")
    assert guarded(spec).channel_order == spec.channel_order
    keys = torch.randn(1, 2, 32, 32, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 33) ** 2
    own, other = (
        float(imbalance(rotate(keys, "hadamard", order)).max()) for order in (spec.channel_order, tuple(range(32)))
    )
    assert abs(own - other) > 0.05
    config = KVQuantConfig(key=spec, outlier_guard=(own + other) / 2)
    judged = [
        storage_of_keys(replace(config, key=s), keys, None, None) for s in (spec, replace(spec, channel_order=()))
    ]
    assert [found.nbits > 2 for found in judged] == [own > other, other > own]


@pytest.mark.parametrize(("key", "value"), [(1, None), (None, 2), (1, 2)])
@pytest.mark.parametrize("rope", ["pre", "post"])
def test_what_kernels_read_and_make_of_orders(key, value, rope):
    seeds = {side: seed for side, seed in (("key", key), ("value", value)) if seed is not None}
    settings = ordered(quant("hadamard", "hadamard", "per_channel", rope=rope), 32, **seeds)
    layer = filled(settings | {"backend": "triton"}, rotary=rope == "pre")
    assert triton.unsupported(layer.view()) is None
    layer = filled(settings | {"backend": "cpu"}, rotary=rope == "pre")
    assert cpu.unsupported(layer.view()) is None
    assert cpu.can_encode(layer.config.key, torch.float32, layer.device, 16, 32) == (key is None)
    assert cpu.can_encode(layer.config.value, torch.float32, layer.device, 16, 32) == (value is None)


# ---- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [[0, 1, 1], [1, 2, 3], [0, 2], [0.0, 1.0], [True, False], "none", None, 3, {0: 1}], ids=str
)
def test_what_is_no_order_is_named(order):
    with pytest.raises(ValueError, match=r"`channel_order` must be the numbers from 0 to n - 1 in any order, or "):
        QuantSpec(rotation="hadamard", channel_order=order)


def test_an_order_needs_a_rotation_and_the_size_of_the_heads():
    with pytest.raises(ValueError, match=r"`channel_order` must be \(\) unless `rotation` is one of \('hadamard'"):
        QuantSpec(channel_order=(1, 0))
    spec = QuantSpec(rotation="hadamard", channel_order=shuffled(16))
    with pytest.raises(ValueError, match="`channel_order` must list the 32 channels of a head, got 16"):
        BlockStore(spec, 32, 32, torch.float32)
    layer = QuantLayer(KVQuantConfig(key=spec, value=spec))
    states = torch.randn(1, 2, 200, 32)
    with pytest.raises(ValueError, match="`channel_order` must list the 32 channels of a head, got 16"):
        layer.update(states, states)
    assert layer.get_seq_length() == 0
    BlockStore(QuantSpec(16, rotation="hadamard", channel_order=shuffled(16)), 32, 32, torch.float32)
    assert QuantSpec(rotation="hadamard", channel_order=[1, 0]).channel_order == (1, 0)


@pytest.mark.parametrize("side", ["key", "value"])
def test_caches_refuse_orders_of_another_size_before_any_layer_is_fed(side):
    model = tiny_model("deepseek_v3")
    right = dict(zip(("key", "value"), find_rotations(model.config)[1].head_dims, strict=True))
    assert right["key"] != right["value"]
    settings = {name: {"rotation": "hadamard", "rope": "post"} for name in right}

    def cache_with(size: int) -> QuantCache:
        order = {side: {"channel_order": list(shuffled(size))}}
        return QuantCache(model.config, {**settings, "layers": {1: order}})

    wrong = sum(right.values()) - right[side]
    message = f"Layer 1, `{side}`: `channel_order` must list the {right[side]} channels of a head, got {wrong}"
    with pytest.raises(ValueError, match=message):
        cache_with(wrong)
    fed(model, cache_with(right[side]), torch.ones(1, 200, dtype=torch.long), 100)
