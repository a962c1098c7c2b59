"""The guard that judges by queries: what it measures, which queries count, and that nothing is lost while it waits."""

import copy
import pickle
import warnings

import pytest
import torch
from harness import (
    CACHE_KW,
    RESIDUAL,
    SINKS,
    assert_close,
    assert_reported_bytes,
    feed,
    left_pad,
    positions,
    quant_cache,
    random_ids,
    random_states,
    settings,
)
from tiny_models import HEAD_DIM, tiny_model
from torch.nn import functional as F

import kvquant_hf.block_layer as block_layer
from kvquant_hf import KVQuantConfig, LazyKV, QuantCache, StaleViewError, register_attention
from kvquant_hf.attention import kvquant_attention_forward
from kvquant_hf.guard import output_error
from kvquant_hf.last_queries import by_token
from kvquant_hf.layer_state import layer_state
from kvquant_hf.rope_probe import find_rotations

BLOCK, HEADS, QUERY_HEADS, LENGTH = 16, 2, 4, 100
DUE = SINKS + BLOCK + RESIDUAL  # the token that makes the first block due is the one at slot DUE - 1
END = DUE - 1 - RESIDUAL // 2  # the queries that count are those of the slots before this one
SCALE = HEAD_DIM**-0.5
WATCHED = settings(2, 2, attention_guard=0.01)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture
def errors(monkeypatch):
    """What the guard found, by decision."""
    found = []

    def noted(*args):
        found.append(output_error(*args))
        return found[-1]

    monkeypatch.setattr(block_layer, "output_error", noted)
    return found


def queries(rows=1, length=LENGTH, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, QUERY_HEADS, length, HEAD_DIM, generator=generator)


def causal(tokens, total):
    return torch.ones(tokens, total, dtype=torch.bool).tril(total - tokens)


def repeated(states):
    """As Transformers repeats keys and values for the query heads that share them."""
    expanded = states[:, :, None, :, :].expand(states.shape[0], HEADS, 2, *states.shape[2:])
    return expanded.reshape(states.shape[0], QUERY_HEADS, *states.shape[2:])


def by_sdpa(query, keys, values):
    mask = causal(query.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=SCALE, enable_gqa=True)


def by_repeated_sdpa(query, keys, values):
    mask = causal(query.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(query, repeated(keys), repeated(values), attn_mask=mask)


def by_eager(query, keys, values):
    keys, values = repeated(keys), repeated(values)
    scores = torch.matmul(query, keys.transpose(2, 3)) * SCALE
    hidden = ~causal(query.shape[2], keys.shape[2])
    return torch.matmul(scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1), values)


def by_kvquant(query, keys, values):
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    mask = causal(query.shape[2], keys.shape[2])[None, None]
    return kvquant_attention_forward(module, query, keys, values, mask, scaling=SCALE)[0].transpose(1, 2)


WAYS = {"sdpa": by_sdpa, "repeated": by_repeated_sdpa, "eager": by_eager, "kvquant": by_kvquant}
each_way = pytest.mark.parametrize("attend", list(WAYS.values()), ids=list(WAYS))


def attended(model, query, keys, values, cuts=None, quant=WATCHED, attend=by_sdpa, layer_idx=0, cache=None, start=0):
    """A cache whose layer was fed in calls of `cuts` tokens, each of which attended; and what the last one gave."""
    cache = quant_cache(model, quant) if cache is None else cache
    output = None
    for cut in cuts or [keys.shape[2]]:
        part = slice(start, start + cut)
        handed = cache.update(keys[:, :, part].clone(), values[:, :, part].clone(), layer_idx)
        output = attend(query[:, :, part], *handed)
        start += cut
    return cache, output


