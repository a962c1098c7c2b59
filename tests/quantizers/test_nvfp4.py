"""Scales of e4m3 for codes of e2m1: what is stored, bounds, tiny and empty groups, what blocks depend on, files."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvquant_hf import KVQuantConfig, QuantSpec
from kvquant_hf.quantizers import CodebookQuantizer, MicroscaledQuantizer, quantizer_of
from kvquant_hf.storage import BlockStore
from tests.quantizers.cuts import assert_cuts_change_nothing
from tests.quantizers.stores import counted_store

D, L = 64, 32
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SMALLEST = 2.0**-9 / 448  # scale, over the largest one


def spec_of(**changes) -> QuantSpec:
    plain = {"levels": "e2m1", "symmetric": True, "granularity": "per_token", "group_size": 16, "metadata_nbits": 8}
    return QuantSpec(**plain | changes)


def rows_of(*lead: int, length: int = D, seed: int = 0) -> torch.Tensor:
    """Rows `[..., L, length]` of different widths."""
    generator = torch.Generator().manual_seed(seed)
    width = (0.7 * torch.randn(*lead, L, 1, generator=generator)).exp()
    return width * torch.randn(*lead, L, length, generator=generator)


def round_trip(rows: torch.Tensor, spec: QuantSpec, range_rows: torch.Tensor | None = None):
    """Values, groups, and the scales that their bytes stand for."""
    quantizer = quantizer_of(spec)
    assert isinstance(quantizer, MicroscaledQuantizer)
    groups = quantizer.quantize(rows, range_rows)
    assert groups.codes.dtype == groups.scale.dtype == torch.uint8
    assert int(groups.codes.max()) < 16 and int(groups.scale.max()) <= 0x7E and groups.zero_point is None
    assert groups.scale.shape == (*rows.shape[:-1], -(-rows.shape[-1] // spec.group_size))
    assert groups.second_level.shape == (*rows.shape[:-2], 1)
    return quantizer.dequantize(groups), groups, quantizer.expanded(groups)


def each_element(scale: torch.Tensor, size: int, length: int) -> torch.Tensor:
    return scale.repeat_interleave(size, -1)[..., :length]


# ---- what is stored ----------------------------------------------------------------------------------------------


def test_scales_and_codes_are_those_of_nvfp4():
    rows = rows_of(2, 3)
    values, groups, scale = round_trip(rows, spec_of())
    parts = rows.unflatten(-1, (-1, 16))
    needed = parts.abs().amax(-1) / 6
    base = needed.amax((-1, -2), keepdim=True).half()
    assert torch.equal(groups.second_level, base[..., 0])
    byte = (needed / base.float() * 448).to(torch.float8_e4m3fn)
    assert torch.equal(groups.scale, byte.view(torch.uint8))
    assert (groups.scale.amax((-1, -2)) == 0x7E).all()
    torch.testing.assert_close(scale, byte.float() / 448 * base.float(), rtol=1e-6, atol=0)
    # Bits of the nearest number of the format, against the scale as stored.
    over = (parts / scale[..., None]).abs()
    nearest = (over[..., None] - LEVELS).abs().argmin(-1)
    codes = groups.codes.unflatten(-1, (-1, 16))
    assert torch.equal(codes & 7, nearest.to(torch.uint8))
    assert torch.equal((codes >> 3)[nearest > 0].bool(), (parts < 0)[nearest > 0])
    signed = torch.where(parts < 0, -LEVELS[nearest], LEVELS[nearest])
    assert torch.equal(values, (signed * scale[..., None]).flatten(-2))


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize(("group_size", "length"), list(itertools.product((16, 32, 128), (1, 15, 16, 17, 63, 200))))
def test_errors_are_within_half_the_gap_between_levels(group_size, length, clip):
    rows = rows_of(3, length=length)
    spec = spec_of(group_size=group_size, clip=clip)
    values, _, scale = round_trip(rows, spec)
    scale = each_element(scale, group_size, length)
    over = (rows / scale).abs()
    at = torch.searchsorted(LEVELS, over.contiguous()).clamp(1, 7)
    half_gap = (LEVELS[at] - LEVELS[at - 1]) / 2
    inside = over <= 6
    assert ((values - rows).abs() <= 1.001 * half_gap * scale)[inside].all()
    assert torch.equal(values[~inside].abs(), (6 * scale)[~inside])
    if clip == "minmax":
        assert ((values - rows).abs() <= 1.001 * scale).all()
        needed = torch.cat(
            [part.abs().amax(-1, keepdim=True).expand_as(part) for part in rows.split(group_size, -1)], -1
        )
        torch.testing.assert_close(scale, needed / 6, rtol=1 / 15, atol=0)


def test_scales_of_half_the_bits_cost_little():
    rows = rows_of(8)
    for clip in ("minmax", "mse"):
        wide = quantizer_of(spec_of(metadata_nbits=16, clip=clip))
        assert isinstance(wide, CodebookQuantizer) and not isinstance(wide, MicroscaledQuantizer)
        lost = (wide.dequantize(wide.quantize(rows)) - rows).square().sum()
        values, *_ = round_trip(rows, spec_of(clip=clip))
        assert (values - rows).square().sum() < 1.06 * lost


@pytest.mark.parametrize("length", [64, 72])
def test_clipped_scales_are_chosen_by_the_error_of_what_is_stored(length):
    rows = rows_of(4, length=length)
    rows[..., -1] *= 3  # what a short group is filled up with
    errors = []
    for clip in ("minmax", "mse"):
        values, *_ = round_trip(rows, spec_of(clip=clip))
        errors.append(torch.stack([part.sum(-1) for part in (values - rows).square().split(16, -1)]))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert errors[1].sum() < 0.9 * errors[0].sum()


# ---- groups far smaller than the largest of their block, and empty ones ------------------------------------------


def test_groups_of_any_size_are_off_by_a_stored_scale_at_most():
    """Down to where e4m3 has no digits left, and beyond."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 1500, 16, generator=generator) * 2.0 ** torch.linspace(0, -30, 1500)[:, None]
    values, groups, scale = round_trip(rows, spec_of())
    needed = rows.abs().amax(-1, keepdim=True) / 6
    assert set(range(1, 4)) <= set(groups.scale.unique().tolist())
    assert ((values - rows).abs() <= 1.001 * scale).all()
    base = groups.second_level.float().item()
    normal = needed >= base * 2.0**-6 / 448
    assert (scale <= needed * 1.0667)[normal].all()
    # Where digits are missing, the scale is at most a step of theirs above what the group needs.
    assert (scale <= (needed + base * SMALLEST) * 1.001)[~normal].all() and (~normal).sum() > 400


