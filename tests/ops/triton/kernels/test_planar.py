"""The decode kernel for blocks in the common layout against the float32 twin."""

import pytest
import torch

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops.triton import launch as launching
from tests.ops.triton.kernels.test_decode import BF16, F32, build, check, promoted, rope

TOKENS, CHANNELS = {"granularity": "per_token"}, {"granularity": "per_channel"}
TURBO = {"method": "turboquant", "symmetric": True, "levels": "gaussian", "rotation": "hadamard", "group_size": 128}
ORDER32, ORDER40 = ({"channel_order": [7 * place % size for place in range(size)]} for size in (32, 40))
TABLE4 = (-1.0, -0.6, -0.35, -0.2, -0.1, -0.05, -0.02, 0.0, 0.03, 0.06, 0.12, 0.2, 0.3, 0.5, 0.7, 1.0)


def both(key: dict, value: dict | None = None, **more) -> dict:
    return {"key": {"nbits": 4, **key}, "value": {"nbits": 4, **(key if value is None else value)}, **more}


def preset(name: str, **more) -> dict:
    """Settings of a preset, with a short window."""
    config = KVQuantConfig.resolve(name)
    sides = {side: vars(getattr(config, side)) for side in ("key", "value")}
    return sides | {"D": 64} | more


# id, tokens, then what differs from one row, two heads, one query head each, D 32, float16, RoPE over the whole head.
CASES = [
    ("fp8", 150, preset("fp8", rotation=None)),
    ("nvfp4", 150, preset("nvfp4", rotation=None, dtype=BF16)),
    ("turboquant2", 150, preset("turboquant2", rotation=None)),
    ("turboquant3", 150, preset("turboquant3", rotation=None, D=128, H=1)),
    ("turboquant4-two-norms", 100, preset("turboquant4", rotation=None, D=192, H=1)),
    ("innerq3", 300, preset("innerq3", rotation=None, spread=1.0)),
    ("kvquant2", 300, preset("kvquant2", G=3)),
    ("kvquant3", 300, preset("kvquant3", H=1, dtype=BF16)),
    ("rotatekv2", 150, preset("rotatekv2", H=4)),
    ("rotatekv2-two-of-six", 150, preset("rotatekv2", H=6, D=32, G=2)),
    ("rotatekv2-one-head", 150, preset("rotatekv2", H=3, D=32)),
    ("keys-per-token-pre-rope", 150, both(TOKENS)),
    ("keys-per-token-group-16", 150, both({**TOKENS, "group_size": 16}, D=64)),
    ("keys-per-token-post-rope", 150, both({**TOKENS, "nbits": 3}, rotation=None)),
    ("keys-per-token-short-last-group", 150, both({**TOKENS, "group_size": 64}, D=80, rotation=rope(80, 80))),
    ("values-per-channel", 150, both({"nbits": 2}, {**CHANNELS, "nbits": 3}, DV=48)),
    ("values-per-channel-symmetric", 150, both({}, {**CHANNELS, "symmetric": True, "nbits": 8})),
    ("k8v8-per-token", 150, both({**TOKENS, "nbits": 8})),
    ("gaussian", 150, both({"levels": "gaussian", "nbits": 2}, {"levels": "laplace", "nbits": 3})),
    ("gaussian-symmetric", 150, both({"levels": "gaussian", "symmetric": True}, dtype=BF16)),
    ("listed-levels", 150, both({"levels": TABLE4})),
    ("e5m2", 150, both({"levels": "e5m2", "nbits": 8, "symmetric": True}, {"levels": "e4m3", "nbits": 8})),
    ("e2m1-bytes-per-channel", 150, both({"levels": "e2m1", "symmetric": True, "metadata_nbits": 8})),
    ("bytes-of-even-scales", 150, both({"symmetric": True, "metadata_nbits": 8})),
    ("coarse-bytes", 150, both({**TOKENS, "symmetric": True, "metadata_nbits": 8}, spread=3.0, scale=1e-3, dtype=F32)),
    ("centered", 300, both({"method": "variance_normalized", "centered": True}, spread=1.0, outliers=10.0)),
    (
        "centered-per-token",
        150,
        both({**TOKENS, "method": "variance_normalized", "centered": True}, spread=1.0, DV=48),
    ),
    ("outliers", 150, both({"outliers": 0.01, "nbits": 2}, G=2)),
    ("outliers-post-rope-per-token", 150, both({**TOKENS, "outliers": 0.02}, rotation=None)),
    ("outliers-of-tables", 150, both({"outliers": 0.02, "levels": "gaussian"}, D=64)),
    ("outliers-values-per-channel", 150, both({}, {**CHANNELS, "outliers": 0.01, "nbits": 2})),
    ("outliers-hadamard", 150, both({"outliers": 0.01, "rotation": "hadamard_signs"}, rotation=None)),
    ("outliers-partial-rope", 150, both({"outliers": 0.02, "nbits": 2}, D=80, rotation=rope(32, 80, 8))),
    ("outliers-interleaved", 150, both({"outliers": 0.02}, rotation=rope(12, 32, 10, "interleaved"), dtype=BF16)),
    ("outliers-of-symmetric-codes", 150, both({"outliers": 0.005, "symmetric": True})),
    ("outliers-padded", 150, both({"outliers": 0.02}, B=3, padding=[37, 2, 0], mask="pads")),
    ("innerq-hybrid", 300, both({**TOKENS, "method": "innerq"}, {**CHANNELS, "method": "innerq"}, spread=1.0)),
    ("innerq-per-channel-keys", 300, both({"method": "innerq", "nbits": 3}, {**TOKENS, "method": "innerq"})),
    ("factors-per-token-keys", 150, both({**TOKENS, "method": "variance_normalized"}, spread=1.0)),
    ("factors-values-per-channel", 150, both({}, {**CHANNELS, "method": "variance_normalized"}, spread=1.0)),
    ("hadamard-pre-rope", 150, both({"rotation": "hadamard"})),
    ("hadamard-signs-pre-rope", 150, both({"rotation": "hadamard_signs", "nbits": 3}, D=48, rotation=rope(48, 48))),
    ("hadamard-signs-padded", 150, both({"rotation": "hadamard_signs"}, B=2, padding=[101, 0], mask="pads")),
    ("grouped-heads-post-rope", 150, both({"rotation": "grouped_heads"}, H=4, rotation=None)),
    ("grouped-heads-per-channel", 150, both({"rotation": "grouped_heads"}, {}, H=2, G=3)),
    ("ordered-pre-rope", 150, both({"rotation": "hadamard_signs", **ORDER32}, {})),
    ("ordered-post-rope", 150, both({**TOKENS, "rotation": "hadamard", **ORDER32}, {}, rotation=None)),
    ("ordered-grouped-heads", 150, both({**TOKENS, "rotation": "grouped_heads", **ORDER32}, TOKENS, H=4)),
    ("ordered-outliers", 150, both({"outliers": 0.01, "rotation": "hadamard", **ORDER32}, {}, rotation=None)),
    ("ordered-values", 150, both({"levels": "gaussian"}, {**TOKENS, "rotation": "hadamard", **ORDER32})),
    ("ordered-values-signs", 150, both({}, {"rotation": "hadamard_signs", **ORDER32}, q_len=3, G=2)),
    ("ordered-values-d40", 150, both({}, {**TOKENS, "rotation": "hadamard", **ORDER40}, DV=40, mask="bool")),
    ("ordered-both", 150, both({"rotation": "hadamard", **ORDER32}, {"rotation": "grouped_heads", **ORDER32}, H=2)),
    ("interleaved", 150, both(TOKENS, rotation=rope(32, 32, 0, "interleaved"))),
    ("partial", 150, both(TOKENS, rotation=rope(8, 32, 24))),
    ("promoted-beside-tables", 150, promoted(2, 0.25, levels="gaussian")),
    ("promoted-values", 150, both({}, {**CHANNELS, "promoted": 0.25, "nbits": 2})),
    ("promoted-d80-k3", 300, {**promoted(3, 0.5, 4, 64, levels="gaussian"), "D": 80, "rotation": rope(80, 80)}),
    ("k16", 150, both({"nbits": 16}, {"levels": "gaussian"}, dtype=F32)),
    ("v16", 150, both({"levels": "gaussian"}, {"nbits": 16}, dtype=BF16)),
    ("d18", 150, both({"group_size": 16}, D=18, rotation=rope(18, 18))),
    ("d72-k3", 150, both({"nbits": 3}, D=72, rotation=rope(24, 72))),
    ("d256", 100, both(TOKENS, D=256, H=1)),
    ("other-value-size", 150, both(TOKENS, D=64, DV=40)),
    ("blocks-of-128", 300, both({"levels": "gaussian", "group_size": 128}, H=1, sm=5)),
    ("many-splits", 700, both(TOKENS, H=1, sm=9)),
    ("many-rows", 150, both({"outliers": 0.01}, G=5, q_len=8, mask="causal", H=1)),
    ("only-window", 19, both({"levels": "gaussian"})),
    ("only-sinks", 3, both({"levels": "gaussian"})),
    ("no-window", 132, both(TOKENS, residual_length=0)),
    ("bool-mask", 150, both(TOKENS, B=2, G=2, q_len=2, mask="bool")),
    ("additive-mask", 150, both({"levels": "gaussian"}, B=2, G=2, mask="additive", dtype=BF16)),
    ("one-token-only", 150, both(TOKENS, mask="one")),
    ("padded", 150, both(TOKENS, B=3, padding=[37, 2, 0], mask="pads")),
    ("pads-up-to-the-window", 150, both({"levels": "gaussian"}, B=2, padding=[146, 60], mask="pads")),
    ("too-large-for-half-words", 150, both({}, magnitude=2e4, scale=1e-9, dtype=BF16)),
    ("float32-parameters", 150, both({}, magnitude=1e6, scale=1e-13, dtype=F32)),
]