def assert_same(cache, expected):
    """Layer 0 of both caches holds the same, stored the same way."""
    (mine, facts), (theirs, others) = (layer_state(c.quantized_layer(0)) for c in (cache, expected))
    assert facts == others and mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def reference_error(query, keys, values, layer):
    """The definition, one head and query at a time: keys as two bits store them against exact ones."""
    read = keys.clone()
    read[:, :, SINKS : SINKS + BLOCK] = quant_cache_layer(layer)(keys)[:, :, SINKS : SINKS + BLOCK]
    shares = []
    for head in range(QUERY_HEADS):
        moved = norm = 0.0
        for slot in range(END):
            exact, other = (
                torch.softmax((states[0, head // 2, : slot + 1] @ query[0, head, slot]) * SCALE, -1)
                @ values[0, head // 2, : slot + 1]
                for states in (keys, read)
            )
            moved += float((exact - other).square().sum())
            norm += float(exact.square().sum())
        shares.append((moved / norm) ** 0.5)
    return sum(shares) / QUERY_HEADS


def quant_cache_layer(layer):
    def stored(keys):
        cache = quant_cache(tiny_model("llama"), settings(2, 2))
        feed(cache, keys, torch.zeros_like(keys), layer_idx=layer)
        return cache.dequantize(layer)[0]

    return stored


# ---------------------------------------------------------------- the measure


def test_the_error_is_that_of_what_attention_gives(model, errors):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    attended(model, queries(), keys, values)
    assert len(errors) == 1
    assert errors[0].shape == (1,)
    assert float(errors[0]) == pytest.approx(reference_error(queries(), keys, values, 0), rel=1e-4)


def test_equal_keys_move_nothing_and_far_ones_more():
    keys, values = random_states(2, HEADS, 40, HEAD_DIM)
    query = queries(2, 8)
    assert torch.equal(output_error(query, keys, keys, values, 32, None), torch.zeros(2))
    noise = torch.randn_like(keys)
    small, large = (output_error(query, keys, keys + size * noise, values, 32, None) for size in (0.1, 0.5))
    assert (small > 0).all() and (small < large).all()
    assert_close(
        output_error(query, keys, keys + noise, 7 * values, 32, None),
        output_error(query, keys, keys + noise, values, 32, None),
        1e-5,
    )
    assert (output_error(query, keys, keys + noise, torch.zeros_like(values), 32, None) == 0).all()
    moved = keys.clone()
    moved[:, :, -1] += 5.0  # only the last query sees the last token
    before = slice(None, -1)
    assert (
        output_error(query[:, :, before], keys[:, :, before], moved[:, :, before], values[:, :, before], 32, None) == 0
    ).all()
    assert (output_error(query, keys, moved, values, 32, None) > 0).all()


def test_padding_is_neither_seen_nor_asks():
    keys, values = random_states(2, HEADS, 40, HEAD_DIM)
    query, other = queries(2, 8), keys + torch.randn_like(keys)
    padding = torch.tensor([34, 0])
    found = output_error(query, keys, other, values, 32, padding)
    alone = output_error(query[:1, :, 2:], *(states[:1, :, 34:] for states in (keys, other, values)), 0, None)
    second = output_error(query[1:], keys[1:], other[1:], values[1:], 32, None)
    assert_close(found, torch.cat([alone, second]), 1e-6)
    wild = torch.cat([torch.where(torch.arange(40)[:, None] < 34, 1e4, other[:1]), other[1:]])
    assert torch.equal(output_error(query, keys, wild, values, 32, padding), found)
    assert float(output_error(query, keys, other, values, 32, torch.tensor([40, 0]))[0]) == 0


def test_half_precision_is_judged_in_float32(model, errors):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    for dtype in (torch.float32, torch.bfloat16):
        attended(model, queries().to(dtype), keys.to(dtype), values.to(dtype))
    assert all(found.dtype == torch.float32 for found in errors)
    assert float(errors[1]) == pytest.approx(float(errors[0]), rel=0.1)


# ---------------------------------------------------------------- what it decides


def test_a_layer_is_widened_where_the_limit_is_exceeded(model, errors):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    attended(model, queries(), keys, values)
    found = float(errors[0])
    for limit, expected in ((0.99 * found, (0,)), (1.01 * found, ())):
        cache, _ = attended(model, queries(), keys, values, quant={**WATCHED, "attention_guard": limit})
        assert cache.guarded_layers == expected
        written = quant_cache(model, settings(4 if expected else 2, 2))
        feed(written, keys, values)
        mine, theirs = (layer_state(c.quantized_layer(0))[0] for c in (cache, written))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert_reported_bytes(cache)


def test_queries_that_look_elsewhere_need_no_bits(model):
    """The same keys, once read by queries that see their errors and once by queries that hardly see anything."""
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    for size, expected in ((1.0, (0,)), (0.05, ())):
        cache, _ = attended(model, size * queries(), keys, values, quant={**WATCHED, "attention_guard": 0.05})
        assert cache.guarded_layers == expected


def test_both_limits_have_to_be_exceeded(model):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    for ratio, limit, expected in ((1.0, 0.0, (0,)), (1e6, 0.0, ()), (1.0, 1e6, ()), (1e6, 1e6, ())):
        quant = settings(2, 2, outlier_guard=ratio, attention_guard=limit)
        assert attended(model, queries(), keys, values, quant=quant)[0].guarded_layers == expected


@pytest.mark.parametrize(("slot", "counts"), [(18, False), (19, True), (50, True), (51, False), (99, False)])
def test_the_last_queries_before_the_first_block_is_due_count(model, errors, slot, counts):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    quant = {**WATCHED, "residual_length": 64}  # due with the token at slot 4 + 16 + 64 - 1; 32 before that
    changed = queries()
    changed[:, :, slot] *= 3
    for query in (queries(), changed):
        attended(model, query, keys, values, quant=quant)
    assert (float(errors[0]) != float(errors[1])) == counts


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("residual", [0, 16, 64])
def test_any_window_serves(model, errors, sinks, residual):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    quant = {**WATCHED, "sink_length": sinks, "residual_length": residual}
    due = sinks + BLOCK + residual
    found = [
        attended(model, queries(), keys, values, cuts, quant)[0]
        for cuts in (None, [1] * LENGTH, [11, 60, 29], [due, LENGTH - due])
    ]
    assert len(errors) == 4 and float(errors[0]) > 0
    assert all(float(error) == pytest.approx(float(errors[0]), rel=1e-5) for error in errors)
    for cache in found[1:]:
        assert_same(cache, found[0])


def test_padding_has_no_say(model):
    keys, values = random_states(2, HEADS, LENGTH, HEAD_DIM)
    query = queries(2)
    query[0] *= 100.0
    padding = 2 * BLOCK  # all of the first block is padding in row 0
    results = []
    for padded in (False, True):
        cache = quant_cache(model, {**WATCHED, "attention_guard": 0.4})
        if padded:
            cache.set_padding(left_pad(random_ids(2, LENGTH), (padding, 0))[1])
        attended(model, query, keys, values, cache=cache)
        results.append(cache.guarded_layers)
    assert results == [(0,), ()]


@pytest.mark.parametrize("pads", [(7, 0), (25, 3), (40, 0), (99, 0)])
def test_a_padded_row_is_judged_like_the_row_alone(model, errors, pads):
    """As far as its tokens lie in blocks alike: without padding in the block or in what is seen, exactly."""
    keys, values = random_states(2, HEADS, LENGTH, HEAD_DIM)
    cache = quant_cache(model, WATCHED)
    cache.set_padding(left_pad(random_ids(2, LENGTH), pads)[1])
    attended(model, queries(2), keys, values, cache=cache)
    wild = keys.clone()
    for row, count in enumerate(pads):
        wild[row, :, :count] = 1e3
    again = quant_cache(model, WATCHED)
    again.set_padding(left_pad(random_ids(2, LENGTH), pads)[1])
    attended(model, queries(2), wild, values, cache=again)
    assert torch.isfinite(errors[0]).all()
    assert torch.equal(errors[0], errors[1])


# ---------------------------------------------------------------- whoever asks, however calls cut


@each_way
@pytest.mark.parametrize(
    "cuts", [[LENGTH], [1] * LENGTH, [30, 70], [DUE - 1, 1, LENGTH - DUE], [DUE, 64], [2, 30, 68]]
)
def test_every_attention_shows_its_queries(model, errors, attend, cuts):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    whole, _ = attended(model, queries(), keys, values, quant={**WATCHED, "attention_guard": 0.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache, _ = attended(model, queries(), keys, values, cuts, {**WATCHED, "attention_guard": 0.0}, attend)
    assert float(errors[1]) == pytest.approx(float(errors[0]), rel=1e-5)
    assert cache.guarded_layers == (0,)
    assert_same(cache, whole)
    assert_reported_bytes(cache)


@each_way
def test_a_prompt_attends_to_itself_exactly(model, attend):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    _, output = attended(model, queries(), keys, values, attend=attend)
    assert torch.equal(output, attend(queries(), keys, values))


@each_way
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_short_prompt_attends_to_itself_exactly(model, attend, tokens):
    keys, values = random_states(1, HEADS, tokens, HEAD_DIM)
    _, output = attended(model, queries(length=tokens), keys, values, attend=attend)
    assert torch.equal(output, attend(queries(length=tokens), keys, values))


def test_a_part_of_the_keys_is_read_as_that_part(model):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    cache, _ = attended(model, queries(), keys, values, [20])
    lazy = feed(cache, keys[:, :, 20:21], values[:, :, 20:21])
    query = queries()[:, :HEADS, 20:21]
    output = F.scaled_dot_product_attention(
        query, *(states[:, :, -5:] for states in lazy)
    )  # by fewer heads than before
    expected = F.scaled_dot_product_attention(query, keys[:, :, 16:21], values[:, :, 16:21])
    assert torch.equal(output, expected)


@each_way
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_later_tokens_read_what_was_decided(model, attend, tokens):
    """The call in which the first block falls due reads it from codes, as without a guard."""
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    before = DUE - 1
    quant = {**WATCHED, "attention_guard": 0.0}
    cache, output = attended(model, queries(), keys, values, [before - 2, 2, tokens], quant, attend)
    assert cache.quantized_length(0) >= BLOCK
    query = queries()[:, :, before : before + tokens]
    assert_close(output, by_eager(query, *cache.dequantize(0)), 1e-5)
    exact = by_eager(query, keys[:, :, : before + tokens], values[:, :, : before + tokens])
    assert not torch.allclose(output, exact, atol=1e-3)


def test_a_packed_query_of_one_token_is_unpacked(model, errors):
    """Transformers puts the heads that share keys where tokens are, for one token."""
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)

    def packed(query, lazy_keys, lazy_values):
        if query.shape[2] > 1:
            return by_sdpa(query, lazy_keys, lazy_values)
        return F.scaled_dot_product_attention(query.reshape(1, HEADS, 2, HEAD_DIM), lazy_keys, lazy_values)

    attended(model, queries(), keys, values, [1] * LENGTH)
    attended(model, queries(), keys, values, [1] * LENGTH, attend=packed)
    assert torch.equal(errors[0], errors[1])


def test_shapes_of_queries():
    shape = torch.Size((2, 2, 9, 4))
    query = torch.randn(2, 6, 3, 4)
    assert by_token(query, shape, 3) is query
    one = torch.randn(2, 6, 1, 4)
    assert torch.equal(by_token(one.reshape(2, 2, 3, 4), shape, 1), one)
    for other in (query[:1], query[0], query[..., :2], query[:, :5], torch.randn(2, 2, 2, 3, 4)):
        assert by_token(other, shape, 3) is None
    assert by_token(query, shape, 2) is None


def test_other_scales_count(model, errors):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)

    def scaled(query, lazy_keys, lazy_values):
        mask = causal(query.shape[2], LENGTH)
        return F.scaled_dot_product_attention(query, lazy_keys, lazy_values, mask, scale=1.0, enable_gqa=True)

    attended(model, queries(), keys, values, attend=scaled)
    attended(model, queries() / SCALE, keys, values)
    assert float(errors[0]) == pytest.approx(float(errors[1]), rel=1e-5)


def test_without_a_scale_that_of_scaled_dot_products_counts(model, errors):
    """Whatever eager attention of the model multiplies by."""
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)

    def unscaled(query, lazy_keys, lazy_values):
        mask = causal(query.shape[2], lazy_keys.shape[2])
        return F.scaled_dot_product_attention(query, lazy_keys, lazy_values, mask, enable_gqa=True)

    for attend in (by_sdpa, unscaled):
        cache = quant_cache(model, WATCHED)
        cache.quantized_layer(0)._scaling = 9.0
        attended(model, queries(), keys, values, attend=attend, cache=cache)
    assert torch.equal(errors[0], errors[1])


@pytest.mark.parametrize(
    ("family", "overrides", "factor"),
    [
        ("llama", {}, SCALE),
        ("gemma3", {"query_pre_attn_scalar": 1000}, 1000**-0.5),
        ("opt", {}, 1.0),  # multiplies queries itself
        ("falcon-alibi", {}, SCALE),  # adds before it multiplies
        ("gpt2", {}, SCALE),
    ],
)
def test_eager_attention_takes_the_factor_of_the_model(errors, family, overrides, factor):
    """Eager attention multiplies by it where the cache does not see it."""
    found = []
    for attention in ("eager", "sdpa"):
        model = tiny_model(family, **overrides)
        model.set_attn_implementation(attention)
        cache = quant_cache(model, WATCHED)
        assert all(find_rotations(model.config)[i].scaling == pytest.approx(factor) for i in cache.quantized_layers)
        errors.clear()
        with torch.no_grad():
            model(random_ids(1, LENGTH), use_cache=True, **{CACHE_KW: cache})
        found.append(torch.cat(errors))
    assert found[0].numel() == len(cache.quantized_layers)
    assert_close(found[0], found[1], 1e-5)


# ---------------------------------------------------------------- without queries


def test_without_queries_the_ratio_decides_alone_and_a_warning_says_so(model):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    for ratio, expected in ((None, ()), (1.0, (0,)), (1e6, ())):
        cache = quant_cache(model, settings(2, 2, outlier_guard=ratio, attention_guard=0.0))
        feed(cache, keys, values)
        assert cache.quantized_length(0) == 0  # attention may still ask
        if ratio == 1e6:  # too even: queries are not asked for
            feed(cache, keys[:, :, :1], values[:, :, :1])
        else:
            with pytest.warns(UserWarning, match="`attention_guard` has no say where attention does not show"):
                feed(cache, keys[:, :, :1], values[:, :, :1])
        assert cache.guarded_layers == expected
        assert cache.quantized_length(0) == LENGTH // BLOCK * BLOCK - BLOCK
        assert_reported_bytes(cache)


@pytest.mark.parametrize("unseen", [(0, 10), (5, 15), (20, 30)])
def test_all_queries_have_to_be_seen(model, errors, unseen):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    first, end = unseen
    cache = quant_cache(model, WATCHED)
    for slot in range(first):
        attended(model, queries(), keys, values, [1], cache=cache, start=slot)
    feed(cache, keys[:, :, first:end], values[:, :, first:end])
    with pytest.warns(UserWarning, match="attention_guard"):
        attended(model, queries(), keys, values, [5, LENGTH - end - 5], cache=cache, start=end)
    assert not errors and cache.guarded_layers == () and cache.quantized_length(0) == 80


def test_keys_that_are_read_another_way_are_stored_at_once(model):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    cache = quant_cache(model, WATCHED)
    lazy_keys, lazy_values = feed(cache, keys, values)
    assert isinstance(lazy_keys, LazyKV) and lazy_keys.waits
    assert torch.equal(lazy_values + 0, values) and lazy_keys.waits
    shares = torch.ones(1, HEADS, LENGTH, LENGTH)
    assert torch.equal(torch.matmul(shares, lazy_values), torch.matmul(shares, values)) and lazy_keys.waits
    with pytest.warns(UserWarning, match="attention_guard"):
        assert torch.equal(lazy_keys + 0, keys)
    assert not lazy_keys.waits and cache.quantized_length(0) == 80
    assert torch.equal(lazy_keys * 1, keys) and torch.equal(lazy_values.clone(), values)


def test_arrangements_wait_and_come_out_as_of_plain_tensors(model):
    keys, values = random_states(2, HEADS, LENGTH, HEAD_DIM)
    arrangements = [
        lambda t: repeated(t),
        lambda t: t.repeat_interleave(2, dim=1),
        lambda t: torch.repeat_interleave(t, 2, 1),
        lambda t: t.transpose(2, 3),
        lambda t: torch.transpose(repeated(t), -1, -2),
        lambda t: torch.reshape(t, (2, HEADS, LENGTH * HEAD_DIM)),
        lambda t: t[:, :1, 5:],
        lambda t: t[1, ..., None, 2],
    ]
    for arrange in arrangements:
        cache = quant_cache(model, WATCHED)
        handed = feed(cache, keys, values)
        arranged = [arrange(lazy) for lazy in handed]
        assert all(isinstance(lazy, LazyKV) and lazy.waits for lazy in arranged)
        by_sdpa(queries(2), *handed)
        for lazy, plain in zip(arranged, (keys, values), strict=True):
            assert not lazy.waits and lazy.shape == arrange(plain).shape and lazy.stride() == arrange(plain).stride()
            assert torch.equal(lazy.to_dense(), arrange(plain))
    rows = quant_cache(model, WATCHED)
    lazy_keys, _ = feed(rows, keys, values)
    with pytest.warns(UserWarning, match="attention_guard"):
        assert torch.equal(lazy_keys[torch.tensor([1])], keys[1:])  # an index that is a tensor


def test_tensors_that_need_gradients_are_handed_back(model):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    cache = quant_cache(model, WATCHED)
    needed = keys.clone().requires_grad_()
    with pytest.warns(UserWarning, match="attention_guard"):
        handed = cache.update(needed, values, 0)
    assert handed[0] is needed and handed[1] is values
    by_sdpa(queries(), *handed).sum().backward()
    assert needed.grad is not None
    assert cache.guarded_layers == () and cache.quantized_length(0) == 80


# ---------------------------------------------------------------- while it waits


OPERATIONS = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0, 1])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0, 0])),
    "repeat": lambda cache: (cache.batch_select_indices(torch.tensor([1])), cache.batch_repeat_interleave(3)),
    "offload": lambda cache: (cache.offload(0), cache.offload(1)),
    "crop": lambda cache: cache.crop(-2),
}
ROWS = {"reorder": [1, 0, 1], "select": [2, 0, 0], "repeat": [1, 1, 1], "offload": [0, 1, 2], "crop": [0, 1, 2]}


