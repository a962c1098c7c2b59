"""Scales and zero points of 8 bits: bounds, what is exact, what stays finite, what blocks depend on, files."""

import itertools
from dataclasses import replace

import pytest
import torch
from harness import assert_reported_bytes, fed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import cpu, decode_attention, notice, reference
from kvquant_hf.quantizers import AffineQuantizer, ByteMetadataQuantizer, PromotedQuantizer, quantizer_of
from kvquant_hf.storage import BlockStore
from tests.quantizers.cuts import assert_cuts_change_nothing
from tests.quantizers.stores import counted_store

D, L = 64, 64
NBITS = (2, 3, 4, 8)


def spec_of(**changes) -> QuantSpec:
    return QuantSpec(**({"group_size": 32, "metadata_nbits": 8} | changes))


def rows_of(*lead: int, seed: int = 0, offset: float = 0.5) -> torch.Tensor:
    """Rows `[..., D, L]` of different widths, `offset` widths away from zero or so."""
    generator = torch.Generator().manual_seed(seed)
    width = (0.7 * torch.randn(*lead, D, 1, generator=generator)).exp()
    middle = 4 * offset * torch.randn(*lead, D, 1, generator=generator)
    return width * (torch.randn(*lead, D, L, generator=generator) + middle)


def round_trip(rows: torch.Tensor, spec: QuantSpec, range_rows: torch.Tensor | None = None):
    """Values, groups, and the scales and zero points that their bytes stand for."""
    quantizer = quantizer_of(spec)
    assert isinstance(quantizer, ByteMetadataQuantizer)
    groups = quantizer.quantize(rows, range_rows)
    assert groups.scale.dtype == groups.codes.dtype == torch.uint8
    assert (groups.zero_point is None) == spec.symmetric
    assert groups.second_level.shape == (
        *rows.shape[:-2],
        1 + spec.num_listed(groups.scale[0].numel() // max(1, groups.second_level[0, ..., 0].numel())),
    )
    return quantizer.dequantize(groups), groups, *quantizer.expanded(groups)


def ranges(rows: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = rows.unflatten(-1, (-1, size))
    return parts.amin(-1), parts.amax(-1)


def worst(errors: torch.Tensor, size: int) -> torch.Tensor:
    return errors.abs().unflatten(-1, (-1, size)).amax(-1)


@pytest.mark.parametrize("offset", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(("nbits", "group_size"), list(itertools.product(NBITS, (16, 32, 64))))
def test_grids_cover_their_ranges_and_are_little_wider(nbits, group_size, offset):
    rows = rows_of(2, 3, 5, offset=offset)
    values, groups, scale, zero_point = round_trip(rows, spec_of(nbits=nbits, group_size=group_size))
    low, high = ranges(rows, group_size)
    span, slack = scale * (2**nbits - 1), 1e-6 * torch.maximum(low.abs(), high.abs())
    assert (zero_point <= low + slack).all() and (zero_point + span >= high - slack).all()
    assert (worst(values - rows, group_size) <= scale / 2 + slack).all()
    # A step of 1/32 octave (1/8 where scales span many) for the scale, and a step of the curve for the zero point.
    octaves = torch.where(groups.second_level[..., :1, None] < 0, 1 / 8, 1 / 32)
    distance = (low + high).abs() / 2 / (high - low)
    step = (0.35**2 + distance.square()).sqrt() / 28
    half = 1.001 + 2**-10 * low.abs() / (high - low)  # as zero points are listed
    bound = 2**octaves * torch.where(groups.zero_point == 0, half, 1 / (1 - 1.02 * step.clamp(max=0.6)))
    assert (span <= bound * (high - low)).logical_or(distance > 16).all()
    assert span.sum() < (1.05 if offset < 1 else 1.2) * (high - low).sum()


@pytest.mark.parametrize("nbits", NBITS)
def test_symmetric_scales_are_rounded_up_by_a_step_at_most(nbits):
    rows = rows_of(2, 3)
    values, groups, scale, zero_point = round_trip(rows, spec_of(nbits=nbits, symmetric=True))
    assert zero_point is None and groups.second_level.shape == (2, 3, 1)
    needed = rows.unflatten(-1, (-1, 32)).abs().amax(-1) / ((2**nbits - 1) / 2)
    assert (scale >= needed * (1 - 1e-6)).all() and (scale <= 1.0011 * 2 ** (1 / 32) * needed).all()
    assert (worst(values - rows, 32) <= scale / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("octaves", [6, 20, 30, 50])
def test_scales_that_differ_by_many_octaves(octaves):
    rows = (
        torch.randn(1, D, L, generator=torch.Generator().manual_seed(0))
        * 2.0 ** torch.linspace(0, octaves, D)[:, None]
    )
    _, groups, scale, _ = round_trip(rows, spec_of(symmetric=True))
    needed = rows.unflatten(-1, (-1, 32)).abs().amax(-1) / 7.5
    assert bool((groups.second_level < 0).all()) == (octaves > 6)
    assert (scale >= needed * (1 - 1e-6)).all()
    reachable = needed > needed.amax() * 2**-31.5
    assert (scale <= 2 ** (1 / 32 if octaves == 6 else 1 / 8) * 1.002 * needed)[reachable].all()
    assert (scale <= needed.amax() * 2**-31.5)[~reachable].all()
    assert (~reachable).any() == (octaves == 50)


def test_zero_points_farthest_from_zero_are_listed_as_they_are():
    rows = rows_of(3, offset=0.2)
    rows[:, [7, 30], :32] += 1000.0
    rows[:, 50, 32:] -= 500.0
    rows[:, 51, 32:] -= 400.0
    _, groups, _, zero_point = round_trip(rows, spec_of(nbits=2))
    low, _ = ranges(rows, 32)
    listed = groups.zero_point == 0
    assert listed.sum((-1, -2)).tolist() == [4] * 3 and groups.second_level.dtype == torch.float16
    assert listed[:, [7, 30], 0].all() and listed[:, [50, 51], 1].all()
    spacing = 2.0**-10 * low.abs()
    assert (zero_point <= low)[listed].all() and (zero_point >= low - spacing)[listed].all()
    assert torch.equal(zero_point[listed].view(3, 4), groups.second_level[:, 1:].float())


@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("changes", [{}, {"clip": "mse"}, {"symmetric": True}], ids=str)
def test_squared_errors_are_little_above_those_of_16_bit_metadata(nbits, changes):
    rows = rows_of(4, 2)
    wide = AffineQuantizer(QuantSpec(nbits=nbits, group_size=32, **changes))
    lost = (wide.dequantize(wide.quantize(rows)) - rows).square().sum()
    values, *_ = round_trip(rows, spec_of(nbits=nbits, **changes))
    assert (values - rows).square().sum() < (1.11 if nbits == 8 else 1.08) * lost


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("nbits", (2, 3))
def test_clipped_ranges_are_chosen_by_the_error_of_what_is_stored(nbits, symmetric):
    rows = rows_of(4, 2)
    rows[..., 5] *= 4
    errors = []
    for clip in ("minmax", "mse"):
        values, *_ = round_trip(rows, spec_of(nbits=nbits, symmetric=symmetric, clip=clip))
        errors.append((values - rows).square().unflatten(-1, (-1, 32)).sum(-1))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert errors[1].sum() < 0.9 * errors[0].sum()


# ---- degenerate input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 300.0, 6e-4, -1e4, 3e38, 1e-30])
def test_blocks_of_one_number_keep_the_documented_bound(nbits, value, clip):
    rows = torch.full((2, D, L), value)
    values, *_ = round_trip(rows, spec_of(nbits=nbits, clip=clip))
    assert ((values - rows).abs() <= abs(value) / (2 * (2**nbits - 1) * 14)).all()
    if value == 0:
        assert (values == 0).all()


@pytest.mark.parametrize("nbits", NBITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 300.0, -1e4])
def test_constant_groups_among_others_are_exact(nbits, value):
    value = torch.tensor(value).half().float()
    rows = rows_of(3)
    rows[:, 5] = value
    values, *_ = round_trip(rows, spec_of(nbits=nbits))
    assert torch.equal(values[:, 5], rows[:, 5])


@settings(max_examples=80, deadline=None)
@given(
    exponent=st.integers(-40, 38),
    spread=st.floats(0, 12),
    offset=st.floats(-(2.0**127), 2.0**127, width=32),
    nbits=st.sampled_from(NBITS),
    clip=st.sampled_from(["minmax", "mse"]),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**16),
)
@example(exponent=38, spread=0.0, offset=0.0, nbits=2, clip="minmax", symmetric=False, seed=0)
@example(exponent=38, spread=0.0, offset=2.0**127, nbits=8, clip="mse", symmetric=True, seed=0)
def test_any_finite_input_gives_finite_parameters_and_values(exponent, spread, offset, nbits, clip, symmetric, seed):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, 24, 32, generator=generator) * (spread * torch.randn(1, 24, 1, generator=generator)).exp()
    largest = torch.finfo(torch.float32).max
    rows = (noise.double() * 10.0**exponent + offset).clamp(-largest, largest).float()
    values, groups, scale, zero_point = round_trip(rows, spec_of(nbits=nbits, clip=clip, symmetric=symmetric))
    for part in (groups.second_level, scale, zero_point, values):
        assert part is None or torch.isfinite(part).all()
    if clip == "minmax":
        rounding = 3e-6 * (rows.double().abs().amax(-1, keepdim=True) + scale.double()) + 1e-36
        assert ((values.double() - rows.double()).abs() <= scale.double() / 2 + rounding).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_undefined_numbers_do_not_spread(number, symmetric):
    rows = rows_of(1)
    rows[0, 5, 7] = number
    values, *_ = round_trip(rows, spec_of(symmetric=symmetric))
    others = [row for row in range(D) if row != 5]
    plain, *_ = round_trip(rows[:, others], spec_of(symmetric=symmetric))
    assert ((values[:, others] - rows[:, others]).abs() <= 1.1 * (plain - rows[:, others]).abs().amax()).all()


# ---- what a block depends on -------------------------------------------------------------------------------------

COMBINED = [
    {"nbits": 2, "group_size": 64, "promoted": 0.25},
    {"nbits": 2, "group_size": 32, "clip": "mse"},
    {"nbits": 3, "group_size": 32, "promoted": 0.5, "clip": "mse"},
    {"nbits": 2, "symmetric": True, "clip": "mse"},
]


@pytest.mark.parametrize("changes", COMBINED, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e5, 1e-7])
def test_a_block_depends_neither_on_its_neighbours_nor_on_its_place_in_memory(changes, scale):
    rows = rows_of(2, 3, 7)
    rows[:, :, 3] *= scale  # numbers that float16 does not hold
    rows[:, :, 5, 9] *= 1e4
    spec = spec_of(**changes)
    values, whole, *_ = round_trip(rows, spec)
    scattered = torch.empty(L, 7, 2, D, 3).permute(2, 4, 1, 3, 0).copy_(rows)
    other_values, other, *_ = round_trip(scattered, spec)
    parts = [round_trip(rows[:, :, i : i + 1], spec) for i in range(7)]
    assert torch.equal(values, other_values) and torch.equal(values, torch.cat([part[0] for part in parts], 2))
    for name in ("codes", "scale", "zero_point", "promoted", "second_level"):
        if getattr(whole, name) is not None:
            assert torch.equal(getattr(whole, name), getattr(other, name)), name
            alone = torch.cat([getattr(part[1], name).to(getattr(whole, name).dtype) for part in parts], 2)
            assert torch.equal(getattr(whole, name), alone), name
    assert (whole.second_level.dtype == torch.float32) == (scale != 1)


