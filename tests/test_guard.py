"""The outlier guard: what it measures, what it decides, and that a decision holds."""

import copy
import itertools
import pickle

import pytest
import torch
from harness import (
    CACHE_KW,
    RESIDUAL,
    SINKS,
    assert_reported_bytes,
    assert_same_content,
    feed,
    forward,
    left_pad,
    quant_cache,
    random_ids,
    random_states,
    settings,
)
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import HEAD_DIM, tiny_model

from kvquant_hf import KVQuantConfig, MemoryReport, QuantCache, QuantSpec, list_presets
from kvquant_hf.eval import parse_quant
from kvquant_hf.guard import guarded, imbalance
from kvquant_hf.layer_state import layer_state
from kvquant_hf.ops import decode_attention

BLOCK, HEADS, LENGTH = 16, 2, 100
# Channels of random keys have ranges within a factor of 2 to 3 of each other, the wide one has 20 times theirs.
THRESHOLD, WIDE = 8.0, 20.0
GUARDED = settings(2, 2, outlier_guard=THRESHOLD)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def wide_keys(length=LENGTH, rows=1, seed=0, first=0, end=None, channel=3):
    """Keys and values, one channel of head 1 wide within the slots `first … end - 1`."""
    keys, values = random_states(rows, HEADS, length, HEAD_DIM, seed=seed)
    keys[:, 1, first:end, channel] *= WIDE
    return keys, values


def plain_keys(length=LENGTH, rows=1, seed=0):
    return random_states(rows, HEADS, length, HEAD_DIM, seed=seed)


def filled(model, quant=GUARDED, cuts=None, layers=None):
    """A cache of two layers, by default the second one with a wide channel."""
    cache = quant_cache(model, quant)
    for index, states in enumerate(layers or (plain_keys(), wide_keys())):
        feed(cache, *states, cuts=cuts, layer_idx=index)
    return cache


# ---------------------------------------------------------------- the measure


def test_imbalance_is_the_widest_range_over_the_median_one():
    blocks = torch.zeros(1, 2, 3, 4)
    blocks[0, 0] = torch.tensor([[0.0, 5, -1, 7], [1, 5, 1, 7], [0, 7, 3, 0]])  # ranges 1, 2, 4, 7
    assert torch.equal(imbalance(blocks), torch.tensor([[3.5, 0.0]]))  # a constant head has none


def test_imbalance_of_extreme_numbers():
    most = torch.finfo(torch.float32).max
    blocks = torch.zeros(1, 3, 2, 3)
    blocks[0, 0] = torch.tensor([[most, -most, most], [-most, most, -most]])
    blocks[0, 1, 0, 0] = 1.0  # one channel alone is not constant
    blocks[0, 2, 0] = torch.tensor([1e-40, 1e-40, 2e-40])
    found = imbalance(blocks)
    assert found[0, 0] == 1 and found[0, 1] > 1e30 and not found.isnan().any()
    assert 0 <= found[0, 2] <= 3


@given(st.integers(0, 2**31), st.integers(-20, 20), st.floats(-100, 100))
def test_imbalance_depends_on_spread_alone(seed, power, shift):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(2, 2, 8, 16, generator=generator) * torch.rand(16, generator=generator).exp()
    found = imbalance(blocks)
    assert (found >= 1).all()
    assert torch.equal(imbalance(blocks * 2.0**power), found)
    order = torch.randperm(8, generator=generator)
    assert torch.equal(imbalance(blocks[:, :, order]), found)  # of tokens
    strided = blocks.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    assert torch.equal(imbalance(strided), found)
    torch.testing.assert_close(imbalance(blocks + shift), found, rtol=1e-3, atol=0)  # a constant bias is no spread


