"""Codes with levels from a table: the tables, the bounds, what is exact, what stays finite, what blocks depend on."""

import itertools
import math

import pytest
import torch
from harness import assert_reported_bytes, fed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import cpu, decode_attention, triton
from kvquant_hf.quantizers import AffineQuantizer, CodebookQuantizer, TurboQuantizer, quantizer_of
from kvquant_hf.quantizers.levels import levels_of
from kvquant_hf.rotation import hadamard
from kvquant_hf.spec import LEVELS_NBITS
from tests.quantizers.cuts import assert_cuts_change_nothing

CPU = torch.device("cpu")
TABLES = [(name, nbits) for name, widths in LEVELS_NBITS.items() for nbits in widths]
TURBO = {"granularity": "per_token", "rotation": "hadamard", "rope": "post", "symmetric": True, "levels": "gaussian"}
TURBO |= {"method": "turboquant", "group_size": 128}
PROD = {"method": "turboquant_prod"}
LISTED = (-1.0, -0.62, -0.3, -0.1, 0.05, 0.25, 0.6, 1.0)
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def spec_of(name: str, nbits: int, **changes) -> QuantSpec:
    return QuantSpec(nbits=nbits, levels=name, **changes)


def round_trip(rows: torch.Tensor, spec: QuantSpec, range_rows: torch.Tensor | None = None):
    quantizer = quantizer_of(spec)
    groups = quantizer.quantize(rows, range_rows)
    assert groups.codes.dtype == torch.uint8 and int(groups.codes.max()) < 2**spec.nbits
    assert (groups.zero_point is None) == spec.symmetric
    return quantizer.dequantize(groups), groups


def per_group(numbers: torch.Tensor, group_size: int) -> list[torch.Tensor]:
    """Rows `[..., length]` in groups, the last one as short as it is."""
    return list(numbers.split(group_size, -1))


# ---- tables ------------------------------------------------------------------------------------------------------


def test_gaussian_levels_are_those_of_max():
    """Max, "Quantizing for minimum distortion" (1960), table I."""
    published = {2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152]}
    published[4] = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]
    for nbits, half in published.items():
        table = levels_of("gaussian", nbits, CPU).table
        torch.testing.assert_close(table[len(half) :], torch.tensor(half), rtol=5e-4, atol=0)
        assert torch.equal(table, -table.flip(0))


