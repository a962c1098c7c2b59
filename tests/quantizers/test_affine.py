"""The affine quantizer: bounds, exactness, stored parameters, clipping."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.quantizers import QUANTIZERS, quantizer_of
from kvquant_hf.quantizers.affine import AffineQuantizer, rounded_half
from kvquant_hf.spec import QuantSpec
from tests.quantizers.cuts import assert_cuts_change_nothing

NBITS = (2, 3, 4, 8)
GROUPS = (16, 32, 64, 128)


def round_trip(rows: torch.Tensor, **settings) -> tuple[torch.Tensor, object]:
    quantizer = AffineQuantizer(QuantSpec(**settings))
    groups = quantizer.quantize(rows)
    assert int(groups.codes.max()) < 2 ** settings["nbits"]
    return quantizer.dequantize(groups), groups


# Groups of `innerq` have bounds of their own, see test_innerq.py; `turboquant` and its variant have no uniform levels.
@pytest.mark.parametrize("name", sorted(set(QUANTIZERS) - {"innerq", "turboquant", "turboquant_prod"}))
@pytest.mark.parametrize(
    ("nbits", "group_size", "length"), list(itertools.product(NBITS, GROUPS, (16, 63, 64, 128, 200)))
)
def test_error_is_within_half_a_step(name, nbits, group_size, length):
    torch.manual_seed(0)
    rows = torch.randn(2, 3, length)
    spec = QuantSpec(nbits=nbits, group_size=group_size, method=name)
    quantizer = QUANTIZERS[name](spec)
    groups = quantizer.quantize(rows)
    values = quantizer.dequantize(groups)
    assert (groups.factor is not None) == spec.has_factor
    if groups.factor is not None:  # ranges, and errors, are those of the rows over their factors
        rows, values = (t / groups.factor.float()[:, None, :] for t in (rows, values))
    assert groups.scale.dtype == torch.float16
    assert groups.scale.shape == (2, 3, -(-length // group_size))
    for first in range(0, length, group_size):
        x, y = (t[..., first : first + group_size] for t in (rows, values))
        half_step = (x.amax(-1) - x.amin(-1)) / (2**nbits - 1) / 2
        assert ((x - y).abs().amax(-1) <= 1.05 * half_step + 1e-6).all()


@pytest.mark.parametrize("nbits", NBITS)
def test_symmetric_codes_lie_evenly_about_zero_within_the_bound(nbits):
    torch.manual_seed(0)
    rows = torch.randn(64, 64)
    rows[0] = 0
    values, groups = round_trip(rows, nbits=nbits, symmetric=True)
    assert groups.zero_point is None
    assert (values[0] == 0).all()
    step = groups.scale.float().repeat_interleave(32, -1)[1:]
    odd = 2 * values[1:] / step
    assert torch.equal(odd.round(), odd)
    assert (odd % 2 == 1).all()
    assert len(groups.codes[1:].unique()) == 2**nbits or nbits == 8
    half_step = rows.reshape(64, 2, 32).abs().amax(-1) / (2**nbits - 1)
    assert ((rows - values).abs().reshape(64, 2, 32).amax(-1) <= 1.01 * half_step).all()
    mirrored, _ = round_trip(-rows, nbits=nbits, symmetric=True)
    torch.testing.assert_close(mirrored, -values)


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 300.0, 6e-4, -1e4])
def test_constant_group_of_a_half_type_is_exact(clip, nbits, dtype, value):
    rows = torch.full((3, 32), value, dtype=dtype).float()
    assert torch.equal(round_trip(rows, nbits=nbits, clip=clip)[0], rows)


@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("value", [0.1, -0.1, 3.3333, 1234.567, -9e4, 1e-9, 1e-30, 3e38])
def test_constant_group_in_float32_is_exact_to_half_a_step_of_one_float16_spacing(nbits, value):
    rows = torch.full((3, 32), value)
    values, _ = round_trip(rows, nbits=nbits)
    torch.testing.assert_close(values, rows, rtol=2**-11 / (2**nbits - 1), atol=2**-24)


@pytest.mark.parametrize("nbits", NBITS)
def test_every_code_is_used_and_a_ramp_comes_back(nbits):
    ramp = torch.arange(2**nbits).float().repeat(-(-128 // 2**nbits))[:256][None]
    values, groups = round_trip(ramp, nbits=nbits, group_size=128)
    if nbits < 8:
        assert torch.equal(values, ramp)
        assert set(groups.codes.unique().tolist()) == set(range(2**nbits))
    else:
        torch.testing.assert_close(values, ramp, rtol=0, atol=0.27)


@settings(max_examples=300, deadline=None)
@given(
    exponent=st.integers(-30, 38),
    offset=st.floats(-(2.0**126), 2.0**126, width=32),
    nbits=st.sampled_from(NBITS),
    clip=st.sampled_from(["minmax", "mse"]),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**16),
)
@example(exponent=38, offset=0.0, nbits=2, clip="minmax", symmetric=False, seed=0)
@example(exponent=0, offset=515.0, nbits=2, clip="minmax", symmetric=False, seed=0)
def test_any_finite_input_gives_finite_parameters_and_values(exponent, offset, nbits, clip, symmetric, seed):
    noise = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3)
    rows = (noise.double() * 10.0**exponent + offset).clamp(-3.4e38, 3.4e38).float()
    values, groups = round_trip(rows, nbits=nbits, clip=clip, symmetric=symmetric)
    assert torch.isfinite(groups.scale).all()
    assert groups.zero_point is None or torch.isfinite(groups.zero_point).all()
    assert torch.isfinite(values).all()
    if clip == "minmax" and not symmetric:
        # The stored zero point is the nearest number of its type that is not above the minimum.
        zero_point = groups.zero_point[..., 0]
        low, high = rows.double().amin(-1), rows.double().amax(-1)
        with np.errstate(over="ignore"):
            above = torch.from_numpy(np.nextafter(zero_point.numpy(), zero_point.numpy().dtype.type(np.inf)))
        assert (zero_point.double() <= low).all() and (above.double() > low).all()
        # From there, steps reach the maximum; a scale is stored rounded up, by one part in 1024 or 2**-24.
        step = (high - zero_point.double()) / (2**nbits - 1) * (1 + 2**-10) + 2**-24
        error = (rows.double() - values.double()).abs().amax(-1)
        assert (error <= 0.5 * step + 2e-6 * rows.double().abs().amax(-1)).all()


def test_parameters_widen_to_float32_where_float16_cannot_hold_them():
    wide = torch.randn(2, 32) * 1e5
    assert round_trip(wide, nbits=4)[1].scale.dtype == torch.float32
    small = torch.randn(2, 32) * 1e-6
    values, groups = round_trip(small, nbits=4)
    assert groups.scale.dtype == torch.float32
    assert (values - small).abs().max() < 4e-7


@pytest.mark.parametrize(("length", "group_size"), [(64, 128), (80, 64), (96, 128), (80, 128)])
def test_elements_of_a_short_group_weigh_alike_in_its_clipped_range(length, group_size):
    """What fills it up must not draw the range to itself: no more is lost than if the group had no other elements."""
    torch.manual_seed(0)
    rows = torch.randn(200, length)
    rest = rows[:, -(length % group_size) :]
    whole, _ = round_trip(rows, nbits=2, group_size=group_size, clip="mse")
    # Elements weigh all the same in a group that they fill a whole number of times.
    alone, _ = round_trip(rest.repeat(1, group_size), nbits=2, group_size=group_size, clip="mse")
    share = (whole[:, -rest.shape[1] :] - rest).square().sum() / (alone[:, : rest.shape[1]] - rest).square().sum()
    assert share < 1.03


@pytest.mark.parametrize("nbits", (2, 3, 4))
def test_mse_clip_never_has_more_squared_error_and_helps_with_an_outlier(nbits):
    torch.manual_seed(0)
    rows = torch.randn(64, 128)
    rows[:, 5] *= 4
    error = {
        clip: (round_trip(rows, nbits=nbits, group_size=128, clip=clip)[0] - rows).square().sum(-1)
        for clip in ("minmax", "mse")
    }
    assert (error["mse"] <= error["minmax"] + 1e-6).all()
    assert error["mse"].sum() < 0.9 * error["minmax"].sum()


def test_ranges_can_be_fitted_to_other_rows():
    torch.manual_seed(0)
    clean = torch.randn(3, 32)
    rows = clean.clone()
    rows[:, :4] = 100.0
    quantizer = AffineQuantizer(QuantSpec(nbits=4))
    fitted = quantizer.quantize(rows, clean)
    plain = quantizer.quantize(clean)
    assert torch.equal(fitted.scale, plain.scale)
    assert torch.equal(fitted.codes[:, 4:], plain.codes[:, 4:])
    assert (fitted.codes[:, :4] == 15).all()


def test_directed_rounding_is_the_nearest_float16_on_the_asked_side():
    torch.manual_seed(0)
    spread = torch.randn(20000) * 10 ** torch.empty(20000).uniform_(-9, 4)
    values = torch.cat([spread, torch.tensor([0.0, -0.0, 1e-12])])
    up, down = (rounded_half(values, up=side).double() for side in (True, False))
    assert (up >= values.double()).all()
    assert (down <= values.double()).all()
    exact = values.half().double() == values.double()
    assert torch.equal(up[exact], values.double()[exact])
    between = torch.nextafter(down.half(), torch.tensor(float("inf"), dtype=torch.float16)).double()
    assert torch.equal(up[~exact], between[~exact])


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize(("promoted", "symmetric"), [(0.0, False), (0.0, True), (0.25, False)])
def test_groups_that_need_float32_change_nothing_for_others(promoted, symmetric, clip):
    """What is stored of a block must not depend on the blocks that came with it."""
    quantizer = quantizer_of(QuantSpec(4, group_size=32, symmetric=symmetric, clip=clip, promoted=promoted))
    blocks = torch.randn(1, 1, 3, 16, 64, generator=torch.Generator().manual_seed(0))
    blocks[:, :, 1] *= 1e6
    blocks[:, :, 2] *= 1e-7
    whole, alone = quantizer.quantize(blocks), quantizer.quantize(blocks[:, :, :1])
    assert whole.scale.dtype == torch.float32 and alone.scale.dtype == torch.float16
    for name in ("codes", "scale", "zero_point"):
        part, expected = getattr(whole, name), getattr(alone, name)
        assert (part is None) == (expected is None)
        assert part is None or torch.equal(part[:, :, :1].float(), expected.float()), name


@pytest.mark.parametrize("padding", [None, [37, 2]])
def test_one_huge_token_changes_nothing_for_the_blocks_beside_its_own(padding):
    """Its block needs float32 parameters, in one call with others as alone."""
    states = torch.randn(2, 2, 150, 2, 32, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    states[..., 100, :] *= 1e6
    layer = assert_cuts_change_nothing(KVQuantConfig(residual_length=16), states, [5, 60, 1, 84], padding)
    assert layer.quantized_length == 128 and layer._block_stores()[0].scale.dtype == torch.float32