@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.parametrize("held", [3, 20, DUE - 1])
def test_operations_act_on_queries_that_wait(model, errors, name, held):
    keys, values = random_states(3, HEADS, LENGTH, HEAD_DIM)
    query = queries(3)
    cache, _ = attended(model, query[:, :, :held], keys[:, :, :held], values[:, :, :held], [1, held - 1])
    OPERATIONS[name](cache)
    start = held - 2 * (name == "crop")
    rows = ROWS[name]
    assert cache.get_seq_length() == start and cache.quantized_length(0) == 0
    assert_reported_bytes(cache, tolerance=0.2)  # the rotation's tables are not small beside a few tokens
    more = [states[rows] for states in (query, keys, values)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attended(model, *more, [1, LENGTH - start - 1], cache=cache, start=start)
    attended(model, *more)
    assert torch.equal(errors[0], errors[1])
    assert cache.quantized_length(0) == 80
    assert_reported_bytes(cache)


def test_the_report_counts_queries_and_waiting_tokens(model):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    held = DUE - 1
    cache, _ = attended(model, queries()[:, :, :held], keys[:, :, :held], values[:, :, :held])
    plain = quant_cache(model, settings(2, 2))
    feed(plain, keys[:, :, :held], values[:, :, :held])
    extra = cache.memory_report().residual - plain.memory_report().residual
    assert extra == END * QUERY_HEADS * HEAD_DIM * 4
    attended(model, queries(), keys, values, [LENGTH - held], cache=cache, start=held)
    feed(plain, keys[:, :, held:], values[:, :, held:])
    assert cache.guarded_layers == (0,)
    assert cache.memory_report().residual == plain.memory_report().residual
    waiting = quant_cache(model, WATCHED)
    handed = feed(waiting, keys, values)
    assert_reported_bytes(waiting)
    assert torch.equal(waiting.dequantize(0)[0], keys)
    assert handed[0].waits


def test_cropping_a_prompt_that_waits_keeps_it_exact(model):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    for kept in (LENGTH - 3, DUE, 30, 3):
        cache = quant_cache(model, WATCHED)
        feed(cache, keys, values)
        cache.crop(kept - LENGTH)
        assert torch.equal(cache.dequantize(0)[0], keys[:, :, :kept])
        assert_reported_bytes(cache)


def test_a_cache_that_was_cut_back_decides_anew(model, errors):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    quant = {**WATCHED, "residual_length": 64, "attention_guard": 0.0}  # queries of the slots 19 to 50 count
    cache, _ = attended(model, queries(), keys, values, quant=quant)
    assert cache.guarded_layers == (0,)
    cache.crop(15 - LENGTH)
    assert cache.guarded_layers == ()
    read = [
        torch.cat([mine, new[:, :, 15:]], 2) for mine, new in zip(cache.dequantize(0), (keys, values), strict=True)
    ]
    attended(model, queries(), keys, values, [LENGTH - 15], cache=cache, start=15)
    attended(model, queries(), *read, quant=quant)
    assert cache.guarded_layers == (0,)
    assert float(errors[1]) == pytest.approx(float(errors[2]), rel=1e-5)
    cache, _ = attended(model, queries(), keys, values)  # queries of the slots 0 to 26 count
    cache.crop(5 - LENGTH)
    with pytest.warns(UserWarning, match="a cache cut back into its first block"):
        attended(model, queries(), keys, values, [LENGTH - 5], cache=cache, start=5)
    assert cache.guarded_layers == () and cache.quantized_length(0) == 80
    cache.reset()
    attended(model, queries(), keys, values, cache=cache)
    assert cache.guarded_layers == (0,)


@pytest.mark.parametrize("held", [5, DUE - 1, LENGTH])
def test_copies_and_files_hold_what_waits(model, errors, tmp_path, held):
    keys, values = random_states(1, HEADS, 2 * LENGTH, HEAD_DIM)
    query = queries(length=2 * LENGTH)
    cache, _ = attended(model, *(states[:, :, :held] for states in (query, keys, values)))
    cache.save(tmp_path)
    errors.clear()
    for other in (QuantCache.load(tmp_path, model), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        assert other.guarded_layers == cache.guarded_layers if other is not cache else True
        attended(model, query, keys, values, [1, 2 * LENGTH - held - 1], cache=other, start=held)
        assert_reported_bytes(other)
        assert_same(other, attended(model, query, keys, values)[0])
    assert all(torch.equal(found, errors[0]) for found in errors)


def test_an_undecided_prompt_travels_exactly(model, tmp_path):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    cache = quant_cache(model, WATCHED)
    feed(cache, keys, values)
    cache.save(tmp_path)
    loaded = QuantCache.load(tmp_path, model)
    assert torch.equal(loaded.dequantize(0)[0], keys)
    for other in (loaded, cache):
        with pytest.warns(UserWarning, match="attention_guard"):
            feed(other, keys[:, :, :5], values[:, :, :5])
    assert_same(loaded, cache)


def test_a_failure_while_judging_loses_nothing(model, monkeypatch):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)

    def failing(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(block_layer, "output_error", failing)
    cache = quant_cache(model, WATCHED)
    with pytest.raises(MemoryError):
        attended(model, queries(), keys, values, cache=cache)
    assert cache.quantized_length(0) == 0 and cache.get_seq_length() == LENGTH
    assert torch.equal(cache.dequantize(0)[0], keys)
    monkeypatch.undo()
    more = random_states(1, HEADS, 5, HEAD_DIM, seed=3)
    feed(cache, *more)
    assert_same(
        cache,
        attended(
            model, *(torch.cat(p, 2) for p in ((queries(), queries(length=5)), (keys, more[0]), (values, more[1])))
        )[0],
    )


@each_way
@pytest.mark.parametrize("forget", [lambda cache: cache.reset(), lambda cache: cache.crop(-LENGTH)])
def test_a_prompt_is_read_exactly_after_its_cache_was_emptied(model, attend, forget):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    cache = quant_cache(model, WATCHED)
    handed = feed(cache, keys, values)
    forget(cache)
    assert torch.equal(attend(queries(), *handed), attend(queries(), keys, values))
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_way
def test_autocast_has_no_part_in_the_judgement(model, errors, attend, dtype):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    attended(model, queries(), keys, values)
    with torch.autocast("cpu", dtype):
        attended(model, queries(), keys, values, attend=attend)
        register_attention()
        with torch.no_grad():
            model(random_ids(1, LENGTH), use_cache=True, **{CACHE_KW: quant_cache(model, WATCHED)})
    assert torch.equal(errors[0], errors[1])


def test_guesses_that_are_taken_back_were_not_judged_by(model, errors):
    """Speculative decoding: a call brings guesses, of which the cache gives up those that were wrong."""
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    quant = {**WATCHED, "residual_length": 64}
    due, wrong = SINKS + BLOCK + 64, random_states(1, HEADS, 20, HEAD_DIM, seed=5)
    for held in range(17, due, 3):
        cache, _ = attended(model, queries()[:, :, :held], keys[:, :, :held], values[:, :, :held], quant=quant)
        attended(model, queries(length=20, seed=6), *wrong, cache=cache)
        cache.crop(-20)
        attended(model, queries(), keys, values, [LENGTH - held], cache=cache, start=held)
        assert torch.equal(errors[0], errors[-1])
        assert_same(cache, attended(model, queries(), keys, values, quant=quant)[0])


def test_wrong_shapes_are_named_while_queries_are_collected(model):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    cache, _ = attended(model, *(states[:, :, :10] for states in (queries(), keys, values)))
    with pytest.raises(ValueError, match=r"`key_states` must have the shape \[1, 2, tokens, 16\]"):
        cache.quantized_layer(0).update(keys[0, 0], values[0, 0])
    assert cache.get_seq_length() == 10


def test_keys_arranged_before_the_registered_attention(model, errors):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)

    def attend(query, lazy_keys, lazy_values):
        module = torch.nn.Module()
        module.num_key_value_groups, module.is_causal = 1, True
        mask = causal(query.shape[2], lazy_keys.shape[2])[None, None]
        states = (repeated(lazy_keys), repeated(lazy_values))
        return kvquant_attention_forward(module, query, *states, mask, scaling=SCALE)[0].transpose(1, 2)

    for cuts in (None, [10, 90], [1] * LENGTH):
        cache, output = attended(model, queries(), keys, values, cuts, attend=attend)
        assert_same(cache, attended(model, queries(), keys, values, cuts)[0])
    assert len(errors) == 6 and len({float(error) for error in errors}) == 1


@pytest.mark.parametrize("nbits", [8, 16])
def test_keys_that_cannot_be_wider_are_not_watched(model, nbits):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    cache = quant_cache(model, settings(nbits, 2, attention_guard=0.0, outlier_guard=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert feed(cache, keys, values)[0] is not None
    assert cache.quantized_length(0) >= 64 and cache.guarded_layers == ()


def test_asking_late_changes_nothing(model):
    """Keys that are read after the cache has moved on: those of a prompt are what they were, others are stale."""
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    cache = quant_cache(model, WATCHED)
    lazy = feed(cache, keys, values)
    cache.crop(-1)
    output = by_sdpa(queries(), *lazy)
    assert torch.equal(output, by_sdpa(queries(), keys, values))
    assert cache.quantized_length(0) == 0 and torch.equal(cache.dequantize(0)[0], keys[:, :, :-1])
    other, _ = attended(model, *(s[:, :, :20] for s in (queries(), keys, values)))
    stale = feed(other, keys[:, :, 20:], values[:, :, 20:])
    other.crop(-1)
    with pytest.raises(StaleViewError):
        by_sdpa(queries()[:, :, 20:], *stale)


def test_a_prompt_whose_layer_asks_twice_is_judged_once(model, errors):
    """Layers that share keys: the first that reads them counts."""
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    cache = quant_cache(model, WATCHED)
    lazy = feed(cache, keys, values)
    first = by_sdpa(queries(), *lazy)
    assert torch.equal(by_sdpa(queries(), *lazy), first)
    assert len(errors) == 1


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvquant"])
@pytest.mark.parametrize("pads", [(0, 0), (9, 0)])
def test_generation(attention, pads):
    register_attention()
    model = tiny_model("llama")
    model.set_attn_implementation(attention)
    ids, mask = left_pad(random_ids(2, 60), pads)
    results = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*attention_guard.*")
        for quant in (
            {**WATCHED, "attention_guard": 0.0},
            settings(4, 2),
            {**WATCHED, "attention_guard": 1e6},
            settings(2, 2),
        ):
            for prompt in (60, 10):
                cache = quant_cache(model, quant)
                inputs = {"input_ids": ids[:, -prompt:], "attention_mask": mask[:, -prompt:]}
                results.append(model.generate(**inputs, max_new_tokens=60, do_sample=False, **{CACHE_KW: cache}))
                assert cache.guarded_layers == ((0, 1) if quant.get("attention_guard") == 0.0 else ())
    assert all(torch.equal(results[i], results[i + 2]) for i in (0, 1, 4, 5))
    assert not torch.equal(results[0], results[4])


def test_beams_and_samples(model):
    ids = random_ids(1, 60)
    for how in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        results = []
        for quant in ({**WATCHED, "attention_guard": 0.0}, settings(4, 2)):
            torch.manual_seed(0)
            kwargs = {"max_new_tokens": 20, "do_sample": False, **how, CACHE_KW: quant_cache(model, quant)}
            results.append(model.generate(ids, **kwargs))
        assert torch.equal(*results)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma3", "phi3", "cohere", "gpt_oss", "opt", "falcon"])
def test_families_show_their_queries(family, errors):
    for attention in ("eager", "sdpa")[: 1 if family == "gpt_oss" else 2]:  # it has no sdpa
        model = tiny_model(family)
        model.set_attn_implementation(attention)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("error", message=".*attention_guard.*")
            cache = quant_cache(model, {**WATCHED, "attention_guard": 0.0})
            model(random_ids(1, LENGTH), use_cache=True, **{CACHE_KW: cache})
        assert cache.guarded_layers == cache.quantized_layers


def test_a_family_that_adds_while_it_multiplies_does_not_show_them():
    model = tiny_model("bloom")  # `torch.baddbmm` of position biases, queries and keys
    cache = quant_cache(model, {**WATCHED, "attention_guard": 0.0})
    with torch.no_grad(), pytest.warns(UserWarning, match="attention_guard"):
        model(random_ids(1, LENGTH), use_cache=True, **{CACHE_KW: cache})
    assert cache.guarded_layers == () and cache.quantized_length(0) == 80


def test_positions_tell_the_padding(model, errors):
    ids, mask = left_pad(random_ids(2, LENGTH), (9, 0))
    for kwargs in ({"position_ids": positions(mask)}, {}):
        cache = quant_cache(model, WATCHED)
        with torch.no_grad():
            model(ids, attention_mask=mask, use_cache=True, **kwargs, **{CACHE_KW: cache})
    assert not torch.equal(errors[0][:1], errors[2][:1])


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("value", [-0.1, True, "0.1", float("nan"), float("inf"), [0.1]], ids=repr)
def test_bad_limits_are_refused(value):
    with pytest.raises(ValueError, match=r"`attention_guard` must be a finite number >= 0 or None, got"):
        KVQuantConfig(attention_guard=value)
    with pytest.raises(ValueError, match=r"`attention_guard` must be a finite number >= 0 or None, got"):
        KVQuantConfig(layers={0: {"attention_guard": value}})


def test_methods_without_wider_codes_are_refused(model):
    with pytest.raises(ValueError, match=r"guard.* must be None for keys of 4 bits with `method='turboquant'`"):
        quant_cache(model, "turboquant4", attention_guard=0.1)


def test_it_shows(model):
    keys, values = random_states(1, HEADS, LENGTH, HEAD_DIM)
    cache, _ = attended(model, queries(), keys, values, quant={**WATCHED, "attention_guard": 0.0})
    assert "keys 4-bit per_channel group 16, attention guard 0 widened 2-bit" in repr(cache)
    assert "guard: 1 layer with wider keys" in str(cache.memory_report())
    both = quant_cache(model, settings(2, 2, attention_guard=0.02, outlier_guard=4))
    assert "outlier guard 4, attention guard 0.02" in repr(both)


def test_settings_travel(tmp_path):
    config = KVQuantConfig(attention_guard=0.02, layers={1: {"attention_guard": None}})
    config.to_yaml(tmp_path / "c.yaml")
    assert KVQuantConfig.from_yaml(tmp_path / "c.yaml") == config
    assert config != config.replace(attention_guard=0.03)
    assert config.has_guard and not config.for_layer(1, 2, "full_attention").has_guard
    assert not config.without_guards().has_guard
