"""Errors against definitions written out in loops, and what a query reads against what a cache gives it."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec
from kvquant_hf._compat import cache_kwargs
from kvquant_hf.analysis import ERRORS, FACTS, FACTS_NAME, HeadSums, LayerActivations, analyze_window
from kvquant_hf.analysis.attention_error import attention_facts, code_ends, layer_errors, stored
from kvquant_hf.capture import capture
from kvquant_hf.eval import Protocol
from kvquant_hf.layer import QuantLayer
from kvquant_hf.rope import KeyRotation

HEADS, KV_HEADS, TOKENS, QUERIES, DIM = 4, 2, 40, 6, 16
PROTOCOL = Protocol(context=TOKENS, prefill=16, step=8)
KEY = QuantSpec(nbits=2, group_size=16, rope="post")
VALUE = QuantSpec(nbits=2, group_size=16, granularity="per_token")
CONFIG = KVQuantConfig(key=KEY, value=VALUE, residual_length=4, sink_length=2)


def activations(softcap=None, value_dim=DIM):
    hidden = torch.arange(TOKENS) > torch.arange(TOKENS - QUERIES, TOKENS)[:, None]
    mask = torch.zeros(1, 1, QUERIES, TOKENS).masked_fill(hidden, torch.finfo(torch.float32).min)
    return LayerActivations(
        0,
        torch.randn(1, HEADS, QUERIES, DIM),
        torch.randn(1, KV_HEADS, TOKENS, DIM),
        torch.randn(1, KV_HEADS, TOKENS, value_dim),
        mask,
        0.3,
        softcap,
    )


def relative(pairs):
    return {
        name: [
            (math.sqrt(e / n) if ERRORS[name].is_relative else e / n)
            for e, n in zip(error.tolist(), norm.tolist(), strict=True)
        ]
        for name, (error, norm) in pairs.items()
    }


def one_head(layer, head, key, value, ends, sinks):
    """The errors of a query head from their definitions, token by token."""
    kv = head // (HEADS // KV_HEADS)
    sums = dict.fromkeys([*ERRORS, "s", "a", "o"], 0.0)
    for n in range(QUERIES):
        seen = TOKENS - QUERIES + n + 1
        reads = [t for t in range(seen) if sinks <= t < ends[n]]
        mixed_key = [key[0, kv, t] if t in reads else layer.key[0, kv, t] for t in range(seen)]
        mixed_value = [value[0, kv, t] if t in reads else layer.value[0, kv, t] for t in range(seen)]
        query = layer.query[0, head, n]

        def softmax(scores):
            if layer.softcap:
                scores = [layer.softcap * math.tanh(s / layer.softcap) for s in scores]
            weights = [math.exp(s) for s in scores]
            return [w / sum(weights) for w in weights]

        scores = [0.3 * float(query @ layer.key[0, kv, t]) for t in range(seen)]
        moved = [0.3 * float(query @ k) for k in mixed_key]
        a, b = softmax(scores), softmax(moved)

        def total(weights, values):
            return sum(w * v for w, v in zip(weights, values, strict=True))

        values = list(layer.value[0, kv, :seen])
        out = total(a, values)
        sums["s"] += sum(s * s for s in scores)
        sums["a"] += sum(p * p for p in a)
        sums["o"] += float(out.square().sum())
        sums["score_error"] += sum((s - m) ** 2 for s, m in zip(scores, moved, strict=True))
        sums["probability_error"] += sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
        sums["attention_kl"] += sum(p * math.log(p / q) for p, q in zip(a, b, strict=True)) / QUERIES
        sums["output_error_from_keys"] += float((out - total(b, values)).square().sum())
        sums["output_error_from_values"] += float((out - total(a, mixed_value)).square().sum())
        sums["output_error"] += float((out - total(b, mixed_value)).square().sum())
    found = {name: math.sqrt(sums[name] / sums["o"]) for name in ERRORS if name.startswith("output")}
    found["score_error"] = math.sqrt(sums["score_error"] / sums["s"])
    found["probability_error"] = math.sqrt(sums["probability_error"] / sums["a"])
    return found | {"attention_kl": sums["attention_kl"]}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("value_granularity", ["per_token", "per_channel"])
@pytest.mark.parametrize("key_granularity", ["per_token", "per_channel"])
def test_errors_equal_their_definitions(key_granularity, value_granularity, softcap):
    layer = activations(softcap, value_dim=32)
    config = replace(
        CONFIG, key=replace(KEY, granularity=key_granularity), value=replace(VALUE, granularity=value_granularity)
    )
    settings = QuantLayer(config)
    found = relative(layer_errors(layer, settings, PROTOCOL))
    key, value = stored(settings, layer.key, layer.value)
    ends = code_ends(config, PROTOCOL, QUERIES).tolist()
    for head in range(HEADS):
        for name, expected in one_head(layer, head, key, value, ends, config.sink_length).items():
            assert found[name][head] == pytest.approx(expected, rel=1e-4), name
    for name, exact, back in (("key_error", layer.key, key), ("value_error", layer.value, value)):
        for head in range(KV_HEADS):
            coded = slice(config.sink_length, max(ends))
            x, y = exact[0, head, coded], back[0, head, coded]
            assert found[name][head] == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-5)


def test_stored_groups_follow_the_axis():
    """Per channel, 16 tokens of one channel share four levels; per token, 16 channels of one token do."""
    key, value = torch.randn(1, 1, 32, 32), torch.randn(1, 1, 32, 32)
    for granularity in ("per_channel", "per_token"):
        config = KVQuantConfig(replace(KEY, granularity=granularity), replace(VALUE, granularity=granularity), 0, 0)
        for back, exact in zip(stored(QuantLayer(config), key, value), (key, value), strict=True):
            groups = back[0, 0].T if granularity == "per_channel" else back[0, 0]
            other = back[0, 0] if granularity == "per_channel" else back[0, 0].T
            assert max(len(row.unique()) for row in groups[:, :16]) <= 4
            assert max(len(row.unique()) for row in other[:, :16]) > 4
            assert (back - exact).abs().max() < 2


def test_sixteen_bits_make_no_error():
    layer = activations()
    config = replace(CONFIG, key=QuantSpec(nbits=16))
    found = relative(layer_errors(layer, QuantLayer(config), PROTOCOL))
    for name in ("key_error", "score_error", "probability_error", "output_error_from_keys"):
        assert max(found[name]) == 0
    assert min(found["value_error"]) > 0
    assert found["output_error"] == pytest.approx(found["output_error_from_values"], rel=1e-4)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("residual", [0, 5, 16])
@pytest.mark.parametrize("step", [1, 8, 24])
def test_code_ends_are_those_of_a_cache(sinks, residual, step):
    protocol = Protocol(context=90, prefill=30, step=step)
    config = replace(CONFIG, sink_length=sinks, residual_length=residual)
    layer, expected = QuantLayer(config), []
    for first, end in protocol.pieces():
        states = torch.randn(1, 1, end - first, DIM)
        layer.update(states, states)
        expected += [sinks + layer.quantized_length] * (end - first)
    assert code_ends(config, protocol, 60).tolist() == expected[-60:]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_query_reads_what_the_cache_gives_it(family):
    """The output error of the first quantized layer is that of the attention output through a real cache."""
    model = tiny_model(family, attn_implementation="eager")
    ids, protocol = torch.randint(1, 128, (72,)), Protocol(context=72, prefill=40, step=8)
    spec = {"nbits": 2, "group_size": 16}
    config = KVQuantConfig.from_dict({"key": spec, "value": spec, "residual_length": 8, "sink_length": 2})
    cache = QuantCache(model, config)
    index = next(i for i, layer in enumerate(cache.layers) if isinstance(layer, QuantLayer))
    for first, end in protocol.pieces():
        with torch.no_grad():
            model(ids[None, first:end], use_cache=True, **cache_kwargs(cache))
    captured = []
    capture(model, ids, [index], captured.append, queries=8)
    layer = captured[0]
    key, value = cache.dequantize(index)  # what the last piece attended to
    # Its inputs do not depend on the cache: whatever lies below is exact.
    probabilities = layer.log_probabilities(layer.raw_scores(key)).exp()
    exact = layer.log_probabilities(layer.raw_scores(layer.key)).exp()
    exact, moved = layer.output(exact, layer.value), layer.output(probabilities, value)
    expected = ((exact - moved).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1))[0]
    found = analyze_window(model, ids, {"two": config}, protocol, queries=8)["two"]
    assert found.layers[0] == index
    assert found.values("output_error")[0] == pytest.approx(expected.tolist(), rel=1e-3)
    assert min(expected) > 0.01


def test_facts_equal_their_definitions():
    layer = activations()
    rotation = KeyRotation(torch.tensor([1.0, 0.1, 0.01, 0.5, 0.05, 0.2, 0.3, 0.4]), DIM)
    found = {name: (e / n).tolist() for name, (e, n) in attention_facts(layer, rotation).items()}
    assert set(found) == set(FACTS)
    probabilities = layer.log_probabilities(layer.raw_scores(layer.key)).exp()[0]
    for head in range(HEADS):
        shares = []
        for n in range(QUERIES):
            seen = TOKENS - QUERIES + n + 1
            ordered = sorted(probabilities[head, n].tolist(), reverse=True)
            needed = next(k for k in range(1, seen + 1) if sum(ordered[:k]) >= 0.95)
            shares.append(1 - needed / seen)
        assert found["negligible"][head] == pytest.approx(sum(shares) / QUERIES)
        assert found["first_token"][head] == pytest.approx(float(probabilities[head, :, 0].mean()))


def test_outliers_are_fixed_before_the_rotary_embedding():
    """A constant large channel stands out before RoPE and is smeared over its pair after it."""
    rotation = KeyRotation(torch.full((8,), 1.0), DIM)
    before = torch.rand(1, KV_HEADS, TOKENS, DIM) + 0.5
    before[..., 3] *= 20
    key = rotation.apply(before, *rotation.tables(torch.arange(TOKENS)))
    facts = attention_facts(replace(activations(), key=key), rotation)
    pre, post = (float(facts[name][0][0]) for name in ("outliers_pre", "outliers_post"))
    assert pre == pytest.approx(20, rel=0.2) and post < 0.8 * pre
    bare = attention_facts(replace(activations(), key=key), None)
    assert torch.equal(bare["outliers_pre"][0], bare["outliers_post"][0])


def test_windows_add_up():
    one = HeadSums((2, 5), {"key_error": [[1.0], [4.0]]}, {"key_error": [[4.0], [4.0]]})
    two = HeadSums((2, 5), {"key_error": [[0.0], [5.0]]}, {"key_error": [[0.0], [0.0]]})
    both = HeadSums.total([one, two])
    assert both.values("key_error") == [[0.5], [1.5]] and both.mean("key_error") == 1.0
    assert one.by_layer("key_error") == [0.5, 1.0]
    assert HeadSums.from_dict(both.to_dict()) == both
    assert math.isnan(two.values("key_error")[0][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual_length": 200}, "No token of a window of 40 would be read from codes"),
        ({"key": QuantSpec(nbits=16), "value": QuantSpec(nbits=16)}, "No token"),
    ],
)
def test_settings_that_quantize_nothing_are_refused(changes, message):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=message):
        analyze_window(model, torch.randint(1, 128, (TOKENS,)), {"x": replace(CONFIG, **changes)}, PROTOCOL)


def test_wrong_windows_and_names_are_refused():
    model, ids = tiny_model("llama"), torch.randint(1, 128, (TOKENS,))
    with pytest.raises(ValueError, match=r"`window` must have shape \[40\]"):
        analyze_window(model, ids[1:], {"x": CONFIG}, PROTOCOL)
    with pytest.raises(ValueError, match="must not use the name"):
        analyze_window(model, ids, {FACTS_NAME: CONFIG}, PROTOCOL)


@pytest.mark.parametrize("of_a_layer", [False, True])
def test_guards_that_ask_queries_are_refused(of_a_layer):
    """They would leave keys exact until attention asks, and errors would be zero."""
    guard = {"attention_guard": 0.1}
    config = KVQuantConfig(key=QuantSpec(2, granularity="per_channel", group_size=16)).replace(
        **({"layers": {1: guard}} if of_a_layer else guard), residual_length=16
    )
    with pytest.raises(ValueError, match=r"`attention_guard` must be None where attention is analyzed.*'mine'"):
        analyze_window(tiny_model("llama"), torch.randint(0, 128, (64,)), {"mine": config}, Protocol(64, 32, 16))