def test_groups_below_the_smallest_scale_keep_what_it_can_say():
    rows = rows_of(1)
    rows[0, 5] = 0.0
    rows[0, 5, :16] = rows.abs().amax()
    smallest = (rows.abs().amax() / 6).half().float() * SMALLEST
    steps = torch.tensor([0.2, 0.24, 0.26, 0.7, 0.8, 1.2, -0.2, -0.26, -0.4, -0.9, -1.3, 1.9, 0.0, 1e-6, 0.5, -0.5])
    rows[0, 5, 16:32] = steps * smallest  # it would need a scale of a third of the smallest
    rows[0, 5, 32] = 1e-3 * smallest
    values, groups, scale = round_trip(rows, spec_of())
    assert groups.scale[0, 5].tolist() == [0x7E, 1, 1, 0]
    assert (scale[0, 5, 1:3] - smallest).abs().max() < 1e-6 * smallest
    expected = [0, 0, 0.5, 0.5, 1, 1, 0, -0.5, -0.5, -1, -1.5, 2, 0, 0, 0.5, -0.5]
    torch.testing.assert_close(values[0, 5, 16:32] / smallest, torch.tensor(expected), rtol=1e-5, atol=0)
    assert (values[0, 5, 32:] == 0).all()
    assert ((values - rows)[0, 5, 16:].abs() <= 0.2501 * smallest).all()


@pytest.mark.parametrize("clip", ["minmax", "mse"])
def test_zeros_come_back_as_zeros(clip):
    rows = rows_of(2)
    rows[0, 3, 16:32] = 0.0
    rows[1] = 0.0
    values, groups, _ = round_trip(rows, spec_of(clip=clip))
    assert (values[0, 3, 16:32] == 0).all() and (values[1] == 0).all()
    assert groups.scale[0, 3, 1] == 0 and (groups.second_level[1] == 0).all()
    assert groups.second_level.dtype == torch.float16