@pytest.mark.parametrize(("nbits", "wider"), [(2, 4), (3, 4), (4, 8), (8, 8), (16, 16)])
def test_guarded_storage_has_more_bits_and_nothing_else(nbits, wider):
    spec = QuantSpec(nbits=nbits, group_size=64, rotation="hadamard", clip="mse")
    assert guarded(spec) == QuantSpec(nbits=wider, group_size=64, rotation="hadamard", clip="mse")
    if nbits < 8:
        promoted = guarded(QuantSpec(nbits=nbits, promoted=0.25))
        assert promoted == QuantSpec(nbits=wider, promoted=0.25)


@pytest.mark.parametrize("preset", sorted(set(list_presets()) - {"turboquant4"}))
def test_every_preset_can_be_guarded(model, preset):
    config = KVQuantConfig.from_preset(preset).replace(outlier_guard=1.0)
    cache = QuantCache(model.config, config)
    wider = guarded(config.key)
    assert wider.nbits == {2: 4, 3: 4, 4: 8}.get(config.key.nbits, config.key.nbits)
    cache.update(*wide_keys(300), 0)
    assert config.key.nbits >= 8 or (cache.guarded_layers == (0,) and cache.quantized_layer(0).key_spec == wider)


def test_keys_without_wider_codes_are_refused_before_there_is_anything_to_lose(model):
    with pytest.raises(ValueError, match=r"guard` must be None for keys of 4 bits with `method='turbo"):
        QuantCache(model.config, "turboquant4", outlier_guard=6)
    assert QuantCache(model.config, "turboquant4", layers={0: {"key": {"nbits": 3}, "outlier_guard": 6}})


# ---------------------------------------------------------------- the decision


def test_only_layers_with_wide_channels_are_guarded(model):
    cache = filled(model)
    assert cache.guarded_layers == (1,)
    assert filled(model, settings(2, 2)).guarded_layers == ()
    assert filled(model, settings(2, 2, outlier_guard=1e9)).guarded_layers == ()
    assert filled(model, settings(2, 2, outlier_guard=1)).guarded_layers == (0, 1)
    assert filled(model, settings(8, 2, outlier_guard=1)).guarded_layers == ()  # there is nothing wider
    assert filled(model, settings(16, 2, outlier_guard=1)).guarded_layers == ()


def test_the_threshold_is_exclusive(model):
    keys, values = plain_keys()
    found = float(imbalance(keys[:, :, SINKS : SINKS + BLOCK]).max())
    for threshold, expected in ((found, ()), (found * (1 - 1e-6), (0,))):
        cache = quant_cache(model, settings(2, 2, key={"rope": "post"}, outlier_guard=threshold))
        feed(cache, keys, values)
        assert cache.guarded_layers == expected


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(
    "key",
    [
        {},
        {"rope": "post"},
        {"nbits": 3},
        {"nbits": 4},
        {"promoted": 0.25},
        {"promoted": 0.25, "nbits": 4},
        {"clip": "mse"},
        {"method": "variance_normalized"},
        {"granularity": "per_token", "rope": "post"},
    ],
    ids=str,
)
def test_a_guarded_layer_is_one_with_those_settings(model, key, backend):
    """The same codes, bytes and attention as if its settings had been written down."""
    quant = settings(2, 2, key=key, backend=backend)
    cache = filled(model, {**quant, "outlier_guard": THRESHOLD})
    assert cache.guarded_layers == (1,)
    spec = guarded(KVQuantConfig.from_dict(quant).key)
    written = filled(model, {**quant, "layers": {1: {"key": {"nbits": spec.nbits, "promoted": spec.promoted}}}})
    for index in (0, 1):
        mine, theirs = (layer_state(c.quantized_layer(index))[0] for c in (cache, written))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        query = random_states(1, 2 * HEADS, 1, HEAD_DIM, seed=9)[0]
        assert torch.equal(*(decode_attention(query, c.quantized_layer(index).view()) for c in (cache, written)))
    assert cache.memory_report().total_bytes == written.memory_report().total_bytes
    assert_reported_bytes(cache)


