"""Gaussian levels and signs of a random projection: what is stored, no bias of inner products, degenerate tokens."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvquant_hf import KVQuantConfig, QuantSpec
from kvquant_hf.quantizers import TurboProdQuantizer, quantizer_of, turboquant_prod
from kvquant_hf.quantizers.levels import levels_of
from kvquant_hf.quantizers.turboquant_prod import projection
from kvquant_hf.storage import BlockStore
from tests.quantizers.cuts import assert_cuts_change_nothing

CPU = torch.device("cpu")
# TurboQuant, theorem 2: squared error of a product with a unit query, times D, of 2, 3 and 4 bits.
DISTORTION = {2: 0.56, 3: 0.18, 4: 0.047}
# Squared error of the levels of 1, 2 and 3 bits, which is also what they shrink products by (Max, 1960, table I).
LEVEL_ERROR = {1: 0.3634, 2: 0.1175, 3: 0.03454}


def spec_of(nbits: int = 3, method: str = "turboquant_prod", **changes) -> QuantSpec:
    plain = {"granularity": "per_token", "rotation": "hadamard", "rope": "post", "symmetric": True}
    return QuantSpec(nbits=nbits, method=method, levels="gaussian", **plain | {"group_size": 128} | changes)


def tokens_of(*shape: int, seed: int = 0) -> torch.Tensor:
    """Directions of even density, norms that differ."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.randn(*shape[:-1], 1, generator=generator).exp()


def round_trip(rows: torch.Tensor, spec: QuantSpec, range_rows: torch.Tensor | None = None):
    quantizer = quantizer_of(spec)
    groups = quantizer.quantize(rows, range_rows)
    assert groups.codes.dtype == torch.uint8 and int(groups.codes.max()) < 2**spec.nbits
    assert groups.zero_point is None
    if spec.method == "turboquant_prod":
        assert groups.scale.shape == (*rows.shape[:-1], 2 * -(-rows.shape[-1] // spec.group_size))
    return quantizer.dequantize(groups), groups


# ---- the projection ----------------------------------------------------------------------------------------------


def test_the_projection_is_the_documented_one():
    def mixed(number: int) -> int:
        number ^= number >> 16
        number = number * 0x85EBCA6B % 2**32
        number ^= number >> 13
        number = number * 0xC2B2AE35 % 2**32
        return number ^ number >> 16

    matrix = projection(CPU)
    assert matrix.shape == (128, 128) and matrix.dtype == torch.float64
    for i, j in ((0, 0), (0, 1), (5, 120), (127, 127)):
        share = (mixed((mixed(128 * i + j + 1) + 0x9E3779B9) % 2**32) + 0.5) / 2**32
        quantile = math.sqrt(2) * torch.erfinv(torch.tensor(2 * share - 1, dtype=torch.float64))
        assert matrix[i, j] * 1024 == (quantile * 1024).round()
    assert (matrix[0, :4] * 1024).tolist() == [-496, 57, -192, -1605]


def test_its_numbers_are_normal_and_independent_to_the_eye():
    matrix = projection(CPU)
    ordered = matrix.flatten().sort().values
    shares = (1 + torch.erf(ordered / math.sqrt(2))) / 2
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) is exceeded in one of a hundred cases.
    assert (shares - (torch.arange(128**2) + 0.5) / 128**2).abs().max() < 1.63 / 128
    for size in (16, 40, 64, 128):
        part = matrix[:size, :size]
        between = (part @ part.T).fill_diagonal_(0), (part.T @ part).fill_diagonal_(0)
        for products in between:  # of independent rows: variance `size`
            assert abs(float(products.square().sum()) / (size**2 * (size - 1)) - 1) < 0.15
            assert products.abs().max() < 5 * size**0.5
    assert abs(float((matrix[:, 1:] * matrix[:, :-1]).mean())) < 3 / 128


# ---- what is stored ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group_size", "length"), [(128, 16), (128, 40), (128, 64), (128, 192), (64, 128), (16, 40)])
@pytest.mark.parametrize("nbits", (2, 3, 4))
def test_parameters_codes_and_values_are_those_of_the_paper(nbits, group_size, length):
    """Computed group by group in float64, with the short group's own projection."""
    rows = tokens_of(50, length)
    values, groups = round_trip(rows, spec_of(nbits, group_size=group_size))
    scales, gammas = groups.scale.double().chunk(2, -1)
    assert groups.scale.dtype == torch.float16
    table = levels_of("gaussian", nbits - 1, CPU).table.double()
    parts = zip(rows.double().split(group_size, -1), groups.codes.split(group_size, -1),
                values.double().split(group_size, -1), strict=True)  # fmt: skip
    for place, (x, codes, y) in enumerate(parts):
        size, scale, gamma = x.shape[-1], scales[:, place, None], gammas[:, place, None]
        torch.testing.assert_close(scale, x.norm(dim=-1, keepdim=True) / size**0.5, rtol=2**-10, atol=0)
        low = codes & (2 ** (nbits - 1) - 1)
        level = table[low.long()]
        nearest = (x[..., None] / scale[..., None] - table).abs()
        assert (nearest.gather(-1, low[..., None].long()).squeeze(-1) <= nearest.amin(-1) + 1e-5).all()
        residual = x - scale * level
        torch.testing.assert_close(gamma, residual.norm(dim=-1, keepdim=True), rtol=2e-3, atol=0)
        matrix = projection(CPU)[:size, :size]
        projected = residual @ matrix.T
        sign = (codes >> (nbits - 1)).double() * 2 - 1
        clear = projected.abs() > 1e-4 * gamma
        assert torch.equal(sign[clear], projected.sign()[clear]) and clear.float().mean() > 0.99
        expected = scale * level + gamma * math.sqrt(math.pi / 2) / size * (sign @ matrix)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5 * float(scale.max()))


