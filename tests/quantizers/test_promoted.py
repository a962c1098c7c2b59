"""Channel promotion: which channels, their bounds, their place in stores and files."""

import itertools

import pytest
import torch
from harness import assert_reported_bytes, fed
from tiny_models import tiny_model

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec
from kvquant_hf.ops import cpu
from kvquant_hf.quantizers import AffineQuantizer, PromotedQuantizer
from kvquant_hf.rope import KeyRotation
from kvquant_hf.storage import BlockStore

D, L = 32, 32
QUANT = {"key": {"nbits": 2, "group_size": 16, "promoted": 0.25}, "value": {"group_size": 16}, "residual_length": 16}


def keys(*lead: int, seed: int = 0) -> torch.Tensor:
    """Rows of channels `[..., D, L]` whose sizes differ a lot."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*lead, D, L, generator=generator) * torch.randn(*lead, D, 1, generator=generator).exp()


@pytest.mark.parametrize(
    ("nbits", "share", "group_size"), list(itertools.product((2, 3, 4), (0.125, 0.25, 0.5), (16, 32)))
)
def test_the_widest_rows_get_two_more_bits(nbits, share, group_size):
    rows = keys(2, 3, 4)
    spec = QuantSpec(nbits=nbits, group_size=group_size, promoted=share)
    quantizer = PromotedQuantizer(spec)
    groups = quantizer.quantize(rows)
    assert groups.promoted.shape == (2, 3, 4, int(share * D)) and groups.promoted.dtype == torch.uint8
    ranges = rows.unflatten(-1, (-1, group_size))
    ranges = ranges.amax(-1) - ranges.amin(-1)
    widest = ranges.amax(-1)
    for index in itertools.product(range(2), range(3), range(4)):
        chosen = torch.zeros(D, dtype=torch.bool)
        chosen[groups.promoted[index].long()] = True
        assert widest[index][chosen].min() >= widest[index][~chosen].max()
        half_steps = ranges[index] / torch.where(chosen, 2 ** (nbits + 2) - 1, 2**nbits - 1)[:, None] / 2
        error = (quantizer.dequantize(groups)[index] - rows[index]).abs().unflatten(-1, (-1, group_size)).amax(-1)
        assert (error <= 1.05 * half_steps + 1e-6).all()
        assert groups.codes[index][~chosen].max() < 2**nbits <= groups.codes[index][chosen].max() < 2 ** (nbits + 2)
    plain = AffineQuantizer(QuantSpec(nbits=nbits, group_size=group_size))
    lost = (plain.dequantize(plain.quantize(rows)) - rows).square().sum()
    assert (quantizer.dequantize(groups) - rows).square().sum() < 0.4 * lost


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("offset", "width"), [(0, 32), (0, 16), (8, 20)])
def test_rotary_pairs_stay_together(pairing, offset, width):
    rotation = KeyRotation(torch.ones(width // 2), D, offset, pairing)
    partners = rotation.partners()
    assert torch.equal(partners[partners], torch.arange(D))
    unrotated = [c for c in range(D) if not offset <= c < offset + width]
    assert partners[unrotated].tolist() == unrotated
    rows = keys(2, 3, 4)
    groups = PromotedQuantizer(QuantSpec(nbits=2, promoted=0.25), partners).quantize(rows)
    chosen = torch.zeros(2, 3, 4, D, dtype=torch.bool).scatter_(-1, groups.promoted.long(), True)
    apart = chosen ^ chosen[..., partners]
    # An odd number of unrotated channels may leave one channel of the last pair out.
    assert (apart.sum(-1) <= (0 if width == D else 2)).all()
    # The rotation moves one channel of a pair onto the other: partners are what it mixes.
    cos, sin = rotation.tables(torch.tensor([1]))
    mixed = rotation.apply(torch.eye(D), cos, sin) != 0
    assert all(mixed[c, partners[c]] for c in range(offset, offset + width))


def test_ranges_may_be_fitted_to_other_rows():
    rows, other = keys(1, 2, 1), keys(1, 2, 1, seed=1)
    spec = QuantSpec(nbits=2, promoted=0.25)
    fitted = PromotedQuantizer(spec).quantize(rows, other)
    own = PromotedQuantizer(spec).quantize(other)
    assert torch.equal(fitted.promoted, own.promoted) and torch.equal(fitted.scale, own.scale)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e5, 3e38])
def test_constant_rows_stay_exact(value):
    rows = torch.full((1, 1, 2, D, L), value)
    quantizer = PromotedQuantizer(QuantSpec(nbits=2, promoted=0.25))
    torch.testing.assert_close(quantizer.dequantize(quantizer.quantize(rows)), rows)


def test_huge_and_undefined_numbers_do_not_spread():
    rows = keys(1, 1, 3)
    rows[0, 0, 0, 5, 7] = 1e30
    rows[0, 0, 1, 5, 7] = float("nan")
    quantizer = PromotedQuantizer(QuantSpec(nbits=2, promoted=0.25), torch.arange(D).roll(16))
    values = quantizer.dequantize(quantizer.quantize(rows))
    others = [c for c in range(D) if c != 5]
    assert torch.isfinite(values[0, 0, :, others]).all()
    step = (rows[0, 0, 0, others].amax(-1) - rows[0, 0, 0, others].amin(-1)) / 3
    assert ((values - rows)[0, 0, 0, others].abs().amax(-1) <= 0.51 * step + 1e-6).all()


def test_stores_give_back_what_the_quantizer_made():
    spec = QuantSpec(nbits=3, promoted=0.25)
    store = BlockStore(spec, L, D, torch.float32)
    blocks = keys(2, 3, 5).transpose(-1, -2).contiguous()
    for part in blocks.split(2, dim=2):
        store.append(store.encode(part))
    quantizer = PromotedQuantizer(spec)
    want = quantizer.dequantize(quantizer.quantize(blocks.transpose(-1, -2))).transpose(-1, -2)
    assert torch.equal(store.read(0, 5), want)
    parts = store.bytes_by_part()
    assert parts["codes"] == 2 * 3 * 5 * (D * L * 3 + 8 * L * 2) // 8
    assert parts["scales"] == 2 * 3 * 5 * (2 * D + 8)
    bits = 8 * (parts["codes"] + parts["scales"] + parts["zero_points"]) / blocks.numel()
    assert bits == spec.bits_per_value(D)
    again = BlockStore(spec, L, D, torch.float32)
    again.load_state(store.state())
    assert torch.equal(again.read(1, 4), want[:, :, 1:4])


@pytest.mark.parametrize("head_dim", [256, 258, 512, 576])
def test_heads_of_any_size_promote_their_widest_channels(head_dim):
    """Latents of DeepSeek's models have 512 channels: their numbers need more than a byte."""
    spec = QuantSpec(nbits=2, promoted=0.25)
    states = torch.randn(2, 3, 5, L, head_dim, generator=torch.Generator().manual_seed(0))
    wide = torch.arange(head_dim - spec.num_promoted(head_dim), head_dim)
    states[..., wide] *= 50
    store = BlockStore(spec, L, head_dim, torch.float32)
    for part in states.split(2, dim=2):
        store.append(store.encode(part))
    state = store.state()
    assert torch.equal(state["promoted"].long(), wide.expand(2, 3, 5, -1))
    parts = store.bytes_by_part()
    bits = 8 * (parts["codes"] + parts["scales"] + parts["zero_points"]) / states.numel()
    assert bits == pytest.approx(spec.bits_per_value(head_dim), abs=1e-12)
    off = (store.read(0, 5) - states).abs()
    ranges = states.amax(-2) - states.amin(-2)
    half_steps = (ranges / torch.where(torch.arange(head_dim) >= wide[0], 15, 3) / 2)[..., None, :]
    assert (off <= 1.05 * half_steps + 1e-6).all()
    again = BlockStore(spec, L, head_dim, torch.float32)
    again.load_state(state)
    assert torch.equal(again.read(0, 5), store.read(0, 5))
    dtype = torch.uint8 if head_dim > 256 else torch.int16
    with pytest.raises(ValueError, match=r"stored `promoted` must be of torch\.(int16|uint8), got"):
        again.load_state(state | {"promoted": state["promoted"].to(dtype)})