@pytest.mark.parametrize("value", [1.0, -0.37, 300.0, 6e-4, -1e4, 3e38, 1e-30])
@pytest.mark.parametrize("clip", ["minmax", "mse"])
def test_blocks_of_one_number_come_back_to_the_precision_of_their_base(value, clip):
    rows = torch.full((2, L, 40), value)
    values, *_ = round_trip(rows, spec_of(clip=clip))
    torch.testing.assert_close(values, rows, rtol=2**-10, atol=0)


# ---- any input ---------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    exponent=st.integers(-44, 38),
    spread=st.floats(0, 12),
    offset=st.floats(-(2.0**127), 2.0**127, width=32),
    clip=st.sampled_from(["minmax", "mse"]),
    length=st.sampled_from([16, 40]),
    seed=st.integers(0, 2**16),
)
@example(exponent=38, spread=0.0, offset=0.0, clip="mse", length=40, seed=0)
@example(exponent=-44, spread=0.0, offset=0.0, clip="mse", length=16, seed=0)
def test_any_finite_input_gives_finite_parameters_and_values(exponent, spread, offset, clip, length, seed):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, 24, length, generator=generator)
    noise = noise * (spread * torch.randn(1, 24, 1, generator=generator)).exp()
    largest = torch.finfo(torch.float32).max
    rows = (noise.double() * 10.0**exponent + offset).clamp(-largest, largest).float()
    for fitted in (None, 0.01 * rows.roll(1, 1), torch.zeros_like(rows)):
        values, groups, scale = round_trip(rows, spec_of(clip=clip), fitted)
        for part in (groups.second_level, scale, values):
            assert torch.isfinite(part).all()
        if fitted is None and clip == "minmax":
            scale = each_element(scale, 16, length).double()
            assert ((values.double() - rows.double()).abs() <= 1.001 * scale + 1e-37).all()


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_undefined_numbers_do_not_spread(number, clip):
    rows = rows_of(1)
    rows[0, 5, 7] = number
    values, *_ = round_trip(rows, spec_of(clip=clip))
    others = torch.ones_like(rows, dtype=torch.bool)
    others[0, 5, :16] = False
    plain, *_ = round_trip(rows[:, [row for row in range(L) if row != 5]], spec_of(clip=clip))
    bound = 1.1 * (plain - rows[:, [row for row in range(L) if row != 5]]).abs().amax()
    assert ((values - rows).abs()[others] <= bound).all()


# ---- what a block depends on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("size", [1.0, 1e6, 1e-7])
def test_a_block_depends_neither_on_its_neighbours_nor_on_its_place_in_memory(clip, size):
    rows = rows_of(2, 3, 4, length=72)
    rows[:, :, 2] *= size  # numbers whose base float16 does not hold
    spec = spec_of(clip=clip)
    values, whole, _ = round_trip(rows, spec)
    scattered = torch.empty(72, 4, 2, L, 3).permute(2, 4, 1, 3, 0).copy_(rows)
    other_values, other, _ = round_trip(scattered, spec)
    parts = [round_trip(rows[:, :, i : i + 1], spec) for i in range(4)]
    assert torch.equal(values, other_values) and torch.equal(values, torch.cat([part[0] for part in parts], 2))
    for name in ("codes", "scale", "second_level"):
        alone = torch.cat([getattr(part[1], name).to(getattr(whole, name).dtype) for part in parts], 2)
        assert torch.equal(getattr(whole, name), getattr(other, name)), name
        assert torch.equal(getattr(whole, name), alone), name
    assert (whole.second_level.dtype == torch.float32) == (size != 1)


