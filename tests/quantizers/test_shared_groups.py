"""Groups that share a scale or a zero point: bounds, what is exact, what stays finite, what blocks depend on."""

import itertools
from dataclasses import replace

import pytest
import torch
from harness import assert_reported_bytes, fed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec
from kvquant_hf.guard import guarded
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import cpu, decode_attention, notice, reference, triton
from kvquant_hf.quantizers import AffineQuantizer, QuantizedGroups, SharedGroupsQuantizer, quantizer_of
from kvquant_hf.storage import BlockStore
from tests.quantizers.cuts import assert_cuts_change_nothing
from tests.quantizers.stores import counted_store

D, L = 32, 64
NBITS = (2, 3, 4, 8)
PARAMETERS = ("scale", "zero_point")
LARGEST = torch.finfo(torch.float32).max


def spec_of(parameter: str = "scale", count: int = 2, **changes) -> QuantSpec:
    return QuantSpec(**({"group_size": 16} | changes), shared_groups=count, shared_parameter=parameter)


def plain_of(spec: QuantSpec) -> QuantSpec:
    return replace(spec, shared_groups=1, shared_parameter="scale")


def rows_of(*lead: int, length: int = L, seed: int = 0) -> torch.Tensor:
    """Rows `[..., length]` of different widths, a width away from zero or so."""
    generator = torch.Generator().manual_seed(seed)
    width = (0.7 * torch.randn(*lead, 1, generator=generator)).exp()
    return width * (torch.randn(*lead, length, generator=generator) + torch.randn(*lead, 1, generator=generator))


