"""Orders of channels from model to cache: what they are made of, which is chosen, what is refused."""

import dataclasses

import pytest
import torch
from tiny_models import tiny_model

from kvquant_hf import KVQuantConfig, QuantCache
from kvquant_hf._compat import cache_kwargs
from kvquant_hf.analysis import analyze_window, calibrate_orders, channel_orders
from kvquant_hf.eval import Protocol
from kvquant_hf.rotation import hadamard_of_heads

PROTOCOL = Protocol(context=100, prefill=40, step=10)
SIDE = {"nbits": 2, "granularity": "per_token", "group_size": 16, "rotation": "hadamard"}
SMALL = {"residual_length": 16, "key": {**SIDE, "rotation": "grouped_heads"}, "value": SIDE}


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_the_order_that_moves_attention_least_serves_a_cache(family):
    model, windows = tiny_model(family), tokens(2, 100)
    config = KVQuantConfig.from_dict(SMALL)
    ticks = []
    found = calibrate_orders(model, windows, config, PROTOCOL, lambda: ticks.append(1))
    layers = QuantCache(model).quantized_layers
    assert len(ticks) == 4 and tuple(found.orders) == layers
    assert family != "gemma3" or len(layers) < model.config.num_hidden_layers
    cache = QuantCache(model, found.config)
    for index, sides in found.orders.items():
        resolved = cache.quantized_layer(index).config
        for side, entry in sides.items():
            assert getattr(resolved, side) == dataclasses.replace(
                getattr(config, side), channel_order=entry.channel_order
            )
            assert set(entry.errors) == {"none", *channel_orders.RULES} and min(entry.errors.values()) > 0
            assert entry.errors[entry.rule] == min(entry.errors.values())
            assert (entry.rule == "none") == (entry.channel_order == ())
    rules = {entry.rule for sides in found.orders.values() for entry in sides.values()}
    assert rules - {"none"}
    assert calibrate_orders(model, windows, config, PROTOCOL) == found
    assert KVQuantConfig.from_dict(found.config.to_dict()) == found.config
    assert found.config.nominal_bits(16) == config.nominal_bits(16)
    with torch.no_grad():
        for part in windows.split(23, dim=1):
            logits = model(part, **cache_kwargs(cache)).logits
    assert torch.isfinite(logits).all() and cache.quantized_length(layers[0]) >= 32


def test_errors_are_those_of_the_order_alone():
    """What a cache of the chosen settings does to attention is what the choice was made by."""
    model, windows = tiny_model("llama"), tokens(1, 100)
    config = KVQuantConfig.from_dict(SMALL)
    found = calibrate_orders(model, windows, config, PROTOCOL)
    both = analyze_window(model, windows[0], {"new": found.config, "old": config}, PROTOCOL)
    for side, measure in (("key", "attention_kl"), ("value", "output_error_from_values")):
        for name in ("new", "old"):
            entries = [sides[side] for sides in found.orders.values()]
            want = [entry.errors[entry.rule if name == "new" else "none"] for entry in entries]
            torch.testing.assert_close(torch.tensor(both[name].by_layer(measure)), torch.tensor(want))


@pytest.mark.parametrize("rotation", ["grouped_heads", "hadamard"])
def test_channels_are_sorted_as_the_projection_made_them(rotation, monkeypatch):
    """Before the rotary embedding and after heads were mixed, without the exact first tokens, over all windows."""
    model, windows = tiny_model("llama"), tokens(2, 100)
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    hooks = [
        model.model.layers[index].self_attn.k_proj.register_forward_hook(
            lambda module, inputs, output, index=index: seen[index].append(output.detach())
        )
        for index in seen
    ]
    config = KVQuantConfig.from_dict(SMALL | {"key": {**SIDE, "rotation": rotation}, "value": {"nbits": 16}})
    monkeypatch.setattr(channel_orders, "RULES", {"widest head": channel_orders.RULES["widest head"]})
    orders = []
    monkeypatch.setattr(channel_orders, "_order", lambda width: orders.append(width) or tuple(range(len(width))))
    calibrate_orders(model, windows, config, PROTOCOL)
    for hook in hooks:
        hook.remove()
    for index, width in zip((0, 1), orders, strict=True):
        heads = [part[0].unflatten(-1, (2, -1)).transpose(0, 1)[None, :, 4:] for part in seen[index][:2]]
        if rotation == "grouped_heads":
            heads = [hadamard_of_heads(part) for part in heads]
        want = torch.cat(heads, dim=2)[0].abs().mean(1).amax(0)
        torch.testing.assert_close(width, want, atol=1e-4, rtol=1e-3)