def test_the_hadamard_basis_is_the_one_that_counts(model):
    """A rotation that spreads a wide channel over all leaves nothing to guard."""
    rotated = {"rotation": "hadamard", "rope": "post"}
    assert filled(model, settings(2, 2, key=rotated, outlier_guard=THRESHOLD)).guarded_layers == ()
    assert filled(model, settings(2, 2, key={"rope": "post"}, outlier_guard=THRESHOLD)).guarded_layers == (1,)


def test_keys_are_judged_before_rope(model):
    """A channel of constant size spins under RoPE: wide after it, without any spread before."""
    layer = quant_cache(model, GUARDED).quantized_layer(0)
    keys, values = plain_keys()
    keys[:, 0, :, 0] += 200.0
    cos, sin = layer.rotation.tables(torch.arange(LENGTH))
    for rope, expected in (("pre", ()), ("post", (0,))):
        cache = quant_cache(model, settings(2, 2, key={"rope": rope}, outlier_guard=THRESHOLD))
        feed(cache, layer.rotation.apply(keys, cos, sin), values)
        assert cache.guarded_layers == expected


@pytest.mark.parametrize("guards", [True, False])
@pytest.mark.parametrize("cuts", [[1] * LENGTH, [30, 70], [36, 1, 63], [2, 3, 95]], ids=len)
def test_streaming_equals_one_shot(model, cuts, guards):
    layers = (wide_keys(), wide_keys()) if guards else (plain_keys(), plain_keys())
    whole = filled(model, layers=layers)
    assert whole.guarded_layers == ((0, 1) if guards else ())
    cut = filled(model, cuts=cuts, layers=layers)
    assert cut.guarded_layers == whole.guarded_layers
    for index in (0, 1):
        mine, theirs = (layer_state(c.quantized_layer(index))[0] for c in (cut, whole))
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        (0, SINKS, ()),
        (SINKS, SINKS + BLOCK, (0,)),
        (SINKS + BLOCK, None, ()),
        (SINKS, SINKS + 1, (0,)),
        (SINKS + BLOCK - 1, SINKS + BLOCK, (0,)),
    ],
)
def test_the_first_block_alone_decides(model, first, end, expected):
    keys, values = plain_keys()
    keys[:, 1, first:end, 3] = 60.0 * torch.arange(1, keys[:, 1, first:end, 3].shape[-1] + 1)
    cache = quant_cache(model, settings(2, 2, key={"rope": "post"}, outlier_guard=THRESHOLD))
    feed(cache, keys, values)
    assert cache.guarded_layers == expected


def test_no_decision_before_the_first_block(model):
    cache = quant_cache(model, GUARDED)
    keys, values = wide_keys()
    short = SINKS + RESIDUAL + BLOCK - 1
    feed(cache, keys[:, :, :short], values[:, :, :short])
    assert cache.guarded_layers == () and cache.quantized_length(0) == 0
    feed(cache, keys[:, :, short : short + 1], values[:, :, short : short + 1])
    assert cache.guarded_layers == (0,) and cache.quantized_length(0) == BLOCK


def test_layers_have_thresholds_of_their_own(model):
    layers = (wide_keys(), wide_keys())
    for override, expected in ((None, (1,)), (100.0, (1,)), (2.0, (0, 1))):
        quant = settings(2, 2, outlier_guard=THRESHOLD, layers={0: {"outlier_guard": override}})
        assert filled(model, quant, layers=layers).guarded_layers == expected
    quant = settings(2, 2, outlier_guard=THRESHOLD, layers={0: {"key": {"nbits": 4}}})
    cache = filled(model, quant, layers=layers)
    assert [cache.quantized_layer(i).key_spec.nbits for i in (0, 1)] == [8, 4]


# ---------------------------------------------------------------- how long it holds