@pytest.mark.parametrize("padding", [None, [37, 2]])
@pytest.mark.parametrize("changes", COMBINED[:3], ids=str)
def test_the_cache_holds_the_same_however_calls_cut_the_tokens(changes, padding):
    value = {"nbits": 2, "metadata_nbits": 8, "symmetric": True, "rotation": "hadamard", "clip": "mse"}
    config = KVQuantConfig(residual_length=16).replace(key=changes | {"metadata_nbits": 8}, value=value)
    states = torch.randn(2, 2, 350, 2, 32, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    states[..., 200, :] *= 1e5
    assert_cuts_change_nothing(config, states, [5, 200, 1, 144], padding)


# ---- together with other settings --------------------------------------------------------------------------------


def test_promoted_rows_are_those_of_the_promoted_quantizer():
    rows = rows_of(2, 3, 4)
    partners = torch.arange(D).roll(D // 2)
    spec = spec_of(nbits=2, group_size=64, promoted=0.25)
    groups = quantizer_of(spec, partners).quantize(rows)
    wide = PromotedQuantizer(spec, partners)
    expected = wide.quantize(rows)
    assert torch.equal(groups.promoted, expected.promoted)
    chosen = torch.zeros(2, 3, 4, D, dtype=torch.bool).scatter_(-1, groups.promoted.long(), True)
    assert groups.codes[~chosen].max() == 3 and groups.codes[chosen].max() == 15
    lost = (wide.dequantize(expected) - rows).square().sum()
    assert (quantizer_of(spec).dequantize(groups) - rows).square().sum() < 1.08 * lost


@pytest.mark.parametrize("changes", COMBINED, ids=str)
def test_feedback_moves_the_targets_of_earlier_rows(changes):
    rows, spec = rows_of(2, 3, 2), spec_of(**changes)
    feedback = 0.3 * torch.randn(3, D, D, generator=torch.Generator().manual_seed(1)).tril(-1) / D**0.5
    quantizer = quantizer_of(spec)
    plain, groups = quantizer.quantize(rows), quantizer.quantize(rows, None, feedback)
    for name in ("scale", "zero_point", "second_level"):
        if getattr(plain, name) is not None:
            assert torch.equal(getattr(plain, name), getattr(groups, name)), name
    values = quantizer.dequantize(groups)
    error = values - rows
    assert torch.equal(values[..., -1, :], quantizer.dequantize(plain)[..., -1, :])
    targets = rows - torch.einsum("hji,bhnjl->bhnil", feedback, error)
    step = quantizer.expanded(groups)[0].repeat_interleave(spec.group_size, -1)
    near = (values - targets).abs() <= 0.5001 * step
    levels = 2.0 ** (spec.nbits + 2) - 1 if spec.promoted else 2**spec.nbits - 1
    at_end = (groups.codes == 0) | (groups.codes == 2**spec.nbits - 1) | (groups.codes == levels)
    assert (near | at_end).all() and near.float().mean() > 0.8
    assert not torch.equal(groups.codes, plain.codes)


@pytest.mark.parametrize("changes", COMBINED[:2], ids=str)
def test_ranges_may_be_fitted_to_other_rows(changes):
    rows, other = rows_of(1, 2, 1), rows_of(1, 2, 1, seed=1)
    _, fitted, *_ = round_trip(rows, spec_of(**changes), other)
    _, own, *_ = round_trip(other, spec_of(**changes))
    for name in ("scale", "zero_point", "second_level"):
        assert torch.equal(getattr(fitted, name), getattr(own, name)), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata_nbits": 4}, r"`metadata_nbits` must be one of \(8, 16\), got 4"),
        ({"metadata_nbits": 8, "method": "variance_normalized"}, "16 unless .method. is one of .*metadata_nbits=8"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        QuantSpec(**changes)


# ---- stores, caches, files ---------------------------------------------------------------------------------------

STORED = [spec_of(**changes) for changes in COMBINED]
STORED += [spec_of(granularity="per_token", rotation="hadamard", symmetric=True), spec_of(granularity="per_token")]


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("spec", STORED, ids=str)
def test_every_byte_is_counted_and_earlier_values_stay(spec, head_dim):
    store, block = counted_store(spec, L, head_dim)
    before = store.read(0, 4).clone()
    plain = replace(spec, metadata_nbits=16)
    numbers = 8 * spec.num_promoted(head_dim) / (L * head_dim)
    shared = 16 * store.second_level.shape[-1] / (L * head_dim)
    words = plain.metadata_bits(head_dim, L) - numbers
    assert spec.metadata_bits(head_dim, L) == pytest.approx(words / 2 + numbers + shared) and shared < 0.03
    assert store.second_level.dtype == torch.float16
    store.append(store.encode(1e6 * block))
    assert store.second_level.dtype == torch.float32
    assert torch.equal(store.read(0, 4), before)
    again = BlockStore(spec, L, head_dim, torch.float32)
    again.load_state(store.state())
    assert torch.equal(again.read(1, 5), store.read(1, 5))


QUANT = {
    "key": {"nbits": 2, "group_size": 32, "promoted": 0.25, "metadata_nbits": 8},
    "value": {"nbits": 3, "metadata_nbits": 8, "symmetric": True, "rotation": "hadamard", "clip": "mse"},
    "residual_length": 16,
}


def test_caches_hold_what_they_report_and_come_back_from_files(tmp_path):
    model = tiny_model("llama")
    ids = torch.randint(1, 128, (2, 90), generator=torch.Generator().manual_seed(0))
    cache = QuantCache(model.config, QUANT)
    fed(model, cache, ids, 13)
    assert_reported_bytes(cache)
    nominal = KVQuantConfig.from_dict(QUANT).nominal_bits(model.config.head_dim)
    assert cache.memory_report().bits_per_value_quantized == pytest.approx(nominal)
    cache.save(tmp_path)
    back = QuantCache.load(tmp_path, model.config)
    more = ids.flip(1)[:, :40]
    assert torch.equal(fed(model, back, more, 9), fed(model, cache, more, 9))
    assert "8-bit metadata" in repr(cache)


def test_other_backends_leave_it_to_torch(monkeypatch):
    assert not cpu.can_encode(spec_of(), torch.float32, torch.device("cpu"), L, D)
    monkeypatch.setattr(notice, "_told", set())
    query, states = torch.randn(1, 2, 1, D), torch.randn(1, 2, 200, D)
    for backend in ("auto", "cpu"):
        layer = QuantLayer(KVQuantConfig(backend=backend).replace(**QUANT))
        layer.update(states, states)
        view = layer.view()
        if backend == "auto":
            with pytest.warns(UserWarning, match="does not read `metadata_nbits=8`"):
                out = decode_attention(query, view)
            assert torch.equal(out, reference.decode_attention(query, view, None, D**-0.5))
        else:
            with pytest.raises(ValueError, match="`backend='cpu'` does not read `metadata_nbits=8`"):
                decode_attention(query, view)