def test_rules_put_wide_channels_first():
    sizes = torch.tensor([[1.0, 9.0, 2.0, 0.0], [40.0, 8.0, 0.0, 50.0]])
    got = {rule: channel_orders._order(width(sizes)) for rule, width in channel_orders.RULES.items()}
    assert got == {"widest head": (3, 0, 1, 2), "mean square": (3, 0, 1, 2), "mean share": (1, 3, 0, 2)}
    assert channel_orders._order(torch.zeros(4)) == (0, 1, 2, 3)


def test_the_order_of_the_model_stays_where_none_is_better(monkeypatch):
    monkeypatch.setattr(channel_orders, "RULES", {"as it is": lambda sizes: -torch.arange(sizes.shape[-1]).float()})
    found = calibrate_orders(tiny_model("llama"), tokens(1, 100), KVQuantConfig.from_dict(SMALL), PROTOCOL)
    for sides in found.orders.values():
        for entry in sides.values():
            assert (entry.rule, entry.channel_order) == ("none", ())
            assert entry.errors["as it is"] == entry.errors["none"]


def test_layers_and_sides_of_other_settings_are_kept_as_they_are():
    layers = {1: {"value": {"rotation": "none"}, "residual_length": 32}, 0: {"key": {"nbits": 16}, "sink_length": 8}}
    config = KVQuantConfig.from_dict(SMALL | {"layers": layers})
    found = calibrate_orders(tiny_model("llama"), tokens(1, 100), config, PROTOCOL)
    assert {index: set(sides) for index, sides in found.orders.items()} == {0: {"value"}, 1: {"key"}}
    for index, side in ((0, "value"), (1, "key")):
        old, new = (each.for_layer(index, 2, "full_attention") for each in (config, found.config))
        order = found.orders[index][side].channel_order
        assert new == dataclasses.replace(old, **{side: dataclasses.replace(getattr(old, side), channel_order=order)})


@pytest.mark.parametrize("selector", ["0-1", "full_attention", -2])
def test_orders_that_are_there_give_way(selector):
    """Those of ranges and types of layers, too: what is found is what a cache gets, and the model's order is one."""
    old = {side: {"channel_order": list(range(15, -1, -1))} for side in ("key", "value")}
    config = KVQuantConfig.from_dict(SMALL | {"layers": {selector: {**old, "residual_length": 32}}})
    model, windows = tiny_model("llama"), tokens(1, 100)
    found = calibrate_orders(model, windows, config, PROTOCOL)
    plain = config.replace(layers={selector: {"residual_length": 32}})
    assert calibrate_orders(model, windows, plain, PROTOCOL).orders == found.orders
    cache = QuantCache(model, found.config)
    for index, sides in found.orders.items():
        layer = cache.quantized_layer(index).config
        assert layer.residual_length == (32 if selector != -2 or index == 0 else 16)
        assert all(getattr(layer, side).channel_order == entry.channel_order for side, entry in sides.items())


@pytest.mark.parametrize("top", [True, False])
def test_no_order_wins_by_tripping_the_guard(top):
    guard = {"outlier_guard": 1.4}
    config = KVQuantConfig.from_dict(SMALL | (guard if top else {"layers": {"0-1": guard}}))
    model, windows = tiny_model("llama"), tokens(1, 100)
    found = calibrate_orders(model, windows, config, PROTOCOL)
    assert found.orders == calibrate_orders(model, windows, KVQuantConfig.from_dict(SMALL), PROTOCOL).orders
    cache = QuantCache(model, found.config)
    assert all(cache.quantized_layer(index).config.outlier_guard == 1.4 for index in found.orders)


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"key": {}, "value": {}}, (1, 100), "orders of channels need keys or values with a `rotation`, got 4-bit"),
        (
            {"key": {"nbits": 16, "rotation": "hadamard"}, "value": {}},
            (1, 100),
            "need keys or values with a `rotation`",
        ),
        ({}, (100,), r"`windows` must be integers \[N, T\], got \[100\]"),
        ({}, (1, 90), r"`windows` must have 100 tokens each, got 90"),
        ({}, (1, 0), r"`windows` must have 100 tokens each, got 0"),
        ({"residual_length": 128}, (1, 100), "No token of a window of 100 would be read from codes"),
    ],
)
def test_bad_input_is_named(changes, shape, message):
    with pytest.raises(ValueError, match=message):
        calibrate_orders(tiny_model("llama"), tokens(*shape), KVQuantConfig.from_dict(SMALL | changes), PROTOCOL)