def test_damaged_channel_numbers_are_named():
    spec = QuantSpec(nbits=2, promoted=0.25)
    store = BlockStore(spec, L, D, torch.float32)
    store.append(store.encode(keys(1, 1, 2).transpose(-1, -2).contiguous()))
    for bad in (torch.full_like(store.state()["promoted"], D), store.state()["promoted"].flip(-1)):
        with pytest.raises(ValueError, match="ascending channels below 32"):
            BlockStore(spec, L, D, torch.float32).load_state(store.state() | {"promoted": bad})
    state = store.state()
    del state["extra"]
    with pytest.raises(ValueError, match="must have the tensors"):
        BlockStore(spec, L, D, torch.float32).load_state(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"promoted": 0.3}, "`promoted` must be one of"),
        ({"promoted": 0.25, "granularity": "per_token"}, "`granularity` is one of"),
        ({"promoted": 0.25, "symmetric": True}, "`symmetric` is one of"),
        ({"promoted": 0.25, "method": "variance_normalized"}, "`method` is one of"),
        ({"promoted": True}, "`promoted` must be one of"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        QuantSpec(**changes)
    assert QuantSpec(promoted=0).promoted == 0.0


def test_codes_of_8_bits_have_none_promoted():
    """So that one layer of a preset may get wider keys without another setting."""
    spec = QuantSpec(8, promoted=0.25)
    assert not spec.promotes and spec.num_promoted(D) == 0 and spec.bits_per_value(D) == QuantSpec(8).bits_per_value(D)
    plain, same = (BlockStore(s, L, D, torch.float32) for s in (QuantSpec(8), spec))
    for store in (plain, same):
        store.append(store.encode(keys(1, 1, 2).transpose(-1, -2).contiguous()))
    assert set(plain.state()) == set(same.state()) and torch.equal(plain.read(0, 2), same.read(0, 2))
    assert str(spec) == str(QuantSpec(8))


# ---- in a cache --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def test_caches_hold_what_they_report_and_come_back_from_files(model, tmp_path):
    ids = torch.randint(1, 128, (2, 90), generator=torch.Generator().manual_seed(0))
    cache = QuantCache(model.config, QUANT)
    fed(model, cache, ids, 13)
    report, head_dim = cache.memory_report(), model.config.head_dim
    nominal = KVQuantConfig.from_dict(QUANT).nominal_bits(head_dim)
    assert report.bits_per_value_quantized == pytest.approx(nominal)
    cache.save(tmp_path)
    back = QuantCache.load(tmp_path, model.config)
    more = ids.flip(1)[:, :40]
    assert torch.equal(fed(model, back, more, 9), fed(model, cache, more, 9))
    assert "25.0% of channels 4-bit" in repr(cache)


def test_contents_do_not_depend_on_the_cuts(model):
    states = torch.randn(2, 2, 120, model.config.head_dim, generator=torch.Generator().manual_seed(0))
    held = []
    for cut in (120, 1, 17):
        cache = QuantCache(model.config, QUANT)
        for piece in states.split(cut, dim=2):
            cache.update(piece, piece, 0)
        cache.batch_repeat_interleave(2)
        cache.crop(-10)
        cache.batch_select_indices(torch.tensor([2, 1]))
        held.append(cache.dequantize(0)[0])
    assert torch.equal(held[0], held[1]) and torch.equal(held[0], held[2])


def test_promotion_pays_on_keys_with_wide_channels(model):
    states = torch.randn(1, 2, 200, model.config.head_dim, generator=torch.Generator().manual_seed(0))
    states[..., ::5] *= 10
    errors = {}
    for share in (0.0, 0.25):
        cache = QuantCache(model.config, QUANT | {"key": {**QUANT["key"], "promoted": share, "rope": "post"}})
        cache.update(states, states, 0)
        errors[share] = (cache.dequantize(0)[0] - states).square().sum()
    assert errors[0.25] < 0.2 * errors[0.0]


# ---- the compiled code -------------------------------------------------------------------------------------------


SPECS = [
    QuantSpec(nbits, group_size=group_size, promoted=share, rotation=rotation, rope="post")
    for nbits, group_size, share, rotation in itertools.product(
        (2, 3, 4), (16, 32, 64, 128), (0.125, 0.25, 0.5), ("none", "hadamard")
    )
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_compiled_blocks_are_those_of_the_quantizer(spec):
    for head_dim, dtype, length in ((16, torch.float32, 128), (80, torch.bfloat16, 0), (64, torch.float16, 0)):
        length = max(length, spec.group_size)
        generator = torch.Generator().manual_seed(head_dim)
        states = torch.randn(2, 3, 2 * length, head_dim, generator=generator)
        states = (states * torch.randn(2, 3, 1, head_dim, generator=generator).exp()).to(dtype)
        moment = torch.randn(3, head_dim, head_dim, generator=generator)
        feedback = 0.2 * moment.tril(-1)
        for partners, used in ((None, None), (torch.arange(head_dim).roll(head_dim // 2), feedback)):
            store = BlockStore(spec, length, head_dim, dtype, feedback=used, partners=partners)
            want = store.encode(states.reshape(2, 3, 2, length, head_dim).float())
            got = cpu.encode(spec, states, length, feedback=used, partners=partners)
            for name in ("promoted", "scale", "zero_point", "codes", "extra"):
                assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_compiled_blocks_with_rope_and_other_ranges():
    rotation = KeyRotation(1 / 1e4 ** (torch.arange(D // 2) / (D // 2)), D)
    spec = QuantSpec(2, promoted=0.25)
    states = keys(2, 3, 3).transpose(-1, -2).flatten(2, 3)
    cos, sin = rotation.block_tables(4 + 5 * L, 3, L, states.device)
    blocks = rotation.apply(states.reshape(2, 3, 3, L, D), cos, sin, inverse=True)
    store = BlockStore(spec, L, D, torch.float32, partners=rotation.partners())
    want = store.encode(blocks)
    got = cpu.encode(spec, states, L, rotation, num_sinks=4, first_block=5, partners=rotation.partners())
    assert torch.equal(got.codes, want.codes) and torch.equal(got.extra, want.extra)
    fitted = keys(2, 3, 3, seed=5).transpose(-1, -2).contiguous()
    want = store.encode(blocks, fitted)
    got = cpu.encode(spec, blocks.flatten(2, 3), L, fitted=fitted, partners=rotation.partners())
    assert torch.equal(got.codes, want.codes) and torch.equal(got.promoted, want.promoted)


def test_clipped_promotion_is_left_to_the_quantizer():
    spec = QuantSpec(2, promoted=0.25, clip="mse")
    assert not cpu.can_encode(spec, torch.float32, torch.device("cpu"), L, D)
    assert cpu.can_encode(QuantSpec(2, promoted=0.25), torch.float32, torch.device("cpu"), L, D)


def test_bytes_that_are_held_are_bytes_that_are_reported(model):
    """The check of the acceptance tests, with promoted channels."""
    cache = QuantCache(model.config, QUANT)
    fed(model, cache, torch.randint(1, 128, (2, 90), generator=torch.Generator().manual_seed(0)), 13)
    assert_reported_bytes(cache)
