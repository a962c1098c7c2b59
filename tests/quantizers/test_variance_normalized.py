"""The variance-normalized quantizer: its factors, what is exact, what stays finite, what blocks depend on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import decode_attention, triton
from kvquant_hf.quantizers import AffineQuantizer, VarianceNormalizedQuantizer
from kvquant_hf.quantizers.variance_normalized import column_factors
from kvquant_hf.spec import QuantSpec
from tests.quantizers.cuts import assert_cuts_change_nothing

METHOD = "variance_normalized"
NBITS = (2, 3, 4, 8)


def round_trip(tiles: torch.Tensor, range_tiles: torch.Tensor | None = None, **changes):
    quantizer = VarianceNormalizedQuantizer(QuantSpec(**({"group_size": 128, "method": METHOD} | changes)))
    groups = quantizer.quantize(tiles, range_tiles)
    assert groups.factor is not None and groups.factor.shape == (*tiles.shape[:-2], tiles.shape[-1])
    return quantizer.dequantize(groups), groups


def planted(rows: int = 64, length: int = 128, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles `[2, rows, length]` of noise between row and column factors, and the column factors."""
    generator = torch.Generator().manual_seed(seed)
    row, column = (torch.randn(2, n, generator=generator).exp() for n in (rows, length))
    noise = torch.randn(2, rows, length, generator=generator)
    return row[..., None] * noise * column[:, None, :], column


def test_planted_factors_are_found():
    tiles, column = planted()
    ratio = column_factors(tiles).float() / column
    assert ratio.log().std(-1).max() < 0.12  # 64 samples of a deviation: 9 %
    assert column.log().std(-1).min() > 0.8
    assert column_factors(tiles).median(-1).values.float().tolist() == [1, 1]


def test_rows_and_columns_end_with_equal_spread():
    tiles, _ = planted()
    even = tiles / column_factors(tiles).float()[:, None, :]
    even = even / even.std(-1, keepdim=True)
    assert (even.std(-2) / even.std(-2).mean() - 1).abs().max() < 0.01


@pytest.mark.parametrize(
    "changes", [{}, {"clip": "mse"}, {"symmetric": True}, {"group_size": 32}, {"centered": True}], ids=str
)
@pytest.mark.parametrize("nbits", NBITS)
def test_errors_relative_to_the_size_of_a_token_are_smaller_than_without_factors(nbits, changes):
    tiles, column = planted()
    method = METHOD if "centered" in changes else "affine"
    affine = AffineQuantizer(QuantSpec(**({"nbits": nbits, "group_size": 128, "method": method} | changes)))
    plain = affine.quantize(tiles)
    errors = [
        ((values - tiles) / column[:, None, :]).square().mean()
        for values in (
            round_trip(tiles, nbits=nbits, **changes)[0],
            affine.dequantize(plain),
        )
    ]
    assert errors[0] < (0.8 if nbits == 2 else 0.5) * errors[1]


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 300.0, 6e-4, -1e4])
def test_constant_tiles_of_a_half_type_are_exact(clip, dtype, value):
    tiles = torch.full((3, 48, 64), value, dtype=dtype).float()
    values, groups = round_trip(tiles, clip=clip)
    assert torch.equal(values, tiles)
    assert (groups.factor == 1).all()


@pytest.mark.parametrize("rows", [16, 80])
def test_tiles_of_constant_rows_are_exact(rows):
    """What a bias of the key projection leaves of a tile whose tokens are otherwise alike."""
    tiles = torch.randn(2, rows, 1).half().float().expand(-1, -1, 128)
    values, groups = round_trip(tiles, nbits=2)
    assert torch.equal(values, tiles)
    assert (groups.factor == 1).all()


@pytest.mark.parametrize("nbits", NBITS)
def test_a_constant_row_among_others_keeps_the_documented_bound(nbits):
    tiles, _ = planted()
    tiles[:, 5] = 3.0
    values, groups = round_trip(tiles, nbits=nbits)
    factor = groups.factor.float()
    spread = 3.0 / factor.amin(-1) - 3.0 / factor.amax(-1)
    bound = spread[:, None] / (2**nbits - 1) / 2 * factor
    error = (values[:, 5] - 3.0).abs()
    assert (error <= 1.01 * bound + 2e-3).all()
    assert error.max() > 0