@pytest.mark.parametrize("forget", [lambda cache: cache.reset(), lambda cache: cache.crop(-LENGTH)])
def test_an_empty_cache_decides_anew(model, forget):
    cache = filled(model)
    forget(cache)
    assert cache.guarded_layers == ()
    for index, states in enumerate((wide_keys(), plain_keys())):
        feed(cache, *states, layer_idx=index)
    assert cache.guarded_layers == (0,)
    assert_same_content(cache, filled(model, layers=(wide_keys(), plain_keys())))
    assert_reported_bytes(cache)


@pytest.mark.parametrize(
    ("kept", "new", "expected"),
    [
        (SINKS + 3, plain_keys, ()),  # no block is left: the next first block decides
        (SINKS + BLOCK - 1, wide_keys, (0,)),
        (SINKS + BLOCK, plain_keys, (0,)),  # one is left, and what it was stored by holds
        (SINKS + 2 * BLOCK + 5, plain_keys, (0,)),
    ],
)
def test_cropping_keeps_the_decision_while_a_block_is_left(model, kept, new, expected):
    cache = quant_cache(model, settings(2, 2, key={"rope": "post"}, outlier_guard=THRESHOLD))
    keys, values = wide_keys(first=SINKS + 8)
    feed(cache, keys, values)
    assert cache.guarded_layers == (0,)
    cache.crop(kept - LENGTH)
    assert cache.guarded_layers == ((0,) if kept >= SINKS + BLOCK else ())
    feed(cache, *new())
    assert cache.guarded_layers == expected
    assert_reported_bytes(cache)
    assert all(side.isfinite().all() for side in cache.dequantize(0))


def test_rows_share_a_decision_and_keep_it(model):
    keys, values = (torch.cat(pair) for pair in zip(plain_keys(), wide_keys(), plain_keys(), strict=True))
    cache = filled(model, layers=((keys, values), plain_keys(rows=3)))
    assert cache.guarded_layers == (0,)  # one of three rows is enough
    before, coded = cache.dequantize(0)[0], SINKS + cache.quantized_length(0)
    actions = {
        (0, 2): lambda c: c.batch_select_indices(torch.tensor([0, 2])),  # the row that caused it leaves
        (2, 2, 0): lambda c: c.reorder_cache(torch.tensor([2, 2, 0])),
        (0, 0, 1, 1, 2, 2): lambda c: c.batch_repeat_interleave(2),
    }
    for rows, act in actions.items():
        changed = copy.deepcopy(cache)
        act(changed)
        feed(changed, *plain_keys(rows=len(rows), length=40, seed=3))
        assert changed.guarded_layers == (0,)
        assert torch.equal(changed.dequantize(0)[0][:, :, :coded], before[list(rows), :, :coded])
        assert_reported_bytes(changed)


def test_padding_has_no_say(model):
    """Neither keys of padding within a block nor rows that have nothing else in it."""
    for pads, wild in (((BLOCK - 3, 0), BLOCK - 3 + SINKS), ((2 * BLOCK, 0), SINKS + BLOCK)):
        keys, values = plain_keys(rows=2)
        keys[0, :, :wild, 5] = 1e4 * torch.arange(wild)
        cache = quant_cache(model, settings(2, 2, key={"rope": "post"}, outlier_guard=THRESHOLD))
        feed(cache, keys, values)
        assert cache.guarded_layers == (0,)
        cache.reset()
        cache.set_padding(left_pad(random_ids(2, LENGTH), pads)[1])
        feed(cache, keys, values)
        assert cache.guarded_layers == ()


# ---------------------------------------------------------------- copies, files, reports


def test_copies_and_files_keep_the_decision(model, tmp_path):
    cache = filled(model)
    cache.save(tmp_path)
    copies = (QuantCache.load(tmp_path, model), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)))
    more = [plain_keys(length=40, seed=7) for _ in range(2)]
    for index, states in enumerate(more):
        feed(cache, *states, layer_idx=index)
    for other in copies:
        assert other.guarded_layers == (1,) and other.quant_config == cache.quant_config
        assert other.memory_report().guarded_layers == 1
        for index, states in enumerate(more):
            feed(other, *states, layer_idx=index)
        assert_same_content(other, cache)
        other.reset()
        feed(other, *wide_keys())
        assert other.guarded_layers == (0,)