@pytest.mark.parametrize("nbits", (2, 3, 4))
def test_errors_are_those_of_the_paper(nbits):
    rows = tokens_of(2000, 128)
    values, _ = round_trip(rows, spec_of(nbits))
    error = ((values - rows).norm(dim=-1) / rows.norm(dim=-1)).square().mean()
    assert error == pytest.approx(DISTORTION[nbits], rel=0.14)  # the paper gives two digits of the levels' own error
    # What the projection leaves of a residual of norm 1: π/2 - 1/D.
    gamma = round_trip(rows, spec_of(nbits))[1].scale[:, 1].float() / rows.norm(dim=-1)
    assert error == pytest.approx((math.pi / 2 - 1 / 128) * float(gamma.square().mean()), rel=0.02)


# ---- inner products ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [40, 128])
@pytest.mark.parametrize("nbits", (2, 3, 4))
def test_inner_products_have_no_bias_over_the_choice_of_the_projection(nbits, length, monkeypatch):
    rows, queries = tokens_of(80, length), tokens_of(80, length, seed=1)
    queries[:60] = rows[:60]  # those that levels alone shrink the products with
    generator, estimates = torch.Generator().manual_seed(0), []
    for _ in range(400):
        matrix = (torch.randn(128, 128, generator=generator, dtype=torch.float64) * 1024).round() / 1024
        monkeypatch.setattr(turboquant_prod, "projection", lambda device, matrix=matrix: matrix)
        estimates.append((round_trip(rows, spec_of(nbits))[0] * queries).sum(-1))
    found = torch.stack(estimates).double()
    true = (rows.double() * queries.double()).sum(-1)
    deviation = found.std(0) / len(estimates) ** 0.5
    assert ((found.mean(0) - true).abs() <= 4 * deviation + 5e-4 * rows.norm(dim=-1) * queries.norm(dim=-1)).all()
    # Levels alone, which the first term is, shrink them.
    monkeypatch.setattr(turboquant_prod, "projection", lambda device: torch.zeros(128, 128, dtype=torch.float64))
    levels_only = (round_trip(rows, spec_of(nbits))[0] * queries).sum(-1)
    shrunken = float((1 - levels_only / true)[:60].mean())
    assert shrunken == pytest.approx(LEVEL_ERROR[nbits - 1], rel=0.35)
    assert float((1 - found.mean(0) / true)[:60].mean()) < 0.05 * shrunken


