"""Levels listed one by one: what settings take them, the bound of errors, outliers beside them."""

import dataclasses
import itertools
import pickle

import pytest
import torch

from kvquant_hf import KVQuantConfig, QuantSpec
from kvquant_hf.guard import guarded
from kvquant_hf.ops import cpu
from kvquant_hf.quantizers import OutlierQuantizer, places_of, quantizer_of
from kvquant_hf.spec import TABLE_LIMIT
from tests.quantizers.cuts import assert_cuts_change_nothing

TABLES = {
    2: (-0.9, -0.2, 0.35, 0.8),
    3: (-1.0, -0.62, -0.3, -0.1, 0.05, 0.25, 0.6, 1.0),
    4: tuple(i / 10 - 0.6 if i < 8 else i / 8 - 0.8 for i in range(16)),
}
# Levels far outside or in one corner of the range are allowed, too: Q-Norm may move them.
ODD = (-2.0, 0.1, 0.100001, 0.2)


def heavy(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers with long tails."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) ** 3


def kept_exact(groups) -> torch.Tensor:
    """Which entries are outliers, bool, of the shape of the codes."""
    found = torch.zeros(groups.codes.flatten(-2).shape, dtype=torch.bool)
    return found.scatter(-1, places_of(groups.outliers.places), True).view(groups.codes.shape)


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"levels": [0, 1, 2]}, r"`levels` must be one of \('uniform', .*2 \*\* nbits = 16 numbers, got 3: \(0\.0,"),
        ({"levels": TABLES[3], "nbits": 2}, r"2 \*\* nbits = 4 numbers, got 8"),
        ({"levels": TABLES[2], "nbits": 8}, r"`nbits` must be one of \(2, 3, 4\) with `levels=\(-0\.9,"),
        ({"levels": [], "nbits": 2}, "numbers, got 0"),
        (
            {"levels": [0, 0, 0.5, 1], "nbits": 2},
            r"`levels` must be ascending numbers from -2 to 2 .*got \[0, 0, 0\.5",
        ),
        ({"levels": [0, 1e-9, 1, 1 + 1e-9], "nbits": 2}, "that differ in float32"),
        ({"levels": [0.5, 0, 1, 1.5], "nbits": 2}, "ascending numbers"),
        ({"levels": [-2.01, 0, 1, 2], "nbits": 2}, "from -2 to 2"),
        ({"levels": [float("nan"), 0, 1, 2], "nbits": 2}, "ascending numbers"),
        ({"levels": [0, 0.5, 1, float("inf")], "nbits": 2}, "ascending numbers"),
        ({"levels": [False, 0.5, True, 2], "nbits": 2}, "ascending numbers"),
        ({"levels": ["-1", 0, 0.5, 1], "nbits": 2}, r"got \['-1', 0, 0\.5, 1\]"),
        ({"levels": {1, 2, 3, 4}, "nbits": 2}, "`levels` must be one of"),
        ({"levels": TABLES[2], "nbits": 2, "promoted": 0.25}, "`promoted` must be 0 unless `levels` is one of"),
        ({"levels": TABLES[2], "nbits": 2, "metadata_nbits": 8}, "unless `levels` is one of"),
        ({"levels": TABLES[2], "nbits": 2, "method": "innerq"}, r"`method` must be one of \('affine',\)"),
        ({"levels": TABLES[2], "nbits": 2, "method": "turboquant"}, r"`levels` must be one of \('gaussian',\)"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        QuantSpec(**changes)


def test_listed_levels_are_values_like_other_settings():
    spec = QuantSpec(nbits=2, levels=[-1, 0, 0.5, 1])
    same = QuantSpec(nbits=2, levels=(-1.0, 0.0, 0.5, 1.0))
    assert spec == same and hash(spec) == hash(same) and spec.levels == (-1.0, 0.0, 0.5, 1.0)
    assert spec != QuantSpec(nbits=2) and pickle.loads(pickle.dumps(spec)) == spec
    assert dataclasses.replace(spec, group_size=64).levels == spec.levels
    with pytest.raises(ValueError, match="8 numbers, got 4"):
        dataclasses.replace(spec, nbits=3)
    assert not QuantSpec(nbits=16, levels=TABLES[2]).is_quantized
    assert str(spec) == "2-bit per_channel group 32 table levels"
    assert spec.bits_per_value(64) == QuantSpec(nbits=2).bits_per_value(64)
    assert not cpu.can_encode(spec, torch.float32, torch.device("cpu"), 32, 32)


def test_overrides_by_layer_keep_and_replace_levels():
    config = KVQuantConfig.from_dict(
        {
            "key": {"nbits": 2, "levels": [-1, 0, 0.5, 1]},
            "layers": {1: {"key": {"levels": [-1, -0.5, 0, 1]}}, "2-3": {}},
        }
    )
    levels = [config.for_layer(i, 4, "full_attention").key.levels for i in range(4)]
    assert levels == [(-1, 0, 0.5, 1), (-1, -0.5, 0, 1), (-1, 0, 0.5, 1), (-1, 0, 0.5, 1)]
    with pytest.raises(TypeError):
        config.layers[1]["key"]["levels"][0] = 7
    with pytest.raises(ValueError, match=r"`nbits` must be one of \(2, 3, 4\)"):
        KVQuantConfig.from_dict({"key": {"nbits": 2, "levels": ODD}, "layers": {0: {"key": {"nbits": 8}}}})


def test_guarded_keys_of_listed_levels_get_even_ones():
    assert guarded(QuantSpec(nbits=2, levels=TABLES[2], group_size=64)) == QuantSpec(nbits=4, group_size=64)
    assert guarded(QuantSpec(nbits=4, levels=TABLES[4])) == QuantSpec(nbits=8)
    assert guarded(QuantSpec(nbits=3, levels="gaussian")) == QuantSpec(nbits=4, levels="gaussian")
    assert guarded(QuantSpec(nbits=4, levels="gaussian")) == QuantSpec(nbits=8)
    assert guarded(QuantSpec(nbits=8, levels="e4m3")) == QuantSpec(nbits=8, levels="e4m3")


# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("nbits", "group_size"), list(itertools.product(TABLES, (16, 64))))
@pytest.mark.parametrize("length", [16, 63, 64, 200])
def test_every_number_takes_its_nearest_level(nbits, group_size, length, symmetric):
    rows = heavy(3, length) + 0.5
    spec = QuantSpec(nbits=nbits, group_size=group_size, symmetric=symmetric, levels=TABLES[nbits])
    quantizer = quantizer_of(spec)
    groups = quantizer.quantize(rows)
    values = quantizer.dequantize(groups)
    assert groups.scale.dtype == torch.float16
    table = torch.tensor(TABLES[nbits])
    for place, (x, y) in enumerate(zip(rows.split(group_size, -1), values.split(group_size, -1), strict=True)):
        half = x.abs().amax(-1) if symmetric else (x.amax(-1) - x.amin(-1)) / 2
        scale, zero = groups.scale[:, place].float(), torch.zeros(3)
        torch.testing.assert_close(scale, half, rtol=2e-3, atol=1e-4)
        if groups.zero_point is not None:
            zero = groups.zero_point[:, place].float()
            torch.testing.assert_close(zero, (x.amax(-1) + x.amin(-1)) / 2, rtol=2e-3, atol=1e-3)
        distance = (table * scale[:, None, None] + zero[:, None, None] - x[..., None]).abs().amin(-1)
        assert ((x - y).abs() <= distance + 1e-5 * half[:, None]).all()
        # The bound that the quantizer states.
        reach = max(float(table.diff().max()) / 2, 1 - TABLES[nbits][-1], 1 + TABLES[nbits][0])
        assert ((x - y).abs() <= (reach + 2e-3) * half[:, None] + 1e-4).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 300.0, 1e5, 3e38])