def degenerate(name: str) -> torch.Tensor:
    tile = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    if name == "zeros":
        tile.zero_()
    elif name == "zero-rows":
        tile[::2] = 0
    elif name == "zero-columns":
        tile[:, 1::2] = 0
    elif name.startswith("one-entry"):
        tile.zero_()[3, 5] = float(name.removeprefix("one-entry-"))
    elif name.startswith("huge-entry"):
        tile[3, 5] = float(name.removeprefix("huge-entry-"))
    elif name == "huge-column":
        tile[:, 7] *= 1e9
    elif name == "huge-rows":
        tile[:2] *= 1e37
    elif name == "tiny":
        tile *= 1e-30
    elif name == "every-exponent":
        tile *= 10.0 ** torch.linspace(-37, 37, 64)[:, None]
    elif name == "every-exponent-along-columns":
        tile *= 10.0 ** torch.linspace(-37, 37, 128)
    elif name == "large-mean":
        tile = 1e4 + 1e-3 * tile
    return tile


@pytest.mark.parametrize(
    "changes",
    [{}, {"clip": "mse"}, {"symmetric": True}, {"centered": True}, {"centered": True, "clip": "mse"}],
    ids=str,
)
@pytest.mark.parametrize("along_rows", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "zeros",
        "zero-rows",
        "zero-columns",
        "one-entry-1e4",
        "one-entry-3e38",
        "huge-entry-1e6",
        "huge-entry-3e38",
        "huge-column",
        "huge-rows",
        "tiny",
        "every-exponent",
        "every-exponent-along-columns",
        "large-mean",
    ],
)
def test_degenerate_tiles_stay_finite_and_near(name, along_rows, changes):
    tile = degenerate(name)[None]
    tile = tile.mT.contiguous() if along_rows else tile
    values, groups = round_trip(tile, **changes)
    for part in (groups.scale, groups.zero_point, groups.factor, values):
        assert part is None or torch.isfinite(part).all()
    assert (groups.factor > 0).all()
    # Half a step of a row's range over its stored factors, in units of these; float32 rounds with the largest.
    factor = groups.factor.double()[:, None, :]
    center = torch.zeros(1)
    if "centered" in changes:
        center = groups.zero_point.double().repeat_interleave(128, -1)[..., : tile.shape[-1]]
    even = (tile.double() - center) / factor
    reach = (even.amax(-1) - even.amin(-1)).clamp_min(even.abs().amax(-1))[..., None]
    bound = reach * (0.3 if "clip" in changes else 1.1 / 15 if changes else 0.55 / 15)
    bound += 1e-6 * even.abs().amax() + 1e-7
    assert ((values.double() - tile.double()).abs() <= bound * factor + 2e-7 * center.abs()).all()


def test_a_column_beyond_the_reach_of_float16_leaves_the_others_their_digits():
    tile = degenerate("plain")[None]
    tile[:, :, 7] *= 1e5
    values, groups = round_trip(tile, nbits=8)
    assert groups.factor[0, 7] == 2**12
    others = torch.arange(128) != 7
    assert (values - tile)[..., others].abs().max() < 0.5


@settings(max_examples=100, deadline=None)
@given(
    exponent=st.integers(-30, 37),
    spread=st.floats(0, 12),
    offset=st.floats(-(2.0**120), 2.0**120, width=32),
    nbits=st.sampled_from(NBITS),
    clip=st.sampled_from(["minmax", "mse"]),
    centered=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_finite_input_gives_finite_parameters_and_values(exponent, spread, offset, nbits, clip, centered, seed):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, 24, 40, generator=generator) * (spread * torch.randn(1, 1, 40, generator=generator)).exp()
    tile = (noise.double() * 10.0**exponent + offset).clamp(-3.4e38, 3.4e38).float()
    values, groups = round_trip(tile, nbits=nbits, clip=clip, centered=centered)
    for part in (groups.scale, groups.zero_point, groups.factor, values):
        assert torch.isfinite(part).all()


@pytest.mark.parametrize("centered", [False, True])
def test_factors_and_ranges_are_fitted_to_other_rows_where_some_are_given(centered):
    clean, _ = planted()
    tiles = clean.clone()
    tiles[..., :7] = 1000.0  # pads
    _, fitted = round_trip(tiles, clean, centered=centered)
    _, plain = round_trip(clean, centered=centered)
    for name in ("scale", "zero_point", "factor"):
        assert torch.equal(getattr(fitted, name), getattr(plain, name))
    assert torch.equal(fitted.codes[..., 7:], plain.codes[..., 7:])


