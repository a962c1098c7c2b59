"""Outliers kept exact: which entries, the bounds of the others, their place in stores, files and caches."""

import itertools

import pytest
import torch
from harness import assert_reported_bytes, forward, quant_cache, random_ids, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec
from kvquant_hf.ops import cpu, triton
from kvquant_hf.quantizers import AffineQuantizer, OutlierQuantizer, QuantizedGroups, places_of
from kvquant_hf.storage import BlockStore
from tests.quantizers.cuts import assert_cuts_change_nothing

SHARES = (0.005, 0.01, 0.02)
QUANT = settings(
    3, 2, key={"outliers": 0.01}, value={"outliers": 0.02, "rotation": "hadamard", "symmetric": True, "clip": "mse"}
)


def heavy(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers with long tails."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) ** 3


def round_trip(rows: torch.Tensor, *range_rows: torch.Tensor, **changes) -> tuple[torch.Tensor, QuantizedGroups]:
    quantizer = OutlierQuantizer(QuantSpec(**changes))
    groups = quantizer.quantize(rows, *range_rows)
    assert int(groups.codes.max()) < 2 ** changes["nbits"]
    return quantizer.dequantize(groups), groups


def exact_entries(groups: QuantizedGroups) -> torch.Tensor:
    """Which entries are outliers, bool, of the shape of the codes."""
    found = torch.zeros(groups.codes.flatten(-2).shape, dtype=torch.bool)
    return found.scatter(-1, places_of(groups.outliers.places), True).view(groups.codes.shape)


def ranges_left(rows: torch.Tensor, exact: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Range of what each group keeps, `[..., num_groups]`; twice the largest size if symmetric."""
    parts = []
    for first in range(0, rows.shape[-1], spec.group_size):
        x, gone = (t[..., first : first + spec.group_size] for t in (rows, exact))
        if spec.symmetric:
            parts.append(2 * x.abs().masked_fill(gone, 0.0).amax(-1))
        else:
            high, low = x.masked_fill(gone, -torch.inf).amax(-1), x.masked_fill(gone, torch.inf).amin(-1)
            parts.append(torch.where(high >= low, high - low, 0.0))
    return torch.stack(parts, -1)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    ("nbits", "group_size", "length"), list(itertools.product((2, 3, 8), (16, 32, 64, 128), (16, 63, 65, 128)))
)
def test_outliers_are_exact_and_the_others_within_half_a_step_of_what_is_left(
    nbits, group_size, length, share, symmetric
):
    rows = heavy(2, 3, 20, length).half().float()  # groups of one entry are then exact
    spec = QuantSpec(nbits=nbits, group_size=group_size, outliers=share, symmetric=symmetric)
    values, groups = round_trip(rows, nbits=nbits, group_size=group_size, outliers=share, symmetric=symmetric)
    exact = exact_entries(groups)
    count = max(1, round(share * 20 * length))
    assert (exact.sum((-2, -1)) == count).all() and groups.outliers.places.shape == (2, 3, count)
    assert groups.outliers.places.dtype == torch.int16 and groups.outliers.value.dtype == torch.float16
    assert torch.equal(values[exact], rows[exact].half().float())
    half_steps = ranges_left(rows, exact, spec) / (2**nbits - 1) / 2
    error = (values - rows).abs().masked_fill(exact, 0.0)
    for i, part in enumerate(error.split(group_size, -1)):
        assert (part.amax(-1) <= 1.05 * half_steps[..., i] + 1e-6).all()
    plain = AffineQuantizer(spec)
    without = (plain.dequantize(plain.quantize(rows)) - rows).square().sum()
    assert (values - rows).square().sum() < 0.9 * without


def least_total(curves: list[list[float]], count: int) -> float:
    """Least sum of one number of each curve whose places add up to `count`, by dynamic programming."""
    best = [0.0] + [float("inf")] * count
    for curve in curves:
        best = [min(best[have - j] + cost for j, cost in enumerate(curve) if j <= have) for have in range(count + 1)]
    return best[count]


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    distinct=st.sampled_from([2, 5, 1000]),
    power=st.sampled_from([1, 3]),
    symmetric=st.booleans(),
    length=st.sampled_from([16, 24, 32, 48]),
)
def test_no_other_choice_narrows_the_ranges_more(seed, distinct, power, symmetric, length):
    """Up to what part of one group's run of like outliers costs: between the optimum of K and that of K + 1 - J."""
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(1, 25, length, generator=generator) ** power * distinct / 4).round() * 4 / distinct
    spec = QuantSpec(nbits=4, group_size=32, outliers=0.02, symmetric=symmetric)
    exact = exact_entries(OutlierQuantizer(spec).quantize(rows))
    found = ranges_left(rows, exact, spec).double().square().sum()
    count, curves = int(exact.sum()), []
    for row in rows[0]:
        for group in row.split(32):
            ranked = (group.abs() if symmetric else group).sort().values.tolist()
            most = min(4, max(1, (len(ranked) - 1) // 2))
            if symmetric:
                curves.append([(2 * ranked[-1 - j]) ** 2 for j in range(most + 1)])
            else:
                runs = [[ranked[-1 - j + i] - ranked[i] for i in range(j + 1)] for j in range(most + 1)]
                curves.append([min(run) ** 2 for run in runs])
    assert count == round(0.02 * rows.numel())
    assert least_total(curves, count) * (1 - 1e-6) <= found <= least_total(curves, count - 3) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("symmetric", [False, True])
def test_planted_outliers_are_found_alone_and_in_pairs(symmetric):
    rows = torch.rand(1, 64, 64, generator=torch.Generator().manual_seed(0)) - 0.5
    count = round(0.01 * 64 * 64)
    rows.view(-1)[: 97 * count : 97] = torch.tensor([3.0, -3.0, 5.0]).repeat(-(-count // 3))[:count]
    _, groups = round_trip(rows, nbits=2, group_size=64, outliers=0.01, symmetric=symmetric)
    assert places_of(groups.outliers.places).tolist() == [list(range(0, 97 * count, 97))]
    pairs = torch.rand(1, 50, 64, generator=torch.Generator().manual_seed(0)) - 0.5
    pairs[:, ::4, 10:12] = 9.0  # neither of two is worth anything without the other
    exact = exact_entries(round_trip(pairs, nbits=2, group_size=64, outliers=0.01, symmetric=symmetric)[1])
    assert exact[:, ::4, 10:12].all()


def test_places_of_large_blocks():
    for rows, dtype in ((512, torch.int16), (513, torch.int32)):
        block = torch.zeros(1, rows, 128)
        block[0, -1, -1] = 7.0
        values, groups = round_trip(block, nbits=2, group_size=128, outliers=0.005)
        assert groups.outliers.places.dtype == dtype
        assert places_of(groups.outliers.places)[0, -1] == rows * 128 - 1
        assert torch.equal(values, block)


# ---- what the result depends on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_block_depends_neither_on_its_neighbours_nor_on_memory_nor_on_the_order_within_groups(symmetric):
    spec = QuantSpec(nbits=3, group_size=32, outliers=0.02, symmetric=symmetric)
    quantizer = OutlierQuantizer(spec)
    blocks = heavy(2, 3, 5, 24, 80)
    whole = quantizer.quantize(blocks)
    scattered = torch.empty(80, 5, 2, 24, 3).permute(2, 4, 1, 3, 0).copy_(blocks)
    one_by_one = [quantizer.quantize(blocks[:, :, i : i + 1]) for i in range(5)]
    other = quantizer.quantize(scattered)
    for name in ("codes", "scale", "zero_point"):
        if getattr(whole, name) is not None:
            assert torch.equal(getattr(whole, name), getattr(other, name))
            assert torch.equal(getattr(whole, name), torch.cat([getattr(g, name) for g in one_by_one], 2))
    for i in range(2):
        assert torch.equal(whole.outliers[i], other.outliers[i])
        assert torch.equal(whole.outliers[i], torch.cat([g.outliers[i] for g in one_by_one], 2))
    shuffle = torch.cat([first + torch.randperm(min(32, 80 - first)) for first in range(0, 80, 32)])
    moved = quantizer.dequantize(quantizer.quantize(blocks[..., shuffle]))
    assert torch.equal(moved, quantizer.dequantize(whole)[..., shuffle])


def test_a_block_of_huge_outliers_leaves_those_of_its_neighbours_in_float16():
    blocks = heavy(1, 1, 2, 32, 32)
    blocks[0, 0, 1, 3, 4] = 1e6
    alone, _ = round_trip(blocks[:, :, :1], nbits=4, outliers=0.01)
    values, groups = round_trip(blocks, nbits=4, outliers=0.01)
    assert groups.outliers.value.dtype == torch.float32 and groups.scale.dtype == torch.float16
    assert torch.equal(values[:, :, :1], alone)
    assert values[0, 0, 1, 3, 4] == 1e6
    tiny, groups = round_trip(1e-7 * blocks[:, :, :1], nbits=4, outliers=0.01)
    assert torch.equal(tiny[exact_entries(groups)], 1e-7 * blocks[:, :, :1][exact_entries(groups)])


def test_ranges_and_places_may_be_fitted_to_other_rows():
    clean = heavy(2, 16, 64)
    rows = clean.clone()
    rows[:, :, :5] = 500.0  # pads
    values, fitted = round_trip(rows, clean, nbits=4, outliers=0.01)
    _, plain = round_trip(clean, nbits=4, outliers=0.01)
    assert torch.equal(fitted.scale, plain.scale) and torch.equal(fitted.outliers.places, plain.outliers.places)
    kept = ~exact_entries(fitted)
    assert torch.equal(fitted.codes[..., 5:][kept[..., 5:]], plain.codes[..., 5:][kept[..., 5:]])
    assert torch.equal(values[~kept], rows[~kept].half().float())


def test_rounding_by_queries_takes_outliers_for_exact():
    rows, feedback = heavy(1, 2, 3, 16, 32), torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1))
    quantizer = OutlierQuantizer(QuantSpec(nbits=3, outliers=0.02))
    plain = quantizer.quantize(rows)
    exact, off = exact_entries(plain), torch.zeros_like(rows)
    groups = quantizer.quantize(rows, None, feedback)
    assert torch.equal(groups.scale, plain.scale) and torch.equal(groups.outliers.places, plain.outliers.places)
    error = (quantizer.dequantize(groups) - rows).masked_fill(exact, 0.0)
    scale, zero = (t[..., 0] for t in (plain.scale.float(), plain.zero_point.float()))
    for row in reversed(range(16)):
        target = rows[..., row, :] - off[..., row, :]
        want = ((target - zero[..., row, None]) / scale[..., row, None]).round().clamp(0, 7)
        differs = (want != groups.codes[..., row, :]) & ~exact[..., row, :]
        assert differs.sum() <= 1  # ties of sums in another order
        for i in range(row):
            off[..., i, :] += feedback[:, None, row, i, None] * error[..., row, :]


# ---- degenerate blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 17, 33, 40, 64])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 300.0, 1e5, 3e38])
def test_constant_blocks_stay_exact(value, length):
    rows = torch.full((2, 20, length), value).half().float() if value < 6e4 else torch.full((2, 20, length), value)
    values, groups = round_trip(rows, nbits=2, outliers=0.01)
    assert torch.equal(values, rows)
    assert len(groups.outliers.places[0].unique()) == max(1, round(0.2 * length))
    for symmetric in (False, True):
        _, groups = round_trip(rows, nbits=2, outliers=0.01, symmetric=symmetric)
        assert int(places_of(groups.outliers.places).max()) < 20 * length


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    exponent=st.integers(-38, 38),
    offset=st.floats(-(2.0**126), 2.0**126, width=32),
    nbits=st.sampled_from((2, 3, 4, 8)),
    symmetric=st.booleans(),
    clip=st.sampled_from(["minmax", "mse"]),
    length=st.sampled_from([1, 2, 16, 33, 40]),
    seed=st.integers(0, 2**16),
)
def test_any_finite_input_gives_finite_parameters_and_values(exponent, offset, nbits, symmetric, clip, length, seed):
    noise = heavy(1, 24, length, seed=seed)
    rows = (noise.double() * 10.0**exponent + offset).clamp(-3.4e38, 3.4e38).float()
    values, groups = round_trip(rows, nbits=nbits, symmetric=symmetric, clip=clip, outliers=0.02)
    for part in (values, groups.scale, groups.outliers.value):
        assert torch.isfinite(part).all()
    assert groups.zero_point is None or torch.isfinite(groups.zero_point).all()
    exact = exact_entries(groups)
    size = rows[exact].abs().double()
    assert ((values[exact] - rows[exact]).double().abs() <= torch.maximum(size * 2**-11, torch.tensor(2.0**-25))).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bad", [1e30, float("inf"), float("nan")])
def test_undefined_and_huge_numbers_are_outliers_and_spread_nowhere(bad, symmetric):
    rows = heavy(1, 16, 64)
    rows[0, 5, 7] = bad
    values, groups = round_trip(rows, nbits=4, outliers=0.01, symmetric=symmetric)
    assert torch.equal(values[0, 5, 7], rows[0, 5, 7]) or (bad != bad and values[0, 5, 7].isnan())
    assert groups.scale.dtype == torch.float16
    values[0, 5, 7] = rows[0, 5, 7] = 0.0
    assert (values - rows).abs().max() < 0.1 * rows.abs().max()


# ---- stores and files --------------------------------------------------------------------------------------------

SPECS = [
    QuantSpec(3, granularity, 32, rotation=rotation, symmetric=symmetric, outliers=share)
    for granularity in ("per_channel", "per_token")
    for share in SHARES
    for rotation, symmetric in (("none", False), ("hadamard", True))
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_stores_give_back_what_the_quantizer_made_and_count_every_byte(spec):
    length, head_dim = 64, 80
    blocks = heavy(2, 3, 5, length, head_dim)
    at_once = BlockStore(spec, length, head_dim, torch.float32)
    at_once.append(at_once.encode(blocks))
    store = BlockStore(spec, length, head_dim, torch.float32)
    for part in blocks.split(2, dim=2):
        store.append(store.encode(part))
    assert torch.equal(store.read(0, 5), at_once.read(0, 5))
    if spec.rotation == "none":
        rows = blocks.transpose(-1, -2) if spec.granularity == "per_channel" else blocks
        quantizer = OutlierQuantizer(spec)
        values = quantizer.dequantize(quantizer.quantize(rows))
        assert torch.equal(store.read(0, 5), values.transpose(-1, -2) if spec.granularity == "per_channel" else values)
    held = sum(tensor.untyped_storage().nbytes() for tensor in store.tensors())
    parts = store.bytes_by_part()
    assert sum(parts.values()) == held
    assert 8 * (held - parts["unused"]) == pytest.approx(spec.bits_per_value(head_dim, length) * blocks.numel())
    share = 8 * 2 * store.outlier_index[:, :, :5].nbytes / blocks.numel()
    assert share == pytest.approx(32 * spec.outliers, rel=0.02)
    again = BlockStore(spec, length, head_dim, torch.float32)
    again.load_state(store.state())
    assert torch.equal(again.read(1, 4), store.read(1, 4))


def test_damaged_outliers_are_named():
    spec = QuantSpec(2, outliers=0.01)
    store = BlockStore(spec, 32, 24, torch.float32)
    store.append(store.encode(heavy(1, 1, 2, 32, 24)))
    state = store.state()
    index = state["outlier_index"]
    for bad in (torch.full_like(index, -1), torch.full_like(index, 32 * 24), index.flip(-1)):
        with pytest.raises(ValueError, match="ascending places below 768"):
            BlockStore(spec, 32, 24, torch.float32).load_state(state | {"outlier_index": bad})
    with pytest.raises(ValueError, match="stored `outlier_value` must have the shape"):
        BlockStore(spec, 32, 24, torch.float32).load_state(state | {"outlier_value": state["outlier_value"][..., 1:]})
    del state["outlier_value"]
    with pytest.raises(ValueError, match="must have the tensors"):
        BlockStore(spec, 32, 24, torch.float32).load_state(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outliers": 0.05}, r"`outliers` must be one of .*0\.005.* got 0\.05"),
        ({"outliers": True}, "`outliers` must be one of"),
        ({"outliers": 0.01, "promoted": 0.25}, "`outliers` must be 0 unless `promoted` is one of"),
        ({"outliers": 0.01, "nbits": 16}, "`outliers` must be 0 unless `nbits` is one of"),
        ({"outliers": 0.01, "method": "variance_normalized"}, "`outliers` must be 0 unless `method` is one of"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        QuantSpec(**changes)
    assert QuantSpec(outliers=0).outliers == 0.0


# ---- in a cache --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.mark.parametrize("padding", [None, [37, 2]])
def test_the_cache_holds_the_same_however_calls_cut_the_tokens(padding):
    config = KVQuantConfig.from_dict(QUANT)
    layer = assert_cuts_change_nothing(config, heavy(2, 2, 250, 2, 32).transpose(2, 3), [5, 100, 1, 144], padding)
    assert layer.quantized_length == (250 - 4 - 16) // 16 * 16
    assert all({"outlier_index", "outlier_value"} <= set(store.state()) for store in layer._block_stores())


def test_caches_hold_what_they_report_and_come_back_from_files(model, tmp_path):
    cache = quant_cache(model, QUANT)
    forward(model, random_ids(2, 90), cache)
    assert_reported_bytes(cache)
    nominal = KVQuantConfig.from_dict(QUANT).nominal_bits(model.config.head_dim)
    assert cache.memory_report().bits_per_value_quantized == pytest.approx(nominal)
    cache.save(tmp_path)
    back = QuantCache.load(tmp_path, model.config)
    for token in random_ids(2, 40, seed=1).split(1, dim=1):
        assert torch.equal(forward(model, token, back), forward(model, token, cache))
    assert "1.0% of entries exact" in repr(cache)


def test_they_are_read_by_the_kernels_and_stored_by_torch(model):
    logits = {}
    for backend in ("auto", "cpu", "torch"):
        cache = quant_cache(model, QUANT, backend=backend)
        forward(model, random_ids(2, 90), cache)
        logits[backend] = forward(model, random_ids(2, 1, seed=1), cache)
    assert torch.equal(logits["auto"], logits["cpu"])
    torch.testing.assert_close(logits["auto"], logits["torch"], rtol=1e-4, atol=1e-5)
    view = cache.quantized_layer(0).view(1)
    assert triton.unsupported(view) is None
    spec = QuantSpec(outliers=0.01)
    assert not cpu.can_encode(spec, torch.float32, torch.device("cpu"), 32, 32)