def round_trip(rows: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, QuantizedGroups]:
    quantizer = quantizer_of(spec)
    assert isinstance(quantizer, SharedGroupsQuantizer)
    groups = quantizer.quantize(rows)
    num_groups = -(-rows.shape[-1] // spec.group_size)
    for name in PARAMETERS:
        stored = -(-num_groups // spec.shared_groups) if name == spec.shared_parameter else num_groups
        assert getattr(groups, name).shape == (*rows.shape[:-1], stored)
    assert groups.codes.dtype == torch.uint8 and int(groups.codes.max()) < 2**spec.nbits
    return quantizer.dequantize(groups), groups


def each_group(groups: QuantizedGroups, spec: QuantSpec, length: int):
    """First and last element of each group, with its stored scale and zero point, taken by number."""
    for group in range(-(-length // spec.group_size)):
        numbers = [group // spec.shared_groups if spec.shared_parameter == name else group for name in PARAMETERS]
        end = min(length, (group + 1) * spec.group_size)
        yield group * spec.group_size, end, groups.scale[..., numbers[0]], groups.zero_point[..., numbers[1]]


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("length", [16, 32, 40, 63, 64, 111, 200])
@pytest.mark.parametrize(("nbits", "group_size", "count"), list(itertools.product(NBITS, (16, 32), (2, 4))))
def test_grids_cover_their_ranges_and_errors_are_within_half_a_step(nbits, group_size, count, length, parameter):
    rows, spec = rows_of(3, 40, length=length), spec_of(parameter, count, nbits=nbits, group_size=group_size)
    values, groups = round_trip(rows, spec)
    assert groups.scale.dtype == groups.zero_point.dtype == torch.float16
    plain = AffineQuantizer(plain_of(spec)).quantize(rows)
    for first, end, scale, zero_point in each_group(groups, spec, length):
        x, y, scale, zero_point = rows[..., first:end], values[..., first:end], scale.float(), zero_point.float()
        slack = 1e-6 * x.abs().amax(-1)
        assert (zero_point <= x.amin(-1)).all() and (zero_point + (2**nbits - 1) * scale >= x.amax(-1) - slack).all()
        assert ((x - y).abs().amax(-1) <= scale / 2 + slack).all()
        # Steps are as wide as the groups that share need, and no wider.
        group = first // group_size
        sharing = slice(group // count * count, group // count * count + count)
        if parameter == "scale":
            assert torch.equal(scale, plain.scale[..., sharing].float().amax(-1))
            assert torch.equal(zero_point, plain.zero_point[..., group].float())
        else:
            assert torch.equal(zero_point, plain.zero_point[..., sharing].float().amin(-1))
            needed = (x.amax(-1) - zero_point) / (2**nbits - 1)
            assert (scale <= needed * (1 + 2**-10) + 2**-24 + slack).all()


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize(("parameter", "count"), list(itertools.product(PARAMETERS, (2, 4))))
def test_equal_groups_and_single_ones_lose_nothing_by_sharing(parameter, count, clip):
    spec = spec_of(parameter, count, nbits=2, clip=clip)
    for rows in (rows_of(50, length=16).repeat(1, 5), rows_of(50, length=16), rows_of(50, length=11)):
        plain = AffineQuantizer(plain_of(spec))
        assert torch.equal(round_trip(rows, spec)[0], plain.dequantize(plain.quantize(rows)))


@pytest.mark.parametrize(("parameter", "count"), list(itertools.product(PARAMETERS, (2, 4))))
def test_a_clipped_range_is_the_best_of_its_groups_together(parameter, count):
    """Against every share of the ranges, tried one by one with fresh arithmetic."""
    rows, spec = rows_of(64, length=72), spec_of(parameter, count, nbits=2, clip="mse")
    rows[:, ::9] *= 3
    values, groups = round_trip(rows, spec)
    lost, tried = torch.zeros(64, 5), []
    for step in range(11):
        errors = torch.zeros(64, 5, dtype=torch.float64)
        for first in range(0, 72, 16 * count):
            parts = rows[:, first : first + 16 * count].split(16, -1)
            middle = [(part.amax(-1) + part.amin(-1)) / 2 for part in parts]
            half = [(part.amax(-1) - part.amin(-1)) / 2 * (1 - 0.05 * step) for part in parts]
            low = [m - h for m, h in zip(middle, half, strict=True)]
            if parameter == "zero_point":
                low = [torch.stack(low).amin(0)] * len(parts)
            scale = [(m + h - z) / 3 for m, h, z in zip(middle, half, low, strict=True)]
            if parameter == "scale":
                scale = [torch.stack(scale).amax(0)] * len(parts)
            for part, z, s in zip(parts, low, scale, strict=True):
                codes = ((part - z[:, None]) / s[:, None]).round().clamp(0, 3)
                error = (codes * s[:, None] + z[:, None] - part).double()
                # A short group counts as often as it fills a whole one.
                times = -(-16 // part.shape[1])
                errors[:, first // 16 // count] += (error.repeat(1, times)[:, :16] ** 2).sum(-1)
        tried.append(errors)
    sets = -(-5 // count)
    for first, end, _, _ in each_group(groups, spec, 72):
        error = (values[:, first:end] - rows[:, first:end]).repeat(1, -(-16 // (end - first)))[:, :16]
        lost[:, first // 16 // count] += (error**2).sum(-1)
    best = torch.stack(tried)[..., :sets].amin(0)
    torch.testing.assert_close(lost[:, :sets].double(), best, rtol=0.02, atol=1e-6)
    assert best.sum() < 0.9 * tried[0][..., :sets].sum()


# ---- degenerate input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 300.0, 6e-4, -1e4])
def test_equal_constant_groups_of_a_half_type_are_exact(parameter, clip, nbits, dtype, value):
    rows = torch.full((3, 56), value, dtype=dtype).float()
    assert torch.equal(round_trip(rows, spec_of(parameter, nbits=nbits, clip=clip))[0], rows)


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("value", [0.1, -0.1, 1234.567, -9e4, 1e-9, 1e-30, 1e-42, 3e38])
def test_equal_constant_groups_of_float32_are_exact_to_half_a_step_of_one_float16_spacing(parameter, nbits, value):
    rows = torch.full((3, 56), value)
    values, _ = round_trip(rows, spec_of(parameter, nbits=nbits))
    torch.testing.assert_close(values, rows, rtol=2**-11 / (2**nbits - 1), atol=2**-24)


@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 300.0, -1e4])
def test_a_constant_group_among_others_keeps_the_documented_bound(nbits, value):
    value = float(torch.tensor(value).half())
    rows = rows_of(40)
    rows[:, 16:32] = value
    values, _ = round_trip(rows, spec_of("scale", nbits=nbits))
    assert torch.equal(values[:, 16:32], rows[:, 16:32])
    values, groups = round_trip(rows, spec_of("zero_point", nbits=nbits))
    distance = value - groups.zero_point[:, :1].float()
    assert ((values - rows)[:, 16:32].abs() <= 2**-10 * distance + (2**nbits - 1) * 2**-24).all()


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("wide", [0, 1])
def test_groups_that_need_float32_share_the_same_number_with_those_that_do_not(parameter, wide):
    """A zero point that is rounded for one of them alone would shift the other's grid by a tenth of a step."""
    rows = rows_of(50, length=32)
    rows[:, 16 * wide] = 1e5
    spec = spec_of(parameter, nbits=8)
    values, groups = round_trip(rows, spec)
    assert groups.scale.dtype == groups.zero_point.dtype == torch.float32
    for first, end, scale, zero_point in each_group(groups, spec, 32):
        x, y = rows[:, first:end], values[:, first:end]
        assert (zero_point <= x.amin(-1)).all()
        assert ((x - y).abs().amax(-1) <= scale / 2 + 1e-6 * x.abs().amax(-1)).all()


def test_small_steps_between_constant_groups_are_kept_in_float32():
    """No group has any width of its own; the step to the shared zero point is one that float16 would distort."""
    rows = torch.tensor([0.0, 1e-6]).repeat_interleave(16)[None]
    values, groups = round_trip(rows, spec_of("zero_point", nbits=8))
    assert groups.scale.dtype == torch.float32
    torch.testing.assert_close(values, rows, rtol=1e-6, atol=0)


@settings(max_examples=200, deadline=None)
@given(
    exponent=st.integers(-45, 38),
    spread=st.floats(0, 12),
    offset=st.floats(-(2.0**127), 2.0**127, width=32),
    nbits=st.sampled_from(NBITS),
    clip=st.sampled_from(["minmax", "mse"]),
    parameter=st.sampled_from(PARAMETERS),
    count=st.sampled_from([2, 4]),
    seed=st.integers(0, 2**16),
)
@example(exponent=38, spread=0.0, offset=0.0, nbits=2, clip="minmax", parameter="scale", count=4, seed=0)
@example(exponent=38, spread=9.0, offset=2.0**127, nbits=2, clip="mse", parameter="scale", count=2, seed=0)
@example(exponent=38, spread=9.0, offset=-(2.0**127), nbits=8, clip="mse", parameter="zero_point", count=4, seed=0)
def test_any_finite_input_gives_finite_parameters_and_values(
    exponent, spread, offset, nbits, clip, parameter, count, seed
):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(6, 7, 16, generator=generator) * (spread * torch.randn(6, 7, 1, generator=generator)).exp()
    rows = (noise.double() * 10.0**exponent + offset).clamp(-LARGEST, LARGEST).float().flatten(-2)[:, :100]
    spec = spec_of(parameter, count, nbits=nbits, clip=clip)
    values, groups = round_trip(rows, spec)
    for part in (groups.scale, groups.zero_point, values):
        assert torch.isfinite(part).all()
    assert groups.scale.dtype == groups.zero_point.dtype
    if clip == "minmax":
        for first, end, scale, _ in each_group(groups, spec, 100):
            x, y = rows[:, first:end].double(), values[:, first:end].double()
            # Differences of numbers far from zero are rounded, and so are the products.
            rounding = 3e-6 * (x.abs().amax(-1) + scale.double()) + 1e-36
            assert ((x - y).abs().amax(-1) <= scale.double() / 2 + rounding).all()


def test_values_above_the_largest_range_stop_at_the_largest_number():
    """A group that ends there, beside one whose range is twice as wide: the nearest level lies beyond float32."""
    rows = torch.cat([torch.linspace(-1, 1, 16), torch.linspace(0.6, 1, 16)])[None] * LARGEST
    values, groups = round_trip(rows, spec_of(nbits=2))
    assert (values[0, 16:] == LARGEST).any() and torch.isfinite(values).all()
    assert ((values - rows).abs() <= 1.001 * groups.scale / 2).all()


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_undefined_numbers_stay_among_the_groups_that_share(number, parameter):
    rows = rows_of(3)
    want = round_trip(rows, spec_of(parameter))[0]
    rows[1, 5] = number
    values, _ = round_trip(rows, spec_of(parameter))
    plain = AffineQuantizer(plain_of(spec_of(parameter)))
    lost = ~torch.isfinite(plain.dequantize(plain.quantize(rows)))
    assert lost[1, :16].all() and not lost.sum() > 16
    assert not torch.isfinite(values[1, :16]).any()
    assert torch.equal(values[[0, 2]], want[[0, 2]]) and torch.equal(values[1, 32:], want[1, 32:])


# ---- what a block depends on -------------------------------------------------------------------------------------

COMBINED = [
    {"parameter": "scale", "nbits": 2},
    {"parameter": "zero_point", "nbits": 2},
    {"parameter": "scale", "nbits": 3, "count": 4, "clip": "mse"},
    {"parameter": "zero_point", "nbits": 2, "count": 4, "clip": "mse", "rotation": "hadamard", "rope": "post"},
]


@pytest.mark.parametrize("changes", COMBINED, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-7])
def test_a_block_depends_neither_on_its_neighbours_nor_on_its_place_in_memory(changes, scale):
    rows = rows_of(2, 3, 7, D)
    rows[:, :, 3] *= scale  # numbers that float16 does not hold
    rows[:, :, 5, 9] *= scale
    rows[:, :, 6, 9, :16] *= scale  # one of the groups that share
    spec = spec_of(**changes)
    values, whole = round_trip(rows, spec)
    scattered = torch.empty(L, 7, 2, D, 3).permute(2, 4, 1, 3, 0).copy_(rows)
    other_values, other = round_trip(scattered, spec)
    parts = [round_trip(rows[:, :, i : i + 1], spec) for i in range(7)]
    assert torch.equal(values, other_values) and torch.equal(values, torch.cat([part[0] for part in parts], 2))
    for name in ("codes", "scale", "zero_point"):
        assert torch.equal(getattr(whole, name), getattr(other, name)), name
        alone = torch.cat([getattr(part[1], name).to(getattr(whole, name).dtype) for part in parts], 2)
        assert torch.equal(getattr(whole, name), alone), name
    assert (whole.scale.dtype == torch.float32) == (scale != 1)


def settings_of(parameter: str, count: int = 2, **changes) -> dict[str, object]:
    return {"nbits": 2, "group_size": 16, "shared_groups": count, "shared_parameter": parameter} | changes


@pytest.mark.parametrize("padding", [None, [37, 2]])
@pytest.mark.parametrize("huge", [1.0, 1e6])
@pytest.mark.parametrize(("parameter", "count"), list(itertools.product(PARAMETERS, (2, 4))))
def test_the_cache_holds_the_same_however_calls_cut_the_tokens(parameter, count, padding, huge):
    key, value = settings_of(parameter, count), settings_of(parameter, nbits=3, clip="mse", rotation="hadamard")
    config = KVQuantConfig(residual_length=16).replace(key=key, value=value)
    states = torch.randn(2, 2, 350, 2, 32, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    states[..., 200, :] *= huge
    layer = assert_cuts_change_nothing(config, states, [5, 200, 1, 144], padding)
    assert config.block_length == 16 * count and layer.quantized_length == 330 // (16 * count) * 16 * count


@pytest.mark.parametrize("changes", COMBINED, ids=str)
def test_feedback_moves_the_targets_of_earlier_rows(changes):
    rows, spec = rows_of(2, 3, 2, D), spec_of(**changes)
    feedback = 0.3 * torch.randn(3, D, D, generator=torch.Generator().manual_seed(1)).tril(-1) / D**0.5
    quantizer = quantizer_of(spec)
    plain, groups = quantizer.quantize(rows), quantizer.quantize(rows, None, feedback)
    assert torch.equal(plain.scale, groups.scale) and torch.equal(plain.zero_point, groups.zero_point)
    values = quantizer.dequantize(groups)
    assert torch.equal(values[..., -1, :], quantizer.dequantize(plain)[..., -1, :])
    targets = rows - torch.einsum("hji,bhnjl->bhnil", feedback, values - rows)
    step = quantizer.expanded(groups)[0].float().repeat_interleave(spec.group_size, -1)
    near = (values - targets).abs() <= 0.5001 * step
    at_end = (groups.codes == 0) | (groups.codes == 2**spec.nbits - 1)
    assert (near | at_end).all() and near.float().mean() > 0.8
    assert not torch.equal(groups.codes, plain.codes)


@pytest.mark.parametrize("changes", COMBINED, ids=str)
def test_ranges_may_be_fitted_to_other_rows(changes):
    clean = rows_of(3, D)
    rows = clean.clone()
    rows[..., :4] = 1000.0
    quantizer = quantizer_of(spec_of(**changes))
    fitted, plain = quantizer.quantize(rows, clean), quantizer.quantize(clean)
    assert torch.equal(fitted.scale, plain.scale) and torch.equal(fitted.zero_point, plain.zero_point)
    assert torch.equal(fitted.codes[..., 4:], plain.codes[..., 4:])
    assert (fitted.codes[..., :4] == 2 ** changes["nbits"] - 1).all()


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_groups": 3}, r"`shared_groups` must be one of \(1, 2, 4\), got 3"),
        ({"shared_groups": True}, r"`shared_groups` must be one of \(1, 2, 4\), got True"),
        (
            {"shared_groups": 2, "shared_parameter": "zero_points"},
            r"`shared_parameter` must be one of \('scale', 'zero_point'\), got 'zero_points'. Did you mean 'zero_p",
        ),
        (
            {"shared_parameter": "zero_point"},
            r"must be scale unless `shared_groups` is one of \(2, 4\), got shared_parameter=zero_point and shared_gro",
        ),
        ({"symmetric": True}, r"must be 1 unless `symmetric` is one of \(False,\), got shared_groups=2 and symm"),
        ({"method": "variance_normalized"}, r"must be 1 unless `method` is one of \('affine',\), got shared_groups=2"),
        ({"method": "innerq"}, r"must be 1 unless `method` is one of \('affine',\), got shared_groups=2"),
        ({"levels": "gaussian"}, r"must be 1 unless `levels` is one of \('uniform',\), got shared_groups=2"),
        ({"levels": (-1.0, 0.0, 0.5, 1.0), "nbits": 2}, r"must be 1 unless `levels` is one of \('uniform',\)"),
        ({"metadata_nbits": 8}, r"must be 1 unless `metadata_nbits` is one of \(16,\), got shared_groups=2 and meta"),
        ({"promoted": 0.25}, r"must be 1 unless `promoted` is one of \(0.0,\), got shared_groups=2 and promoted=0.25"),
        ({"outliers": 0.01}, r"must be 1 unless `outliers` is one of \(0.0,\), got shared_groups=2 and outliers=0.01"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    sharing = {} if set(changes) & {"shared_groups", "shared_parameter"} else {"shared_groups": 2}
    with pytest.raises(ValueError, match=message):
        QuantSpec(**sharing, **changes)
    with pytest.raises(ValueError, match=message):
        KVQuantConfig.from_dict({"key": sharing | changes})


def test_settings_travel_and_say_what_they_are(tmp_path):
    config = KVQuantConfig().replace(key=settings_of("scale"), value=settings_of("zero_point", 4))
    assert KVQuantConfig.from_dict(config.to_dict()) == config
    config.to_yaml(tmp_path / "c.yaml")
    assert KVQuantConfig.from_yaml(tmp_path / "c.yaml") == config
    assert str(config.key) == "2-bit per_channel group 16 2 groups share a scale"
    assert str(config.value) == "2-bit per_token group 16 4 groups share a zero point"
    assert "share" not in str(QuantSpec()) and "share" not in str(QuantSpec(16, shared_groups=2))
    assert guarded(config.key) == replace(config.key, nbits=4)
    old = config.to_dict()
    for side in ("key", "value"):  # files from before there was such a setting
        del old[side]["shared_groups"], old[side]["shared_parameter"]
    assert KVQuantConfig.from_dict(old).key == plain_of(config.key)


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize(
    ("changes", "head_dim", "length", "bits"),
    [
        ({}, 64, None, 2 + 16 * 3 / 32),
        ({"count": 4}, 64, None, 2 + 16 * 5 / 64),
        ({"count": 4, "group_size": 32}, 64, 256, 2 + 16 * 5 / 128),
        ({"count": 4, "group_size": 32}, 64, 64, 2 + 16 * 3 / 64),
        ({"granularity": "per_token"}, 64, None, 2 + 16 * 6 / 64),
        ({"granularity": "per_token", "count": 4}, 80, 32, 2 + 16 * 7 / 80),
        ({"granularity": "per_token", "group_size": 64}, 40, 32, 2 + 16 * 2 / 40),
    ],
)
def test_bits_count_what_is_shared_once(parameter, changes, head_dim, length, bits):
    assert spec_of(parameter, nbits=2, **changes).bits_per_value(head_dim, length) == bits


def test_unquantized_sides_take_no_notice():
    spec = QuantSpec(16, shared_groups=4)
    assert not spec.shares and spec.bits_per_value(64) == 16
    assert KVQuantConfig().replace(key={"nbits": 16, "shared_groups": 4}).block_length == 32


# ---- stores, caches, files ---------------------------------------------------------------------------------------

STORED = [spec_of(**changes) for changes in COMBINED]
STORED += [
    spec_of("zero_point", granularity="per_token", rotation="hadamard"),
    spec_of("scale", 4, granularity="per_token"),
]


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("spec", STORED, ids=str)
def test_every_byte_is_counted_and_earlier_values_stay(spec, head_dim):
    store, block = counted_store(spec, L, head_dim)
    row = head_dim if spec.granularity == "per_token" else L
    groups, stored = row // 16, {"scale": store.scale.shape[-1], "zero_point": store.zero_point.shape[-1]}
    assert stored.pop(spec.shared_parameter) == -(-groups // spec.shared_groups) and set(stored.values()) == {groups}
    before = store.read(0, 4).clone()
    store.append(store.encode(1e6 * block))
    assert store.scale.dtype == store.zero_point.dtype == torch.float32
    assert torch.equal(store.read(0, 4), before)
    again = BlockStore(spec, L, head_dim, torch.float32)
    again.load_state(store.state())
    assert torch.equal(again.read(1, 5), store.read(1, 5))


@pytest.mark.parametrize("spec", STORED, ids=str)
def test_stored_blocks_of_other_settings_are_refused(spec):
    """A cache whose groups do not share must not be taken for one whose groups do, nor one that shares the other."""
    swapped = next(name for name in PARAMETERS if name != spec.shared_parameter)
    for other in (plain_of(spec), replace(spec, shared_parameter=swapped)):
        store, _ = counted_store(other, L, 64)
        with pytest.raises(ValueError, match=r"stored `(scale|zero_point)` must have the shape"):
            BlockStore(spec, L, 64, torch.float32).load_state(store.state())


QUANT = {
    "key": settings_of("scale"),
    "value": settings_of("zero_point", nbits=3, granularity="per_channel"),
    "residual_length": 16,
}


def test_caches_hold_what_they_report_and_come_back_from_files(tmp_path):
    model = tiny_model("llama")
    ids = torch.randint(1, 128, (2, 90), generator=torch.Generator().manual_seed(0))
    cache = QuantCache(model.config, QUANT)
    fed(model, cache, ids, 13)
    assert_reported_bytes(cache)
    report = cache.memory_report()
    nominal = KVQuantConfig.from_dict(QUANT).nominal_bits(model.config.head_dim)
    assert report.bits_per_value_quantized == pytest.approx(nominal) == ((2 + 1.5) + (3 + 1.5)) / 2
    assert report.scales == report.zero_points == report.quantized_values * 0.75 / 8
    cache.save(tmp_path)
    back = QuantCache.load(tmp_path, model.config)
    more = ids.flip(1)[:, :40]
    assert torch.equal(fed(model, back, more, 9), fed(model, cache, more, 9))
    assert "2 groups share a scale" in repr(cache) and "2 groups share a zero point" in repr(cache)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_other_backends_leave_it_to_torch(monkeypatch, parameter, side):
    spec = spec_of(parameter, granularity="per_channel" if side == "key" else "per_token")
    assert not cpu.can_encode(spec, torch.float32, torch.device("cpu"), L, D)
    assert cpu.can_encode(plain_of(spec), torch.float32, torch.device("cpu"), L, D)
    specs = {"key": QuantSpec(), "value": QuantSpec(granularity="per_token")}
    sides = ("key", "value")
    assert None not in triton.word_layouts(tuple(specs[name] for name in sides), L, (D, D), None)
    assert triton.word_layouts(tuple((specs | {side: spec})[name] for name in sides), L, (D, D), None) == (None, None)
    monkeypatch.setattr(notice, "_told", set())
    query, states = torch.randn(1, 2, 1, D), torch.randn(1, 2, 200, D)
    reason = "groups that share a parameter"
    for backend in ("auto", "cpu"):
        layer = QuantLayer(KVQuantConfig(backend=backend).replace(**{side: settings_of(parameter)}))
        layer.update(states, states)
        view = layer.view()
        assert triton.unsupported(view) == f"{side}s with {reason} (`shared_groups`)"
        if backend == "auto":
            with pytest.warns(UserWarning, match=f"The CPU kernel does not read {reason}") as told:
                out = decode_attention(query, view)
                assert torch.equal(out, decode_attention(query, view))
            assert len(told) == 1
            assert torch.equal(out, reference.decode_attention(query, view, None, D**-0.5))
        else:
            with pytest.raises(ValueError, match=f"`backend='cpu'` does not read {reason}"):
                decode_attention(query, view)