@pytest.mark.parametrize("nbits", (2, 3, 4))
@pytest.mark.parametrize("name", ["gaussian", "laplace"])
def test_levels_have_the_least_squared_error_for_their_density(name, nbits):
    """Integrated numerically: moving any level in either direction, or all of them, makes it worse."""
    x = torch.linspace(0, 40, 400_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) if name == "gaussian" else torch.exp(-math.sqrt(2) * x)
    density /= density.sum()

    def distortion(half: torch.Tensor) -> float:
        bounds = (half[1:] + half[:-1]) / 2
        return float((density * (x - half[torch.bucketize(x, bounds)]).square()).sum())

    half = levels_of(name, nbits, CPU).table[2 ** (nbits - 1) :].double()
    least = distortion(half)
    for place, step in itertools.product(range(len(half)), (-0.01, 0.01)):
        moved = half.clone()
        moved[place] += step
        assert distortion(moved) > least
    assert distortion(1.01 * half) > least < distortion(0.99 * half)
    if name == "gaussian":  # TurboQuant, arXiv 2504.19874, theorem 1
        assert least == pytest.approx({2: 0.117, 3: 0.03454, 4: 0.009497}[nbits], rel=5e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_formats_are_their_bits_rounded_as_casts_round(name):
    levels = levels_of(name, 8, CPU)
    shift = levels.reach / torch.finfo(FORMATS[name]).max
    exact = levels.table[levels.order.long()]
    ties = (exact[1:] + exact[:-1]) / 2
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(20000, generator=generator) * torch.empty(20000).uniform_(-12, 0, generator=generator).exp()
    numbers = torch.cat([exact, ties, spread]).clamp(-levels.reach, levels.reach)
    cast = (numbers / shift).to(FORMATS[name])
    assert torch.equal(levels.values(levels.nearest(numbers)) / shift, cast.float())
    nonzero = cast.float() != 0  # -0 has a code of its own that is not given out
    assert torch.equal(levels.nearest(numbers)[nonzero], cast.view(torch.uint8)[nonzero])
    assert levels.nearest(torch.tensor([9.0, -9.0])).tolist() == [
        torch.tensor(s * torch.finfo(FORMATS[name]).max).to(FORMATS[name]).view(torch.uint8).item() for s in (1, -1)
    ]


def test_fp4_codes_are_sign_exponent_and_mantissa():
    levels = levels_of("e2m1", 4, CPU)
    for code in range(16):
        sign, exponent, mantissa = (-1) ** (code >> 3), code >> 1 & 3, code & 1
        value = sign * (2 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)
        assert levels.table[code] == value
        assert levels.nearest(torch.tensor([value], dtype=torch.float32)).item() == (code if value else 0)
    # Ties go to the even mantissa.
    ties = torch.tensor([2.5, 3.5, 5.0, -5.0, 0.25, 0.75])
    assert levels.values(levels.nearest(ties)).tolist() == [2, 4, 4, -4, 0, 1]


# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("group_size", "length"), list(itertools.product((16, 32, 128), (16, 63, 64, 200))))
@pytest.mark.parametrize(("name", "nbits"), TABLES)
def test_errors_are_within_half_the_gap_between_levels(name, nbits, group_size, length, symmetric):
    rows = torch.randn(3, length, generator=torch.Generator().manual_seed(0)) + 0.5
    values, groups = round_trip(rows, spec_of(name, nbits, group_size=group_size, symmetric=symmetric))
    assert groups.scale.dtype == torch.float16 and groups.scale.shape == (3, -(-length // group_size))
    levels = levels_of(name, nbits, CPU)
    ordered = levels.table[levels.order.long()]
    assert levels.reach == ordered[-1] == -ordered[0]
    for place, (x, y) in enumerate(zip(per_group(rows, group_size), per_group(values, group_size), strict=True)):
        half = x.abs().amax(-1) if symmetric else (x.amax(-1) - x.amin(-1)) / 2
        scale = half / levels.reach
        torch.testing.assert_close(groups.scale[:, place].float(), scale, rtol=2e-3, atol=0)
        # The gap around each number, as a table has wide and narrow ones.
        middle = 0 if symmetric else (x.amax(-1) + x.amin(-1))[:, None] / 2
        at = torch.searchsorted(ordered, ((x - middle) / scale[:, None]).contiguous()).clamp(1, len(ordered) - 1)
        gap = torch.maximum(ordered[at] - ordered[at - 1], torch.where(x == y, 0.0, ordered.diff().min()))
        assert ((x - y).abs() <= 0.51 * gap * scale[:, None] + 2e-3 * half[:, None]).all()


@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_formats_use_the_scale_of_their_largest_number(name):
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    _, groups = round_trip(rows, spec_of(name, LEVELS_NBITS[name][0], symmetric=True, group_size=128))
    largest = {"e4m3": 448 / 256, "e2m1": 6.0}[name]  # scales of e4m3 are held 256 times as large
    torch.testing.assert_close(groups.scale[:, 0].float(), rows.abs().amax(-1) / largest, rtol=5e-4, atol=0)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("nbits", (2, 3, 4))
def test_uneven_levels_beat_even_ones_on_the_density_they_are_made_for(nbits, symmetric):
    generator = torch.Generator().manual_seed(0)
    numbers = {"gaussian": torch.randn(64, 128, generator=generator)}
    uniform = torch.rand(64, 128, generator=generator) - 0.5
    numbers["laplace"] = -uniform.sign() * torch.log1p(-2 * uniform.abs()) / math.sqrt(2)
    error = {}
    for density, levels in itertools.product(numbers, ("uniform", "gaussian", "laplace")):
        spec = spec_of(levels, nbits, group_size=128, symmetric=symmetric, clip="mse")
        values, _ = round_trip(numbers[density], spec)
        error[density, levels] = float((values - numbers[density]).square().mean())
    assert error["gaussian", "gaussian"] < 0.985 * error["gaussian", "uniform"]
    assert error["laplace", "laplace"] < 0.9 * error["laplace", "uniform"]
    assert error["laplace", "laplace"] < error["laplace", "gaussian"]
    assert error["gaussian", "gaussian"] < error["gaussian", "laplace"]


@pytest.mark.parametrize("length", [64, 80])
@pytest.mark.parametrize(("name", "nbits"), TABLES)
def test_the_clip_of_least_squared_error_is_never_worse(name, nbits, length):
    rows = torch.randn(64, length, generator=torch.Generator().manual_seed(0))
    rows[:, 5] *= 4
    error = {
        clip: (round_trip(rows, spec_of(name, nbits, group_size=32, clip=clip))[0] - rows).square()
        for clip in ("minmax", "mse")
    }
    sums = [torch.stack([g.sum(-1) for g in per_group(error[clip], 32)]) for clip in ("mse", "minmax")]
    assert (sums[0] <= sums[1] + 1e-6).all()
    assert sums[0].sum() < (0.9 if nbits < 4 else 1.0) * sums[1].sum() + 1e-6


def test_a_short_last_group_is_clipped_by_its_own_elements_alone():
    rows = torch.randn(32, 40, generator=torch.Generator().manual_seed(0))
    rows[:, -1] *= 5  # what the group is filled up with
    spec = spec_of("gaussian", 2, group_size=32, clip="mse", symmetric=True)
    values, _ = round_trip(rows, spec)
    levels = levels_of("gaussian", 2, CPU)
    tail, got = rows[:, 32:], values[:, 32:]
    found = (got - tail).square().sum(-1)
    half = tail.abs().amax(-1, keepdim=True)
    for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 1.1, 1.25, 1.5):
        scale = (share * half / levels.reach).half().float()
        other = levels.values(levels.nearest(tail / scale)) * scale
        assert (found <= (other - tail).square().sum(-1) * (1 + 1e-3) + 1e-6).all()


# ---- what is exact, what stays finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize(("name", "nbits"), TABLES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 300.0, 6e-4, -1e4, 1e-7])
def test_constant_groups_of_a_half_type_come_back(clip, name, nbits, dtype, value):
    rows = torch.full((3, 40), value, dtype=dtype).float()
    exact = value != 1e-7 or dtype == torch.float16  # bfloat16 reaches below float16
    values, _ = round_trip(rows, spec_of(name, nbits, clip=clip))
    if exact:
        assert torch.equal(values, rows)
    else:
        torch.testing.assert_close(values, rows, rtol=0, atol=2**-24)
    values, _ = round_trip(rows, spec_of(name, nbits, clip=clip, symmetric=True))
    torch.testing.assert_close(values, rows, rtol=2**-10, atol=0)


SIDES = [
    *(spec_of(name, nbits, symmetric=symmetric) for name, nbits in TABLES for symmetric in (False, True)),
    *(QuantSpec(nbits=3, levels=LISTED, symmetric=symmetric) for symmetric in (False, True)),
    *(QuantSpec(**TURBO | {"nbits": nbits}) for nbits in (2, 3, 4)),
]


@settings(max_examples=300, deadline=None)
@given(
    exponent=st.integers(-40, 38),
    offset=st.floats(-(2.0**127), 2.0**127, width=32),
    spec=st.sampled_from(SIDES),
    clip=st.sampled_from(["minmax", "mse"]),
    length=st.sampled_from([16, 40, 64]),
    seed=st.integers(0, 2**16),
)
@example(exponent=38, offset=0.0, spec=SIDES[0], clip="mse", length=40, seed=0)
@example(exponent=38, offset=0.0, spec=SIDES[-1], clip="minmax", length=64, seed=0)
@example(exponent=-40, offset=0.0, spec=SIDES[-1], clip="minmax", length=64, seed=0)
def test_any_finite_input_gives_finite_parameters_and_values(exponent, offset, spec, clip, length, seed):
    noise = torch.randn(2, length, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3)
    rows = (noise.double() * 10.0**exponent + offset).clamp(-3.4028e38, 3.4028e38).float()
    other = rows.roll(1, 0) * 0.01  # also where ranges are fitted to something else
    for fitted in (None, other, torch.zeros_like(rows)):
        values, groups = round_trip(rows, QuantSpec(**{**vars(spec), "clip": clip}), fitted)
        assert torch.isfinite(groups.scale).all()
        assert groups.zero_point is None or torch.isfinite(groups.zero_point).all()
        assert torch.isfinite(values).all()
        if fitted is None and spec.method == "affine" and clip == "minmax":
            error = (values.double() - rows.double()).abs().amax(-1)
            extent = rows.double().abs().amax(-1)
            reach = extent if spec.symmetric else rows.double().amax(-1) - rows.double().amin(-1) + extent * 2**-10
            widest = {2: 0.7, 3: 0.5, 4: 0.4, 8: 0.2}[spec.nbits]
            assert (error <= widest * reach + 2**-22).all()


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("spec", SIDES, ids=str)
def test_the_largest_numbers_of_float32_stay_finite(spec, clip):
    """A level times a scale may round up, beyond the largest number."""
    largest = torch.finfo(torch.float32).max
    shrink = 1 - torch.arange(64)[:, None] * 2**-24
    rows = largest * shrink * torch.tensor([1.0, -1.0]).repeat(16)
    values, groups = round_trip(rows, QuantSpec(**{**vars(spec), "clip": clip}))
    assert torch.isfinite(values).all() and torch.isfinite(groups.scale).all()
    if spec.method == "affine":
        torch.testing.assert_close(values / largest, rows / largest, rtol=1e-5, atol=0)


def test_a_group_that_needs_float32_changes_no_other():
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for spec in (spec_of("gaussian", 3, clip="mse"), QuantSpec(**TURBO | {"nbits": 3})):
        alone, groups = round_trip(rows, spec)
        for huge in (1e6, 1e30, 1e-9):
            values, widened = round_trip(torch.cat([rows, huge * rows]), spec)
            assert (groups.scale.dtype, widened.scale.dtype) == (torch.float16, torch.float32)
            assert torch.equal(values[:4], alone)
            assert torch.equal(widened.codes[:4], groups.codes)
            lost, plain = (values[4:] / huge - rows).norm(), (alone - rows).norm()
            assert 0.99 * plain < lost < 1.01 * plain


@pytest.mark.parametrize("spec", SIDES, ids=str)
def test_parameters_are_fitted_to_other_rows_where_some_are_given(spec):
    clean = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    rows = clean.clone()
    rows[:, :4] = 100.0
    _, fitted = round_trip(rows, spec, clean)
    _, plain = round_trip(clean, spec)
    assert torch.equal(fitted.scale, plain.scale)
    assert torch.equal(fitted.codes[:, 4:], plain.codes[:, 4:])
    largest = levels_of(spec.levels, spec.nbits, CPU).table.nan_to_num(0, 0, 0).argmax()
    assert (fitted.codes[:, :4] == largest).all()


# ---- turboquant --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 40, 64, 128, 256])
@pytest.mark.parametrize("nbits", (2, 3, 4))
def test_turboquant_keeps_norms_and_has_the_published_distortion(nbits, length):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(400, length, generator=generator) * torch.randn(400, 1, generator=generator).exp()
    spec = QuantSpec(**TURBO | {"nbits": nbits})
    values, groups = round_trip(tokens, spec)
    assert groups.scale.shape == (400, -(-length // 128)) and groups.zero_point is None
    for x, y in zip(per_group(tokens, 128), per_group(values, 128), strict=True):
        torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=2**-10, atol=0)
        error = ((x - y).norm(dim=-1) / x.norm(dim=-1)).square().mean()
        # Theorem 1 of the paper; restoring the norm costs as much again as it takes from the shrinkage.
        assert error < 1.15 * {2: 0.117, 3: 0.03454, 4: 0.009497}[nbits]
    assert (round_trip(torch.zeros(2, length), spec)[0] == 0).all()


def test_turboquant_rotates_tokens_so_that_an_outlier_channel_costs_nothing():
    states = torch.randn(1, 1, 164, 64, generator=torch.Generator().manual_seed(0))
    states[..., 5] = 20.0
    config = KVQuantConfig(residual_length=0).replace(key=TURBO | {"nbits": 4}, value=TURBO | {"nbits": 4})
    layer = QuantLayer(config)
    layer.update(states, states)
    body = slice(4, 4 + layer.quantized_length)
    for held in layer.dequantize():
        error = (held - states)[:, :, body].norm() / states[:, :, body].norm()
        assert error.square() < 0.012


# ---- in a cache --------------------------------------------------------------------------------------------------


CACHES = {
    "gaussian": {
        "key": {"nbits": 3, "levels": "gaussian", "clip": "mse", "group_size": 16},
        "value": {"nbits": 2, "levels": "laplace", "symmetric": True, "rotation": "hadamard", "group_size": 16},
    },
    "fp8": {side: {"nbits": 8, "levels": "e4m3", "symmetric": True, "granularity": "per_token", "group_size": 128}
            for side in ("key", "value")},
    "fp4": {side: {"levels": "e2m1", "symmetric": True, "granularity": "per_token", "group_size": 16}
            for side in ("key", "value")},
    "nvfp4": {"key": {"levels": "e2m1", "symmetric": True, "metadata_nbits": 8},
              "value": {"levels": "e2m1", "symmetric": True, "group_size": 16, "metadata_nbits": 8}},
    "turboquant": {"key": TURBO | {"nbits": 3}, "value": TURBO | {"nbits": 2}},
    "turboquant_prod": {"key": TURBO | PROD | {"nbits": 3}, "value": TURBO | PROD | {"nbits": 2}},
    "listed": {
        "key": {"nbits": 3, "levels": LISTED, "group_size": 16},
        "value": {"nbits": 2, "levels": [-0.9, -0.2, 0.3, 1.1], "group_size": 16, "clip": "mse"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("padding", [None, [37, 2]])
def test_the_cache_holds_the_same_however_calls_cut_the_tokens(name, padding):
    config = KVQuantConfig(residual_length=16).replace(**CACHES[name])
    states = torch.randn(2, 2, 250, 2, 32, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    layer = assert_cuts_change_nothing(config, states, [5, 100, 1, 144], padding)
    assert layer.quantized_length == (250 - 4 - 16) // config.block_length * config.block_length > 0


@pytest.mark.parametrize("length", [72, 128])
@pytest.mark.parametrize("spec", [s for s in SIDES if s.nbits < 8 or s.symmetric], ids=str)
def test_a_block_depends_neither_on_its_neighbours_nor_on_its_place_in_memory(spec, length):
    spec = QuantSpec(**{**vars(spec), "clip": "mse"})
    # Scales of large numbers are float32: every digit of a sum shows.
    rows = 1e6 * torch.randn(2, 2, 3, 16, length, generator=torch.Generator().manual_seed(0))
    _, whole = round_trip(rows, spec)
    scattered = torch.empty(length, 3, 2, 16, 2).permute(2, 4, 1, 3, 0).copy_(rows)
    _, other = round_trip(scattered, spec)
    for name in ("codes", "scale", "zero_point"):
        if getattr(whole, name) is None:
            continue
        parts = [getattr(round_trip(rows[:, :, i : i + 1], spec)[1], name) for i in range(3)]
        assert torch.equal(getattr(whole, name), torch.cat(parts, 2))
        assert torch.equal(getattr(whole, name), getattr(other, name))


@pytest.mark.parametrize("name", CACHES)
def test_caches_hold_what_they_report_and_come_back_from_files(name, tmp_path):
    model = tiny_model("llama")
    ids = torch.randint(1, 128, (2, 90), generator=torch.Generator().manual_seed(0))
    config = KVQuantConfig(residual_length=16).replace(**CACHES[name])
    cache = QuantCache(model.config, config)
    fed(model, cache, ids, 13)
    report = cache.memory_report()
    assert report.quantized_tokens >= 32
    assert report.bits_per_value_quantized == pytest.approx(config.nominal_bits(model.config.head_dim))
    assert_reported_bytes(cache)
    assert (report.zero_points > 0) == (name in ("gaussian", "listed"))
    cache.save(tmp_path)
    back = QuantCache.load(tmp_path, model.config)
    assert back.quant_config == config
    more = ids.flip(1)[:, :60]
    assert torch.equal(fed(model, back, more, 9), fed(model, cache, more, 9))
    assert "levels" in repr(cache)


def test_bits_of_the_presets():
    bits = {"turboquant4": 4.25, "turboquant3": 3.25, "turboquant2": 2.25, "fp8": 8.25}
    bits["nvfp4"] = 4.5 + 16 / (32 * 64)
    for name, expected in bits.items():
        config = KVQuantConfig.from_preset(name)
        assert config.nominal_bits(64) == expected
        assert (config.key, config.residual_length, config.sink_length) == (config.value, 128, 4)
        assert (config.key.granularity, config.key.rope) == ("per_token", "post")


def test_query_moments_serve_keys_of_uneven_levels():
    """Row after row against the stated rule, and no change without feedback."""
    rows = torch.randn(1, 2, 3, 8, 32, generator=torch.Generator().manual_seed(0))
    feedback = 0.3 * torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)).tril(-1)
    quantizer = CodebookQuantizer(spec_of("gaussian", 3))
    plain, fed_groups = quantizer.quantize(rows), quantizer.quantize(rows, feedback=feedback)
    assert torch.equal(plain.scale, fed_groups.scale) and torch.equal(plain.zero_point, fed_groups.zero_point)
    assert not torch.equal(plain.codes, fed_groups.codes)
    assert torch.equal(quantizer.quantize(rows, feedback=torch.zeros(2, 8, 8)).codes, plain.codes)
    values, levels = quantizer.dequantize(fed_groups), levels_of("gaussian", 3, CPU)
    error = (values - rows).double()
    for head, row in itertools.product(range(2), range(8)):
        later = torch.einsum("j,njl->nl", feedback[head, :, row].double(), error[0, head])
        target = rows[0, head, :, row].double() - later
        own = [getattr(fed_groups, name)[0, head, :, row].double() for name in ("scale", "zero_point")]
        options = levels.table.double()[:, None, None] * own[0] + own[1]
        distance = (options - target).abs()
        assert ((values[0, head, :, row] - target).abs() <= distance.amin(0) + 1e-5).all()


# ---- settings and backends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"levels": "gausian"}, r"`levels` must be one of \('uniform', .*got 'gausian'. Did you mean 'gaussian'"),
        ({"levels": "gaussian", "nbits": 8}, r"`nbits` must be one of \(2, 3, 4\) with `levels='gaussian'`, got 8"),
        ({"levels": "e4m3"}, r"`nbits` must be one of \(8,\) with `levels='e4m3'`, got 4"),
        ({"levels": "e2m1", "nbits": 2}, r"`nbits` must be one of \(4,\)"),
        ({"levels": "gaussian", "method": "variance_normalized"}, r"`method` must be one of \('affine',\)"),
        ({"levels": "gaussian", "promoted": 0.25}, r"`levels` is one of"),
        (TURBO | {"nbits": 8}, r"`nbits` must be one of \(2, 3, 4\) with `method='turboquant'`, got 8"),
        (TURBO | {"levels": "uniform"}, r"`levels` must be one of \('gaussian',\) with `method='turboquant'`"),
        (TURBO | {"symmetric": False}, r"`symmetric` must be one of \(True,\)"),
        (TURBO | {"granularity": "per_channel"}, r"`granularity` must be one of \('per_token',\)"),
        (TURBO | {"rotation": "none"}, r"`rotation` must be one of \('hadamard',\)"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        QuantSpec(**changes)
    assert not QuantSpec(nbits=16, levels="e4m3").is_quantized
    assert not QuantSpec(**TURBO | {"nbits": 16}).is_quantized


@pytest.mark.parametrize("name", sorted(set(CACHES) - {"turboquant_prod"}))
def test_uneven_levels_are_read_on_the_cpu_and_left_to_torch_elsewhere(name):
    config = KVQuantConfig(residual_length=16).replace(**CACHES[name])
    generator = torch.Generator().manual_seed(0)
    states, query = torch.randn(1, 2, 100, 32, generator=generator), torch.randn(1, 4, 1, 32, generator=generator)
    outputs = {}
    for backend in ("torch", "auto", "cpu"):
        layer = QuantLayer(config.replace(backend=backend))
        layer.update(states, states)
        outputs[backend] = decode_attention(query, layer.view())
    assert torch.equal(outputs["cpu"], outputs["auto"])
    keys, values = layer.dequantize()
    want = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    for output in outputs.values():
        torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)
    assert triton.unsupported(layer.view()) is None
    for spec in (config.key, config.value):
        assert not cpu.can_encode(spec, states.dtype, states.device, 32, 32)
    assert triton.word_layouts((config.key, config.value), 32, (32, 32), None) == (None, None)


def test_what_projections_say_of_residuals_is_left_to_torch():
    config = KVQuantConfig(residual_length=16).replace(**CACHES["turboquant_prod"])
    states = torch.randn(1, 2, 100, 32, generator=torch.Generator().manual_seed(0))
    query, outputs = torch.randn(1, 4, 1, 32), {}
    for backend in ("torch", "auto"):
        layer = QuantLayer(config.replace(backend=backend))
        layer.update(states, states)
        outputs[backend] = decode_attention(query, layer.view())
    assert torch.equal(outputs["torch"], outputs["auto"])
    strict = QuantLayer(config.replace(backend="cpu"))
    strict.update(states, states)
    with pytest.raises(ValueError, match="`backend='cpu'` does not read `method: turboquant_prod`"):
        decode_attention(query, strict.view())
    assert triton.unsupported(layer.view()) == "keys with `method: turboquant_prod`"


@pytest.mark.parametrize("side", ["key", "value"])
def test_one_side_of_uneven_levels_is_enough(side):
    mixed = KVQuantConfig(residual_length=16).replace(**{side: {"levels": "gaussian"}})
    layer = QuantLayer(mixed.replace(backend="cpu"))
    states = torch.randn(1, 2, 100, 32, generator=torch.Generator().manual_seed(0))
    layer.update(states, states)
    view = layer.view()
    assert cpu.unsupported(view) is None
    assert triton.unsupported(view) is None
    assert triton.word_layouts((mixed.key, mixed.value), 32, (32, 32), None) == (None, None)


def test_uniform_levels_are_the_affine_quantizer():
    assert isinstance(quantizer_of(QuantSpec()), AffineQuantizer)
    assert isinstance(quantizer_of(spec_of("gaussian", 4)), CodebookQuantizer)
    assert isinstance(quantizer_of(QuantSpec(**TURBO)), TurboQuantizer)
    assert torch.allclose(hadamard(hadamard(torch.eye(64))), torch.eye(64), atol=1e-6)