@pytest.mark.parametrize(("tokens", "shape"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_decode_against_the_twin(tokens, shape, device, monkeypatch):
    case = check(tokens, device, monkeypatch, **shape)
    assert launching.not_in_words(case.view) is not None
    if tokens > 40:
        assert case.view.num_blocks > 1


def test_constant_groups_of_the_hybrid_have_a_scale_of_minus_zero(device):
    side = {"method": "innerq", "granularity": "per_channel", "nbits": 4}
    config = KVQuantConfig(backend="triton", residual_length=16, sink_length=0).replace(value=side)
    states = torch.full((1, 2, 150, 32), 0.3, device=device).half()
    layer = QuantLayer(config)
    layer.update(states, states)
    store = layer.view().value_store
    assert store.scale is not None
    scale = store.scale[:, :, : store.num_blocks]
    assert (scale == 0).all() and scale.signbit().all()
    output = launching.decode_attention(torch.ones(1, 2, 1, 32, device=device).half(), layer.view(), None, 0.2)
    torch.testing.assert_close(output, states[:, :, :1], rtol=2e-3, atol=0)


def test_both_kernels_agree(device):
    """The same numbers in words and in the common layout."""
    case = build(150, device, **both({"nbits": 3}, G=2))
    words = launching.decode_attention(case.query, case.view, None, 0.2)
    for store in case.layer._block_stores():
        store.leave_own_layout()
    assert launching.not_in_words(case.layer.view()) is not None
    torch.testing.assert_close(
        launching.decode_attention(case.query, case.layer.view(), None, 0.2), words, rtol=0, atol=4e-3
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (both({"metadata_nbits": 8}), "zero points of 8 bits"),
        (both({**TURBO, **TOKENS, "method": "turboquant_prod"}, rotation=None), "turboquant_prod"),
        (both({"outliers": 0.01, "rotation": "hadamard"}), "Hadamard basis"),
        (both({"outliers": 0.01, "rotation": "grouped_heads"}), "grouped_heads"),
        (both({"rotation": "hadamard"}, D=256), "head size 256"),
        (both(TOKENS, D=272, rotation=rope(32, 272)), "head sizes 272"),
        (both(TOKENS, dtype=torch.float64), "float64"),
    ],
)
def test_what_is_refused_is_named(settings, reason, device):
    case = build(150, device, **settings)
    with pytest.raises(ValueError, match=reason):
        launching.decode_attention(case.query, case.view, None, 0.2)