@pytest.mark.parametrize("nbits", (2, 3, 4))
def test_inner_products_have_no_bias_over_tokens_and_queries(nbits):
    """With the one matrix there is; TurboQuant's levels with their norm restored still shrink products."""
    tokens = torch.randn(20000, 128, generator=torch.Generator().manual_seed(0))
    queries = tokens + 2 * torch.randn(20000, 128, generator=torch.Generator().manual_seed(1))
    true = (tokens * queries).sum(-1).double()
    excess, deviation = {}, {}
    for method in ("turboquant", "turboquant_prod"):
        products = (round_trip(tokens, spec_of(nbits, method))[0] * queries).sum(-1).double()
        relative = (products - true) / true.mean()
        excess[method], deviation[method] = float(relative.mean()), float(relative.std()) / len(true) ** 0.5
    assert abs(excess["turboquant_prod"]) < 4 * deviation["turboquant_prod"] < 0.02
    assert excess["turboquant"] < -20 * deviation["turboquant"]
    assert deviation["turboquant_prod"] > 1.4 * deviation["turboquant"]  # the price


# ---- degenerate tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 128, 200])
@pytest.mark.parametrize("nbits", (2, 3, 4))
def test_tokens_of_zeros_come_back_as_zeros(nbits, length):
    rows = tokens_of(3, length)
    rows[1] = 0.0
    values, groups = round_trip(rows, spec_of(nbits))
    assert (values[1] == 0).all() and (groups.scale[1] == 0).all()
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("value", [1.0, -0.37, 300.0, 6e-4, -1e4, 1e-7, 3e38, 1e-42])
@pytest.mark.parametrize("nbits", (2, 3, 4))
def test_constant_and_one_sided_tokens_stay_within_the_errors_of_their_norms(nbits, value):
    rows = torch.zeros(2, 64)
    rows[0] = value
    rows[1, 5] = value
    values, _ = round_trip(rows, spec_of(nbits))
    ratio = (values / value - rows / value).double().norm(dim=-1) / (rows / value).double().norm(dim=-1)
    assert torch.isfinite(values).all() and (ratio < 2).all()


@settings(max_examples=200, deadline=None)
@given(
    exponent=st.integers(-44, 38),
    offset=st.floats(-(2.0**127), 2.0**127, width=32),
    nbits=st.sampled_from((2, 3, 4)),
    length=st.sampled_from([16, 40, 64, 200]),
    seed=st.integers(0, 2**16),
)
@example(exponent=38, offset=0.0, nbits=2, length=200, seed=0)
@example(exponent=-44, offset=0.0, nbits=2, length=40, seed=0)
def test_any_finite_input_gives_finite_parameters_and_values(exponent, offset, nbits, length, seed):
    noise = torch.randn(2, length, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3)
    rows = (noise.double() * 10.0**exponent + offset).clamp(-3.4028e38, 3.4028e38).float()
    other = rows.roll(1, 0) * 0.01
    for fitted in (None, other, torch.zeros_like(rows)):
        values, groups = round_trip(rows, spec_of(nbits), fitted)
        assert torch.isfinite(groups.scale).all() and torch.isfinite(values).all()


def test_the_largest_numbers_of_float32_stay_finite():
    rows = torch.finfo(torch.float32).max * torch.tensor([1.0, -1.0]).repeat(3, 64)
    values, groups = round_trip(rows, spec_of(2))
    assert torch.isfinite(values).all() and torch.isfinite(groups.scale).all()
    assert (values.sign() == rows.sign()).float().mean() > 0.8


def test_a_group_that_needs_float32_changes_no_other():
    rows = tokens_of(4, 32)
    alone, groups = round_trip(rows, spec_of())
    for huge in (1e6, 1e30, 1e-9):
        values, widened = round_trip(torch.cat([rows, huge * rows]), spec_of())
        assert (groups.scale.dtype, widened.scale.dtype) == (torch.float16, torch.float32)
        assert torch.equal(values[:4], alone) and torch.equal(widened.codes[:4], groups.codes)
        assert 0.98 * (alone - rows).norm() < (values[4:] / huge - rows).norm() < 1.02 * (alone - rows).norm()


