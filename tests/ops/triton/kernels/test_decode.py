"""The decode kernels against the float32 twin, on shapes chosen to hurt."""

from types import SimpleNamespace

import pytest
import torch

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import reference
from kvquant_hf.ops.triton import arguments as shared
from kvquant_hf.ops.triton import launch as launching
from kvquant_hf.ops.triton.tuning import Launch
from kvquant_hf.rope import KeyRotation
from tests.ops.triton.kernels.fences import Fences, fence_view, fenced_empty

# Relative L2 error of a head, by the dtype of the queries.
LIMITS = {torch.float16: 2e-3, torch.float32: 2e-3, torch.bfloat16: 4e-3}
F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
SMALL = Launch(BN=32, BND=16, num_warps=4, num_stages=2)


def rope(width: int, head_dim: int, offset: int = 0, pairing: str = "half") -> KeyRotation:
    frequencies = 1 / 1000 ** (torch.arange(width // 2) / (width // 2))
    return KeyRotation(frequencies, head_dim, offset=offset, pairing=pairing)


def kv(key_bits: int, value_bits: int, group: int = 32, **both) -> dict:
    return {
        "key": {"nbits": key_bits, "group_size": group, **both},
        "value": {"nbits": value_bits, "group_size": group, **both},
    }


def promoted(
    key_bits: int, share: float, value_bits: int = 4, group: int = 32, key_rotation: str = "none", **value
) -> dict:
    return {
        "key": {"nbits": key_bits, "group_size": group, "promoted": share, "rotation": key_rotation},
        "value": {"nbits": value_bits, "group_size": group, **value},
    }


VARN = {"method": "variance_normalized"}
ORDER32 = {"channel_order": [7 * place % 32 for place in range(32)]}
VALUES_OF_PRESETS = {"rotation": "hadamard", "clip": "mse", "symmetric": True}
WIDE = Launch(BN=64, BND=16, num_warps=4, num_stages=2)

# id, tokens, then what differs from one row, two heads, one query head each, D 32, float16, RoPE over the whole head.
CASES = [
    ("only-sinks", 3, {}),
    ("sinks-and-window", 19, {}),
    ("first-block", 52, {}),
    ("one-token-short-of-a-block", 83, {}),
    ("one-block-more", 84, {}),
    ("tile-straddled", 179, {"B": 2, "launch": Launch(64, 16, 4, 2)}),
    ("many-splits", 700, {"B": 1, "H": 1, "sm": 9}),
    ("no-sinks", 150, {"sink_length": 0}),
    ("no-window", 132, {"residual_length": 0, "sink_length": 4}),
    ("neither", 128, {"residual_length": 0, "sink_length": 0}),
    ("long-window", 200, {"residual_length": 140, "sink_length": 17}),
    ("k2v2", 150, {**kv(2, 2), "dtype": BF16}),
    ("k3v3", 150, kv(3, 3)),
    ("k8v8", 150, {**kv(8, 8), "dtype": BF16}),
    ("k2v8", 133, {**kv(2, 8), "G": 3}),
    ("k8v3", 133, {**kv(8, 3), "dtype": F32}),
    ("k4v16", 133, {"B": 2, **kv(4, 16), "dtype": BF16}),
    ("k16v2", 133, {**kv(16, 2), "dtype": F16}),
    ("symmetric", 133, {**kv(4, 4, symmetric=True), "dtype": BF16}),
    ("symmetric-k3v2", 133, {**kv(3, 2, symmetric=True)}),
    ("symmetric-k8v8", 133, {**kv(8, 8, symmetric=True)}),
    ("symmetric-k2v2-group-64", 220, {**kv(2, 2, 64, symmetric=True), "D": 64, "dtype": BF16}),
    ("group-16", 133, {**kv(4, 2, 16), "D": 64}),
    ("group-64", 220, {**kv(2, 4, 64), "D": 64}),
    ("group-128", 300, {**kv(4, 4, 128), "D": 128, "B": 1, "launch": Launch(32, 16, 4, 2)}),
    ("mixed-groups", 220, {"key": {"group_size": 64}, "value": {"group_size": 16, "nbits": 2}, "D": 64}),
    ("d16", 133, {"D": 16}),
    ("d16-k2v2", 133, {"D": 16, **kv(2, 2)}),
    ("d16-k3v3", 133, {"D": 16, **kv(3, 3)}),
    ("d48-k3v8", 133, {"D": 48, **kv(3, 8), "rotation": rope(48, 48)}),
    ("d80", 133, {"D": 80, "dtype": BF16, "rotation": rope(32, 80)}),
    ("d80-k2v3", 133, {"D": 80, **kv(2, 3), "rotation": rope(80, 80)}),
    ("d96", 133, {"D": 96, "B": 1}),
    ("d112-k8v2", 133, {"D": 112, **kv(8, 2, 16), "B": 1}),
    ("d128", 133, {"B": 2, "H": 1, "D": 128, "dtype": BF16}),
    ("d192", 100, {"D": 192, "DV": 128, "H": 1}),
    ("d256", 100, {"D": 256, "dtype": BF16, "H": 1, **kv(2, 4)}),
    ("other-value-size", 133, {"D": 64, "DV": 32}),
    ("interleaved", 133, {"rotation": rope(32, 32, 0, "interleaved")}),
    ("partial-at-the-end", 133, {"rotation": rope(8, 32, 24)}),
    ("partial-interleaved", 133, {"rotation": rope(12, 32, 10, "interleaved"), "dtype": BF16}),
    ("post-rope", 133, {"rotation": None}),
    ("hadamard-both", 150, {"rotation": None, **kv(4, 2, rotation="hadamard")}),
    ("signs-of-keys", 150, {"rotation": None, "key": {"rotation": "hadamard_signs"}}),
    ("hadamard-values", 150, {"value": {"rotation": "hadamard"}, "dtype": BF16}),
    ("ordered-both", 150, {"rotation": None, **kv(4, 2, rotation="hadamard", **ORDER32)}),
    ("ordered-values", 150, {"value": {**VALUES_OF_PRESETS, **ORDER32}, "dtype": BF16}),
    ("ordered-signs-of-keys", 150, {"rotation": None, "key": {"rotation": "hadamard_signs", **ORDER32}}),
    ("hadamard-d80", 133, {"rotation": None, "D": 80, **kv(4, 4, rotation="hadamard")}),
    ("gqa-7", 133, {"G": 7}),
    ("gqa-16", 133, {"G": 16, "dtype": BF16}),
    ("gqa-5-rows-15", 133, {"G": 5, "q_len": 3, "mask": "causal"}),
    ("rows-16", 133, {"q_len": 16, "mask": "causal"}),
    ("rows-40", 133, {"G": 5, "q_len": 8, "mask": "causal", "H": 1}),
    ("bool-mask-per-head", 133, {"B": 2, "G": 2, "mask": "bool", "q_len": 2}),
    ("bool-mask-shared", 133, {"B": 2, "mask": "shared"}),
    ("additive-mask", 133, {"B": 2, "G": 2, "mask": "additive", "dtype": BF16}),
    ("additive-mask-f32-lowest", 133, {"mask": "lowest", "q_len": 2}),
    ("one-token-only", 133, {"mask": "one"}),
    ("last-tokens-only", 133, {"mask": "last"}),
    ("padded", 150, {"B": 3, "padding": [37, 2, 0], "mask": "pads"}),
    (
        "padded-hadamard",
        150,
        {"B": 2, "padding": [101, 0], "mask": "pads", **kv(4, 4, rotation="hadamard"), "rotation": None},
    ),
    ("pads-up-to-the-window", 150, {"B": 2, "padding": [146, 60], "mask": "pads"}),
    ("outlier-channels", 200, {"outliers": 30.0, "limit": 4.0}),
    ("small-values", 133, {"magnitude": 2e-3}),
    ("factors", 133, {"B": 2, **kv(4, 4, **VARN), "spread": 1.0, "dtype": BF16}),
    ("factors-k2v3-in-short-blocks", 133, {**kv(2, 3, 16, **VARN), "spread": 1.0, "D": 48, "rotation": rope(48, 48)}),
    (
        "factors-of-one-tile-each",
        300,
        {**kv(2, 2, 64, rotation="hadamard", **VARN), "rotation": None, "D": 64, "spread": 1.0, "G": 3},
    ),
    (
        "factors-tiles-in-blocks-of-128",
        300,
        {**kv(2, 8, 128, **VARN), "D": 64, "H": 1, "spread": 1.0, "sm": 5, "launch": Launch(64, 16, 4, 2)},
    ),
    ("factors-of-keys", 133, {"key": {"nbits": 3, **VARN}, "value": {"nbits": 16}, "spread": 1.0}),
    ("factors-of-values", 133, {"key": {"nbits": 16}, "value": {"nbits": 2, **VARN}, "spread": 1.0, "DV": 80}),
    (
        "factors-symmetric-padded",
        150,
        {**kv(4, 3, symmetric=True, **VARN), "B": 2, "padding": [37, 0], "mask": "pads", "spread": 1.0, "limit": 1.5},
    ),
    ("large-keys", 133, {"magnitude": 300.0, "scale": 1e-5}),
    ("promoted", 133, {"B": 2, **promoted(2, 0.25), "dtype": BF16}),
    ("promoted-post-rope", 133, {"B": 2, **promoted(2, 0.5), "rotation": None}),
    ("promoted-k3v2-group-16", 133, {**promoted(3, 0.25, 2, 16), "D": 64, "G": 3}),
    ("promoted-k4v16-eighth", 133, {**promoted(4, 0.125, 16), "dtype": F32}),
    ("promoted-d16-k2v3", 133, {**promoted(2, 0.125, 3), "D": 16, "G": 16}),
    ("promoted-d80-k4v8", 133, {**promoted(4, 0.25, 8), "D": 80, "rotation": rope(80, 80), "dtype": BF16}),
    ("promoted-d96-k3", 133, {**promoted(3, 0.5, 3), "D": 96, "rotation": rope(96, 96)}),
    ("promoted-d256-k3", 100, {**promoted(3, 0.5), "D": 256, "H": 1}),
    ("promoted-k2v2", 300, {**promoted(2, 0.25, 2, 64, **VALUES_OF_PRESETS), "D": 64, "launch": WIDE}),
    ("promoted-k2v3", 220, {**promoted(2, 0.5, 3, 64, **VALUES_OF_PRESETS), "D": 128, "H": 1, "dtype": BF16}),
    ("promoted-k3v4", 220, {**promoted(3, 0.25, 4, 64, **VALUES_OF_PRESETS), "G": 7, "launch": WIDE}),
    ("promoted-tiles-in-blocks-of-128", 420, {**promoted(2, 0.25, 4, 128), "sm": 5, "launch": WIDE, "B": 2, "H": 1}),
    ("promoted-groups-in-longer-blocks", 300, {**promoted(3, 0.25, 2, 16, **VARN, group_size=64), "launch": WIDE}),
    ("promoted-interleaved", 133, {**promoted(2, 0.25), "rotation": rope(32, 32, 0, "interleaved")}),
    ("promoted-partial", 133, {**promoted(4, 0.25), "rotation": rope(8, 32, 24), "dtype": BF16}),
    ("promoted-partial-first", 133, {**promoted(2, 0.5), "D": 80, "rotation": rope(32, 80)}),
    ("promoted-partial-interleaved", 133, {**promoted(3, 0.5), "rotation": rope(12, 32, 10, "interleaved")}),
    (
        "promoted-hadamard",
        150,
        {**promoted(2, 0.25, key_rotation="hadamard", rotation="hadamard"), "rotation": None, "D": 64},
    ),
    ("promoted-clipped", 133, {"key": {"nbits": 2, "promoted": 0.25, "clip": "mse"}, "H": 1}),
    ("promoted-padded", 150, {**promoted(2, 0.25), "B": 3, "padding": [37, 2, 0], "mask": "pads"}),
    ("promoted-bool-mask", 133, {**promoted(2, 0.25), "G": 2, "mask": "bool", "q_len": 2}),
    ("promoted-additive-mask", 133, {**promoted(3, 0.5), "mask": "additive", "dtype": BF16}),
    ("promoted-many-rows", 133, {**promoted(2, 0.25), "G": 5, "q_len": 8, "mask": "causal", "H": 1}),
    ("promoted-many-splits", 700, {**promoted(2, 0.25), "H": 1, "sm": 9}),
    ("promoted-only-window", 19, promoted(2, 0.25)),
    ("promoted-outliers", 200, {**promoted(2, 0.25), "outliers": 30.0, "limit": 4.0}),
    ("promoted-small-values", 133, {**promoted(2, 0.25), "magnitude": 2e-3}),
    ("promoted-large-keys", 133, {**promoted(2, 0.25), "magnitude": 300.0, "scale": 1e-5}),
]


def masks(kind: str, b: int, h: int, q: int, t: int, padding: list[int] | None) -> torch.Tensor:
    random = torch.rand(b, h, q, t, generator=torch.Generator().manual_seed(1))
    if kind == "causal":
        return torch.ones(q, t, dtype=torch.bool).tril(t - q)[None, None]
    if kind == "bool":
        return random > 0.3
    if kind == "shared":
        return random[:1, :1, :1] > 0.3
    if kind == "additive":
        return torch.randn(b, h, q, t, generator=torch.Generator().manual_seed(1)).to(BF16)
    if kind == "lowest":
        return torch.where(random[:, :1] > 0.3, 0.0, torch.finfo(F32).min)
    if kind == "one":
        return (torch.arange(t) == t // 2).expand(b, 1, q, t)
    if kind == "fifths":
        return (torch.arange(t) % 5 == 0).expand(b, 1, q, t)
    if kind == "last":
        return (torch.arange(t) >= t - 3).expand(b, 1, q, t)
    assert kind == "pads" and padding is not None
    return (torch.arange(t) >= torch.tensor(padding)[:, None])[:, None, None, :]


def build(
    tokens: int,
    device: torch.device,
    *,
    B=1,
    H=2,
    G=1,
    D=32,
    DV=None,
    dtype=F16,
    q_len=1,
    padding=None,
    mask=None,
    outliers=0.0,
    magnitude=1.0,
    spread=0.0,
    faint=1.0,
    value_magnitude=1.0,
    rotation="whole",
    **settings,
):
    """A filled layer, its view, a query and a mask; keys, values and queries are strided views."""
    generator = torch.Generator().manual_seed(tokens)
    settings = {"residual_length": 16, "sink_length": 4, "backend": "triton"} | settings
    layer = QuantLayer(KVQuantConfig().replace(**settings), rope(D, D) if rotation == "whole" else rotation)
    if padding is not None:
        layer.set_padding(torch.tensor(padding, device=device))
    keys = magnitude * torch.randn(B, tokens, H, D, generator=generator)
    keys[..., 1] += magnitude * outliers
    values = magnitude * torch.randn(B, tokens, H, DV or D, generator=generator)
    if spread:
        keys *= (spread * torch.randn(B, tokens, H, 1, generator=generator)).exp()
        values *= (spread * torch.randn(B, 1, H, DV or D, generator=generator)).exp()
    values[:, ::5] *= faint
    values[:, :, 0] *= value_magnitude
    query = torch.randn(B, q_len, G * H, D, generator=generator).to(dtype).transpose(1, 2).to(device)
    layer.update(*(states.to(dtype).transpose(1, 2).to(device) for states in (keys, values)))
    chosen = None if mask is None else masks(mask, B, G * H, q_len, tokens, padding).to(device)
    return SimpleNamespace(layer=layer, view=layer.view(q_len), query=query, mask=chosen)


def error_of_heads(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative L2 error, `[B, H_q]`; heads that should be zero count absolutely."""
    size = want.norm(dim=(2, 3))
    return (got.float() - want).norm(dim=(2, 3)) / torch.where(size > 0, size, 1.0)


def check(tokens, device, monkeypatch, *, ptx=True, launch=SMALL, sm=1, scale=None, limit=1.0, **shape):
    monkeypatch.setattr(launching, "uses_ptx", lambda: ptx)
    monkeypatch.setattr(shared, "multiprocessors", lambda device: sm)
    case = build(tokens, device, **shape)
    scale = case.query.shape[3] ** -0.5 if scale is None else scale
    want = reference.decode_attention(case.query.float(), case.view, case.mask, scale)
    fences = Fences()
    view = fence_view(case.view, fences)
    query = fences.copy(case.query)
    mask = None if case.mask is None else fences.copy(case.mask)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fenced_empty(fences))
        got = launching.decode_attention(query, view, mask, scale, launch)
    fences.check()
    assert got.dtype == case.query.dtype and got.shape == want.shape
    assert torch.isfinite(got).all()
    error = error_of_heads(got, want)
    assert (error <= limit * LIMITS[got.dtype]).all(), (error.max().item(), limit * LIMITS[got.dtype])
    return case


@pytest.mark.parametrize(("tokens", "shape"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_decode_against_the_twin(tokens, shape, device, monkeypatch):
    check(tokens, device, monkeypatch, **shape)


BOTH = (
    "k2v2",
    "k3v3",
    "k8v8",
    "symmetric-k3v2",
    "d80-k2v3",
    "partial-interleaved",
    "padded",
    "gqa-16",
    "promoted",
    "promoted-post-rope",
    "promoted-k3v2-group-16",
)


@pytest.mark.parametrize("name", BOTH)
def test_the_path_without_ptx(name, device, monkeypatch):
    tokens, shape = next(case[1:] for case in CASES if case[0] == name)
    check(tokens, device, monkeypatch, ptx=False, **shape)


def test_rows_that_attend_to_nothing_give_zeros(device):
    case = build(133, device, B=2, q_len=2, G=2)
    mask = torch.ones(2, 1, 2, 133, dtype=torch.bool, device=device)
    mask[1, :, 0] = False
    got = launching.decode_attention(case.query, case.view, mask, 0.2, SMALL)
    assert (got[1, :, 0] == 0).all() and torch.isfinite(got).all()
    assert (got[0] != 0).all()


def test_splits_change_nothing_but_rounding(device, monkeypatch):
    case = build(420, device, B=1, H=1, dtype=F32)
    results = []
    for multiprocessors in (1, 3, 20):
        monkeypatch.setattr(shared, "multiprocessors", lambda device, count=multiprocessors: count)
        results.append(launching.decode_attention(case.query, case.view, None, 0.2, SMALL))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=2e-3, atol=2e-4)