@pytest.mark.parametrize("table", [TABLES[2], ODD])
def test_constant_groups_come_back(value, table):
    rows = torch.full((3, 40), value)
    for outliers, clip in itertools.product((0.0, 0.02), ("minmax", "mse")):
        quantizer = quantizer_of(QuantSpec(nbits=2, levels=table, outliers=outliers, clip=clip))
        values = quantizer.dequantize(quantizer.quantize(rows))
        torch.testing.assert_close(values, rows, rtol=2**-11, atol=0)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [1e-40, 1e-9, 1e6, 1e38])
def test_levels_outside_the_range_stay_finite(size, symmetric):
    rows = (heavy(4, 64).clamp(-3, 3) * size).clamp(-3.4e38, 3.4e38)
    assert ODD[0] == -TABLE_LIMIT
    for outliers in (0.0, 0.01):
        quantizer = quantizer_of(QuantSpec(nbits=2, levels=ODD, symmetric=symmetric, outliers=outliers))
        groups = quantizer.quantize(rows, 0.01 * rows)
        assert torch.isfinite(quantizer.dequantize(groups)).all() and torch.isfinite(groups.scale).all()


def test_even_levels_are_nearly_uniform_codes():
    rows = heavy(16, 64)
    even = tuple(torch.linspace(-1, 1, 8).tolist())
    errors = []
    for levels in ("uniform", even):
        quantizer = quantizer_of(QuantSpec(nbits=3, levels=levels))
        errors.append(float((quantizer.dequantize(quantizer.quantize(rows)) - rows).square().mean()))
    assert errors[0] == pytest.approx(errors[1], rel=0.01)