def test_files_from_before_the_guard_load(model, tmp_path):
    cache = filled(model, settings(2, 2))
    cache.save(tmp_path)
    note = tmp_path / "cache.json"
    text = note.read_text()
    without = text.replace(',\n   "guarded": false', "").replace(',\n  "outlier_guard": null', "")
    without = without.replace(',\n  "attention_guard": null', "")
    assert "guard" not in without and without != text
    note.write_text(without)
    assert_same_content(QuantCache.load(tmp_path, model), cache)


def test_offloading_keeps_the_decision(model):
    cache, expected = filled(model), filled(model)
    cache.offload(1)
    cache.prefetch(1)
    assert cache.guarded_layers == (1,)
    assert_same_content(cache, expected)


def test_reports_say_so(model):
    cache = filled(model)
    assert "keys 4-bit per_channel group 16, outlier guard 8 widened 2-bit" in repr(cache)
    assert "keys 2-bit per_channel group 16, outlier guard 8;" in repr(cache)
    report = cache.memory_report()
    assert report.guarded_layers == 1 and report.to_dict()["guarded_layers"] == 1
    assert "guard: 1 layer with wider keys" in str(report)
    plain = filled(model, settings(2, 2))
    assert "guard" not in repr(plain) and "guard" not in str(plain.memory_report())
    joined = MemoryReport.joined([report, plain.memory_report()])
    assert joined.guarded_layers == 1 and joined.shards == 1
    wider = HEADS * HEAD_DIM * cache.quantized_length(1) * 2 // 8  # two bits for each key
    assert report.codes - plain.memory_report().codes == wider


def test_generation_with_a_guarded_cache(model):
    ids = random_ids(2, 60)
    cache = quant_cache(model, {**GUARDED, "outlier_guard": 1.0})
    out = model.generate(ids, max_new_tokens=30, do_sample=False, **{CACHE_KW: cache})
    assert cache.guarded_layers == (0, 1) and out.shape == (2, 90)
    written = quant_cache(model, settings(4, 2))
    assert torch.equal(out, model.generate(ids, max_new_tokens=30, do_sample=False, **{CACHE_KW: written}))
    assert torch.isfinite(forward(model, ids[:, :1], cache)).all()


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("value", [0, 0.5, -3.0, True, "8", float("nan"), float("inf"), [8.0]], ids=repr)
def test_bad_thresholds_are_refused(value):
    with pytest.raises(ValueError, match=r"`outlier_guard` must be a finite number >= 1 or None, got"):
        KVQuantConfig(outlier_guard=value)
    with pytest.raises(ValueError, match=r"`outlier_guard` must be a finite number >= 1 or None, got"):
        KVQuantConfig(layers={0: {"outlier_guard": value}})


def test_settings_travel(tmp_path):
    config = KVQuantConfig(outlier_guard=8.5, layers={1: {"outlier_guard": None}})
    config.to_yaml(tmp_path / "c.yaml")
    assert KVQuantConfig.from_yaml(tmp_path / "c.yaml") == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert parse_quant("k2v2,outlier_guard=8.5").outlier_guard == 8.5
    assert KVQuantConfig.resolve("k2v2", outlier_guard=9).outlier_guard == 9
    assert hash(config) != hash(config.replace(outlier_guard=9.0))
    several = itertools.product((None, 2.0, 3.0), repeat=2)
    assert len({KVQuantConfig(outlier_guard=a, layers={0: {"outlier_guard": b}}) for a, b in several}) == 9
    with pytest.raises(ValueError, match="Did you mean 'outlier_guard'"):
        KVQuantConfig.from_dict({"outlier_gard": 8.0})