@pytest.mark.parametrize("padding", [None, [37, 2]])
@pytest.mark.parametrize("key", [{}, {"granularity": "per_channel", "clip": "mse", "group_size": 32}], ids=str)
def test_the_cache_holds_the_same_however_calls_cut_the_tokens(key, padding):
    config = KVQuantConfig(residual_length=16).replace(key=vars(spec_of(**key)), value=vars(spec_of()))
    states = torch.randn(2, 2, 350, 2, 32, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    states[..., 200, :] *= 1e6
    assert_cuts_change_nothing(config, states, [5, 200, 1, 144], padding)


def test_scales_may_be_fitted_to_other_rows():
    clean = rows_of(3)
    rows = clean.clone()
    rows[..., :4] = 1000.0
    _, fitted, scale = round_trip(rows, spec_of(), clean)
    _, plain, _ = round_trip(clean, spec_of())
    assert torch.equal(fitted.scale, plain.scale) and torch.equal(fitted.second_level, plain.second_level)
    assert torch.equal(fitted.codes[..., 4:], plain.codes[..., 4:])
    assert (fitted.codes[..., :4] == 7).all() and torch.isfinite(scale).all()


def test_query_moments_serve_keys_with_such_scales():
    """Row after row against the stated rule, and no change without feedback."""
    rows = torch.randn(1, 2, 3, 8, 32, generator=torch.Generator().manual_seed(0))
    feedback = 0.3 * torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)).tril(-1)
    quantizer = quantizer_of(spec_of(granularity="per_channel"))
    plain, fed_groups = quantizer.quantize(rows), quantizer.quantize(rows, feedback=feedback)
    assert torch.equal(plain.scale, fed_groups.scale) and torch.equal(plain.second_level, fed_groups.second_level)
    assert not torch.equal(plain.codes, fed_groups.codes)
    assert torch.equal(quantizer.quantize(rows, feedback=torch.zeros(2, 8, 8)).codes, plain.codes)
    values, scale = quantizer.dequantize(fed_groups), quantizer.expanded(fed_groups)
    error = values - rows
    options = torch.cat([LEVELS, -LEVELS])[:, None, None]
    for head, row in itertools.product(range(2), range(8)):
        target = rows[0, head, :, row] - torch.einsum("j,njl->nl", feedback[head, :, row], error[0, head])
        step = each_element(scale[0, head, :, row], 16, 32)
        distance = (options * step - target).abs().amin(0)
        assert ((values[0, head, :, row] - target).abs() <= distance + 1e-5).all()


# ---- settings and stores -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"symmetric": False}, r"`symmetric` must be one of \(True,\) with `levels='e2m1'` and `metadata_nbits=8`"),
        ({"levels": "gaussian"}, r"`metadata_nbits` must be 16 unless `levels` is one of \('uniform', 'e2m1'\)"),
        ({"levels": "e4m3", "nbits": 8}, r"`metadata_nbits` must be 16 unless `levels` is one of"),
        ({"nbits": 3}, r"`nbits` must be one of \(4,\) with `levels='e2m1'`"),
        ({"outliers": 0.01}, r"`metadata_nbits` must be 16 unless `outliers` is one of \(0\.0,\)"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        spec_of(**changes)


def test_bits_are_those_of_nvfp4_and_a_number_of_a_block_and_head():
    spec = KVQuantConfig.from_preset("nvfp4").key
    assert spec == spec_of(rope="post")
    for head_dim, length in itertools.product((64, 128), (32, 128)):
        assert spec.bits_per_value(head_dim, length) == 4.5 + 16 / (head_dim * length)
    assert replace(spec, metadata_nbits=16).bits_per_value(64) == 5.0
    assert "8-bit metadata" in str(spec)


@pytest.mark.parametrize("granularity", ["per_token", "per_channel"])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_every_byte_is_counted_and_earlier_values_stay(granularity, head_dim):
    spec = spec_of(granularity=granularity)
    store, block = counted_store(spec, L, head_dim)
    before = store.read(0, 4).clone()
    store.append(store.encode(1e6 * block))
    assert store.second_level.dtype == torch.float32 and torch.equal(store.read(0, 4), before)
    again = BlockStore(spec, L, head_dim, torch.float32)
    again.load_state(store.state())
    assert torch.equal(again.read(1, 5), store.read(1, 5))
    broken = store.state()
    broken["second_level"] = broken["second_level"].expand(-1, -1, -1, 2)
    with pytest.raises(ValueError, match="stored `second_level` must have the shape"):
        again.load_state(broken)