# ---- outliers beside uneven levels -------------------------------------------------------------------------------


LEVELS = [(2, "gaussian"), (3, "laplace"), (8, "e4m3"), (2, TABLES[2]), (3, TABLES[3]), (4, TABLES[4])]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize(("nbits", "levels"), LEVELS)
@pytest.mark.parametrize("length", [33, 64])
def test_outliers_are_exact_and_the_rest_is_as_without_them(nbits, levels, length, clip, symmetric):
    rows = heavy(2, 3, 20, length).half().float()
    spec = QuantSpec(nbits=nbits, levels=levels, clip=clip, symmetric=symmetric, outliers=0.01)
    quantizer = quantizer_of(spec)
    assert isinstance(quantizer, OutlierQuantizer)
    groups = quantizer.quantize(rows)
    values, exact = quantizer.dequantize(groups), kept_exact(groups)
    assert torch.equal(values[exact], rows[exact])
    even = quantizer_of(dataclasses.replace(spec, levels="uniform")).quantize(rows) if nbits < 8 else groups
    assert torch.equal(groups.outliers.places, even.outliers.places)
    plain = quantizer_of(dataclasses.replace(spec, outliers=0.0))
    without = (plain.dequantize(plain.quantize(rows)) - rows).square().sum()
    assert (values - rows).square().sum() < without
    # What is left is quantized as if outliers had never been more than their groups' ranges.
    low = torch.stack([x.amin(-1) for x in rows.masked_fill(exact, torch.inf).split(32, -1)], -1)
    high = torch.stack([x.amax(-1) for x in rows.masked_fill(exact, -torch.inf).split(32, -1)], -1)
    expand = [t.repeat_interleave(32, -1)[..., :length] for t in (low, high)]
    if not symmetric and bool((low <= high).all()):
        calm = plain.quantize(rows.clamp(*expand))
        assert torch.equal(calm.scale, groups.scale) and torch.equal(calm.codes[~exact], groups.codes[~exact])


def test_rounding_by_queries_takes_outliers_for_exact():
    rows, feedback = heavy(1, 2, 3, 16, 32), 0.3 * torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1))
    feedback = feedback.tril(-1)
    # Levels within the range: the codes beneath outliers are off, which nobody may make good.
    quantizer = quantizer_of(QuantSpec(nbits=2, levels=TABLES[2], outliers=0.02))
    plain, groups = quantizer.quantize(rows), quantizer.quantize(rows, None, feedback)
    assert torch.equal(groups.scale, plain.scale) and torch.equal(groups.outliers.places, plain.outliers.places)
    exact = kept_exact(groups)
    values = quantizer.dequantize(groups)
    error = (values - rows).masked_fill(exact, 0.0)
    table, off = torch.tensor(TABLES[2]), torch.zeros_like(rows)
    for row in reversed(range(16)):
        target = rows[..., row, :] - off[..., row, :]
        scale, zero = groups.scale[..., row, :].float(), groups.zero_point[..., row, :].float()
        distance = (table * scale[..., None] + zero[..., None] - target[..., None]).abs().amin(-1)
        assert ((values[..., row, :] - target).abs() <= distance + 1e-5)[~exact[..., row, :]].all()
        for i in range(row):
            off[..., i, :] += feedback[:, None, row, i, None] * error[..., row, :]
    assert not torch.equal(plain.codes, groups.codes)


@pytest.mark.parametrize("padding", [None, [37, 2]])
def test_the_cache_holds_the_same_however_calls_cut_the_tokens(padding):
    config = KVQuantConfig.from_dict(
        {
            "key": {"nbits": 3, "levels": TABLES[3], "outliers": 0.01, "group_size": 16},
            "value": {"nbits": 2, "levels": "gaussian", "outliers": 0.02, "group_size": 16, "symmetric": True},
            "residual_length": 16,
        }
    )
    states = heavy(2, 2, 250, 2, 32).transpose(2, 3)
    layer = assert_cuts_change_nothing(config, states, [5, 100, 1, 144], padding)
    assert layer.quantized_length == (250 - 4 - 16) // 16 * 16