# ---- what a block depends on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [72, 128])
@pytest.mark.parametrize("nbits", (2, 4))
def test_a_block_depends_neither_on_its_neighbours_nor_on_its_place_in_memory(nbits, length):
    spec = spec_of(nbits)
    # Scales of large numbers are float32: every digit of a sum shows.
    rows = 1e6 * tokens_of(2, 2, 3, 16, length)
    values, whole = round_trip(rows, spec)
    scattered = torch.empty(length, 3, 2, 16, 2).permute(2, 4, 1, 3, 0).copy_(rows)
    other_values, other = round_trip(scattered, spec)
    tokens = [round_trip(row[None], spec) for row in rows.flatten(0, -2)]
    assert torch.equal(values, other_values)
    assert torch.equal(values.flatten(0, -2), torch.cat([token[0] for token in tokens]))
    for name in ("codes", "scale"):
        assert torch.equal(getattr(whole, name), getattr(other, name))
        alone = torch.cat([getattr(token[1], name) for token in tokens])
        assert torch.equal(getattr(whole, name).flatten(0, -2).float(), alone.float())


@pytest.mark.parametrize("padding", [None, [37, 2]])
def test_the_cache_holds_the_same_however_calls_cut_the_tokens(padding):
    config = KVQuantConfig(residual_length=16).replace(key=vars(spec_of(3)), value=vars(spec_of(2, group_size=16)))
    states = torch.randn(2, 2, 250, 2, 32, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    assert_cuts_change_nothing(config, states, [5, 100, 1, 144], padding)


def test_parameters_are_fitted_to_other_rows_where_some_are_given():
    clean = tokens_of(3, 64)
    rows = clean.clone()
    rows[1] = 100.0
    spec = spec_of()
    values, fitted = round_trip(rows, spec, clean)
    plain_values, plain = round_trip(clean, spec)
    assert torch.equal(fitted.scale, plain.scale) and torch.isfinite(values).all()
    assert torch.equal(values[[0, 2]], plain_values[[0, 2]])
    assert (fitted.codes[1] & 3 == 3).all()


def test_feedback_is_refused():
    with pytest.raises(ValueError, match=r"`method='turboquant_prod'` stores tokens"):
        TurboProdQuantizer(spec_of()).quantize(tokens_of(1, 1, 1, 4, 16), feedback=torch.zeros(1, 4, 4))


# ---- settings and stores -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nbits": 8}, r"`nbits` must be one of \(2, 3, 4\) with `method='turboquant_prod'`, got 8"),
        ({"symmetric": False}, r"`symmetric` must be one of \(True,\) with `method='turboquant_prod'`"),
        ({"granularity": "per_channel"}, r"`granularity` must be one of \('per_token',\)"),
        ({"rotation": "none"}, r"`rotation` must be one of \('hadamard',\)"),
        ({"metadata_nbits": 8}, r"`metadata_nbits` must be 16 unless `method` is one of \('affine',\)"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        spec_of(**changes)
    assert "turboquant_prod" in str(spec_of())


@pytest.mark.parametrize(("head_dim", "group_size"), list(itertools.product((64, 72, 256), (128, 32))))
def test_every_byte_is_counted_and_earlier_values_stay(head_dim, group_size):
    spec = spec_of(group_size=group_size)
    blocks = torch.randn(2, 3, 5, 32, head_dim, generator=torch.Generator().manual_seed(0))
    store = BlockStore(spec, 32, head_dim, torch.float32)
    for part in blocks[:, :, :4].split(2, dim=2):
        store.append(store.encode(part))
    parts, before = store.bytes_by_part(), store.read(0, 4).clone()
    bits = 8 * (parts["codes"] + parts["scales"]) / blocks[:, :, :4].numel()
    assert parts["zero_points"] == 0 and bits == pytest.approx(spec.bits_per_value(head_dim, 32), rel=1e-12)
    assert bits == pytest.approx(3 + 32 * -(-head_dim // group_size) / head_dim)
    store.append(store.encode(1e6 * blocks[:, :, 4:]))
    assert store.scale.dtype == torch.float32 and torch.equal(store.read(0, 4), before)
    again = BlockStore(spec, 32, head_dim, torch.float32)
    again.load_state(store.state())
    assert torch.equal(again.read(1, 5), store.read(1, 5))
    broken = store.state() | {"scale": store.state()["scale"][..., :1]}
    with pytest.raises(ValueError, match="stored `scale` must have the shape"):
        again.load_state(broken)