@pytest.mark.parametrize("changes", [{"clip": "mse"}, {"centered": True, "group_size": 32}], ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (80, 32), (63, 47)])
def test_a_tile_depends_neither_on_its_neighbours_nor_on_its_place_in_memory(shape, changes):
    tiles = torch.randn(2, 3, 7, *shape) * torch.randn(2, 3, 7, 1, shape[1]).exp()
    _, whole = round_trip(tiles, **changes)
    scattered = torch.empty(shape[1], 7, 2, shape[0], 3).permute(2, 4, 1, 3, 0).copy_(tiles)
    _, other = round_trip(scattered, **changes)
    for name in ("codes", "scale", "zero_point", "factor"):
        parts = [getattr(round_trip(tiles[:, :, i : i + 1], **changes)[1], name) for i in range(7)]
        assert torch.equal(getattr(whole, name), torch.cat(parts, 2))
        assert torch.equal(getattr(whole, name), getattr(other, name))


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("padding", [None, [37, 2]])
@pytest.mark.parametrize("group_size", [32, 128])
def test_the_cache_holds_the_same_however_calls_cut_the_tokens(group_size, padding, centered):
    side = {"nbits": 2, "method": METHOD, "group_size": group_size, "rotation": "hadamard", "centered": centered}
    config = KVQuantConfig(residual_length=16).replace(key=side, value=side)
    assert config.block_length == group_size
    states = torch.randn(2, 2, 450, 2, 32).transpose(2, 3)
    layer = assert_cuts_change_nothing(config, states, [5, 200, 1, 244], padding)
    assert layer.quantized_length == (450 - 4 - 16) // group_size * group_size


# ---- centered -----------------------------------------------------------------------------------------------------


def test_a_bias_costs_nothing_when_it_is_taken_out():
    """Rows far from zero: factors are those of what varies, and the error is that of rows without the bias."""
    tiles, column = planted()
    bias = 200.0 * torch.randn(2, 64, 1, generator=torch.Generator().manual_seed(1))

    def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
        return float(((found - wanted) / column[:, None, :]).square().mean())

    plain = error(round_trip(tiles + bias, nbits=2)[0], tiles + bias)
    centered = error(round_trip(tiles + bias, nbits=2, centered=True)[0], tiles + bias)
    without_bias = error(round_trip(tiles, nbits=2, centered=True)[0], tiles)
    assert centered < 1.3 * without_bias and centered < 0.05 * plain


@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("group_size", [32, 128])
def test_errors_of_centered_groups_are_at_most_half_a_step_times_the_factor(nbits, group_size):
    tiles, _ = planted()
    tiles += torch.randn(2, 64, 1)
    values, groups = round_trip(tiles, nbits=nbits, group_size=group_size, centered=True)
    step = groups.scale.float().repeat_interleave(group_size, -1) * groups.factor.float()[:, None, :]
    assert ((values - tiles).abs() <= 0.5 * step * (1 + 1e-5) + 1e-6).all()
    assert groups.zero_point.shape == groups.scale.shape and groups.zero_point.dtype == groups.scale.dtype


@pytest.mark.parametrize("nbits", NBITS)
def test_constant_rows_among_others_are_exact(nbits):
    tiles, _ = planted()
    tiles[:, 5] = 3.0
    tiles[:, 6] = torch.tensor(0.1).half().float()
    values, _ = round_trip(tiles, nbits=nbits, centered=True)
    assert torch.equal(values[:, 5:7], tiles[:, 5:7])


def test_a_mean_beyond_float16_is_kept_in_float32():
    tiles, _ = planted()
    near, _ = round_trip(tiles, nbits=4, centered=True)
    tiles[:, 5] += 2.0**20
    values, groups = round_trip(tiles, nbits=4, centered=True)
    assert groups.scale.dtype == groups.zero_point.dtype == torch.float32
    assert ((values - 2.0**20) - near)[:, 5].abs().max() < 2  # spacing of float32 there: 1/8


def test_centered_goes_with_asymmetric_codes_of_the_method_only():
    for changes in ({}, {"method": METHOD, "symmetric": True}):
        with pytest.raises(ValueError, match="`centered` must be False unless"):
            QuantSpec(**changes, centered=True)
    with pytest.raises(ValueError, match="`centered` must be one of"):
        QuantSpec(method=METHOD, centered="yes")
    spec = QuantSpec(method=METHOD, centered=True)
    assert "centered" in str(spec) and spec.metadata_bits(64) == QuantSpec(method=METHOD).metadata_bits(64)


def test_centered_groups_are_read_by_torch_and_the_gpu_kernels_and_refused_by_name_elsewhere():
    side = {"method": METHOD, "centered": True}
    config = KVQuantConfig(residual_length=16).replace(key=side, value=side)
    states = torch.randn(1, 2, 100, 32, generator=torch.Generator().manual_seed(0)) + 3.0
    query, outputs = torch.randn(1, 4, 1, 32), {}
    for backend in ("torch", "auto"):
        layer = QuantLayer(config.replace(backend=backend))
        layer.update(states, states)
        outputs[backend] = decode_attention(query, layer.view())
    assert torch.equal(outputs["torch"], outputs["auto"])
    assert triton.unsupported(layer.view()) is None
    strict = QuantLayer(config.replace(backend="cpu"))
    strict.update(states, states)
    with pytest.raises(ValueError, match="`backend='cpu'` does not read `centered` groups"):
        decode_attention(query, strict.view())
