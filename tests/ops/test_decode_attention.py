"""The fused operation against dense attention over the dequantized keys and values."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import cpu, decode_attention, reference
from kvquant_hf.rope import KeyRotation


@pytest.fixture(autouse=True)
def poison_fresh_memory(monkeypatch):
    """Fresh float memory is NaN and fresh code bytes are 0xFF, so that reading what nobody wrote shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.device.type == "meta":
            return tensor
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 0xFF)

    monkeypatch.setattr(torch, "empty", poisoned)


def filled_layer(
    tokens: int,
    *,
    batch_size: int = 2,
    kv_heads: int = 2,
    head_dim: int = 32,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    rotation: KeyRotation | None = None,
    padding: list[int] | None = None,
    uneven: bool = False,
    **settings,
) -> QuantLayer:
    generator = torch.Generator().manual_seed(tokens)
    config = KVQuantConfig().replace(**{"residual_length": 16, "sink_length": 4} | settings)
    layer = QuantLayer(config, rotation, "")
    if padding is not None:
        layer.set_padding(torch.tensor(padding))
    keys = torch.randn(batch_size, tokens, kv_heads, head_dim, generator=generator).to(dtype).transpose(1, 2)
    shape = (batch_size, tokens, kv_heads, value_dim or head_dim)
    values = torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)
    if uneven:  # tokens of keys and channels of values of all sizes
        keys *= (0.5 * torch.randn(keys[..., :1].shape, generator=generator)).exp().to(dtype)
        values *= torch.randn(values[:, :, :1].shape, generator=generator).exp().to(dtype)
    layer.update(keys, values)
    return layer


def mask_of(padding: list[int], tokens: int) -> torch.Tensor:
    """What rows with left padding attend to, `[B, 1, 1, T]`, bool."""
    return (torch.arange(tokens) >= torch.tensor(padding)[:, None])[:, None, None]


def check(layer: QuantLayer, q_heads: int, q_len: int, mask: torch.Tensor | None, scale: float | None = None) -> None:
    """Errors are judged per head against those of dense attention in the same dtype."""
    torch.manual_seed(1)
    keys, values = layer.dequantize()
    batch_size, kv_heads, _, head_dim = keys.shape
    query = torch.randn(batch_size, q_len, q_heads, head_dim).to(keys.dtype).transpose(1, 2)
    view = layer.view(q_len)
    results = {"auto": decode_attention(query, view, mask, scale)}
    four = None if mask is None else mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    factor = head_dim**-0.5 if scale is None else scale
    results["torch"] = reference.decode_attention(query, view, four, factor)
    if cpu.unsupported(view) is None:
        results["cpu"] = cpu.decode_attention(query, view, four, factor)
    repeats = q_heads // kv_heads
    wide = [t.repeat_interleave(repeats, 1) for t in (keys, values)]
    exact_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    exact = F.scaled_dot_product_attention(*(t.double() for t in (query, *wide)), attn_mask=exact_mask, scale=scale)
    same_mask = mask if mask is None or mask.dtype == torch.bool else mask.to(keys.dtype)
    same = F.scaled_dot_product_attention(query, *wide, attn_mask=same_mask, scale=scale)
    floor = 16 * torch.finfo(keys.dtype).eps
    sizes = [query.double(), wide[0].double(), wide[1].double().abs()]
    size = F.scaled_dot_product_attention(*sizes, attn_mask=exact_mask, scale=scale).norm(dim=(2, 3))
    peer_error = relative_error(same, exact, size)
    for name, got in results.items():
        assert got.dtype == query.dtype
        assert got.shape == (batch_size, q_heads, q_len, values.shape[3])
        error = relative_error(got, exact, size)
        assert (error <= 2 * peer_error + floor).all(), (name, error.max(), peer_error.max())


def relative_error(got: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """L2 error of each head relative to what it sums, the weighted magnitudes of the values, `[B, H]`.

    Values of either sign cancel in the output of a random layer, rounding errors do not.
    """
    return (got.double() - exact).norm(dim=(2, 3)) / size.clamp_min(1e-9)


# Keys and values are read apart from each other, and each pair is a kernel to be compiled: no product of all widths.
NBITS = [(2, 2), (2, 8), (3, 3), (3, 4), (4, 4), (4, 16), (8, 2), (8, 8), (16, 3), (16, 16)]


@pytest.mark.parametrize(("key_bits", "value_bits"), NBITS, ids=lambda bits: str(bits))
def test_every_pair_of_widths(key_bits, value_bits):
    rotation = KeyRotation(1 / 100 ** (torch.arange(16) / 16), 32)
    layer = filled_layer(133, rotation=rotation, key={"nbits": key_bits}, value={"nbits": value_bits})
    assert layer.quantized_length == (0 if key_bits == value_bits == 16 else 96)
    check(layer, 4, 1, None)


# The compiled kernel serves multiples of 16: two groups each.
GROUPS = {16: (16, 64), 64: (32, 128), 80: (16, 64), 96: (32, 64), 112: (32, 128), 128: (16, 128), 192: (64, 128)}
GROUPS |= {256: (32, 64)} | dict.fromkeys((24, 40, 63, 111), (16, 32, 64, 128))


@pytest.mark.parametrize(("head_dim", "group_size"), [(dim, size) for dim, sizes in GROUPS.items() for size in sizes])
def test_head_sizes_that_the_group_does_not_divide(head_dim, group_size):
    layer = filled_layer(
        300, head_dim=head_dim, key={"group_size": group_size, "rope": "post"}, value={"group_size": group_size}
    )
    assert layer.quantized_length > 0
    check(layer, 6, 1, None)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 20, 51, 52, 53, 63, 84, 1023, 1100, 2100])
def test_lengths_around_sinks_blocks_and_tiles(tokens):
    check(filled_layer(tokens, value={"rotation": "hadamard"}), 4, 1, None)


@pytest.mark.parametrize("residual_length", [0, 1, 31, 32, 200])
@pytest.mark.parametrize("sink_length", [0, 1, 4, 64])
def test_window_and_sinks(residual_length, sink_length):
    check(filled_layer(150, residual_length=residual_length, sink_length=sink_length), 4, 1, None)


@pytest.mark.parametrize("q_len", [1, 2, 7, 16])
@pytest.mark.parametrize("ratio", [1, 3, 7, 16])
def test_grouped_queries_and_several_rows(ratio, q_len):
    tokens = 130
    causal = torch.ones(q_len, tokens, dtype=torch.bool).tril(tokens - q_len)
    check(filled_layer(tokens), 2 * ratio, q_len, causal[None, None])


MASKS = {
    "bool-per-row": lambda b, h, q, t: torch.rand(b, 1, q, t) > 0.3,
    "bool-per-head": lambda b, h, q, t: torch.rand(b, h, q, t) > 0.3,
    "bool-shared": lambda b, h, q, t: torch.rand(1, 1, 1, t) > 0.3,
    "bool-2d": lambda b, h, q, t: torch.rand(q, t) > 0.3,
    "additive-per-head": lambda b, h, q, t: torch.randn(b, h, q, t),
    "additive-lowest": lambda b, h, q, t: torch.where(
        torch.rand(b, 1, q, t) > 0.3, 0.0, torch.finfo(torch.float32).min
    ),
    "only-one-token": lambda b, h, q, t: (torch.arange(t) == t // 2).expand(b, 1, q, t),
    "only-the-last-tile": lambda b, h, q, t: (torch.arange(t) >= t - 3).expand(b, 1, q, t),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind, dtype):
    torch.manual_seed(0)
    layer = filled_layer(
        1200, dtype=dtype, value={"rotation": "hadamard"}, key={"rotation": "hadamard", "rope": "post"}
    )
    check(layer, 4, 3, MASKS[kind](2, 4, 3, 1200))


@pytest.mark.parametrize("scale", [None, 1.0, 0.01])
def test_scale(scale):
    check(filled_layer(90), 2, 1, None, scale)


def test_rows_that_attend_to_nothing_give_zeros():
    layer = filled_layer(100)
    mask = torch.ones(2, 1, 2, 100, dtype=torch.bool)
    mask[1, :, 0] = False
    output = decode_attention(torch.randn(2, 4, 2, 32), layer.view(2), mask)
    assert (output[1, :, 0] == 0).all()
    assert (output[0] != 0).all()
    assert torch.isfinite(output).all()


@pytest.mark.parametrize(
    "rotation",
    [
        None,
        KeyRotation(1 / 1000 ** (torch.arange(16) / 16), 32),
        KeyRotation(1 / 1000 ** (torch.arange(4) / 4), 32, offset=24, pairing="interleaved"),
    ],
    ids=["none", "half", "interleaved-partial"],
)
@pytest.mark.parametrize("rotate", ["none", "hadamard"])
def test_padded_rows_with_their_own_sinks(rotation, rotate):
    layer = filled_layer(
        140,
        batch_size=3,
        padding=[37, 2, 0],
        rotation=rotation,
        key={"rotation": rotate},
        value={"rotation": rotate},
    )
    check(layer, 4, 1, mask_of([37, 2, 0], 140))


@pytest.mark.parametrize(
    ("nbits", "group_size", "head_dim"), [(2, 16, 32), (2, 64, 64), (3, 64, 96), (4, 64, 96), (8, 128, 128)]
)
def test_values_with_scales_of_8_bits(nbits, group_size, head_dim):
    rotation = KeyRotation(1 / 100 ** (torch.arange(16) / 16), 32 if head_dim == 32 else head_dim)
    value = {"nbits": nbits, "group_size": group_size, "symmetric": True, "metadata_nbits": 8, "clip": "mse"}
    layer = filled_layer(
        300,
        rotation=rotation,
        head_dim=head_dim,
        key={"nbits": 2, "promoted": 0.25},
        value=value | ({} if head_dim == 96 else {"rotation": "hadamard"}),
    )
    store = layer.view().value_store
    assert store.scale is not None and store.scale.dtype == torch.uint8 and cpu.unsupported(layer.view()) is None
    check(layer, 4, 1, None)
    # Scales of coarse steps (of about the same size), of zeros, and a base in float32.
    store.second_level[:, 0] *= -1
    store.scale[:, 0] = 255 - (255 - store.scale[:, 0]) // 4
    store.scale[0, 1, 0] = 0
    check(layer, 4, 1, None)
    store.second_level = store.second_level.float() * 1e-3
    layer.view().memo.clear()
    check(layer, 2, 2, None)


FACTORS = {
    "both": {},
    "keys": {"value": {"method": "affine"}},
    "values": {"key": {"method": "affine"}},
    "k8v8": {"key": {"nbits": 8}, "value": {"nbits": 8}},
    "k3v4-symmetric": {"key": {"nbits": 3, "symmetric": True}, "value": {"symmetric": True}},
    "k4v16": {"value": {"nbits": 16}},
    "k16v4": {"key": {"nbits": 16}},
    "hadamard-values": {"value": {"rotation": "hadamard"}, "dtype": torch.bfloat16},
    "hadamard-both": {"key": {"rotation": "hadamard"}, "value": {"rotation": "hadamard"}, "dtype": torch.float16},
    "tiles-of-128": {"key": {"group_size": 128}, "value": {"group_size": 128, "nbits": 2}, "head_dim": 64},
    "tiles-of-16": {"key": {"group_size": 16}, "value": {"group_size": 16}, "head_dim": 48},
    "groups-within-tiles": {"key": {"group_size": 32}, "value": {"group_size": 64}, "head_dim": 96},
    "no-multiple-of-32": {"head_dim": 80, "value_dim": 48},
    "torch-only": {"head_dim": 24},
    "swapped": {"key": {"granularity": "per_token"}, "value": {"granularity": "per_channel"}},
}


@pytest.mark.parametrize(
    ("name", "rotary"),
    [(name, True) for name in FACTORS] + [(name, False) for name in ("both", "k16v4", "hadamard-both", "swapped")],
)
def test_factors_of_tokens_and_channels(name, rotary):
    settings = dict(FACTORS[name])
    head_dim = settings.get("head_dim", 32)
    for side in ("key", "value"):
        settings[side] = {"method": "variance_normalized", "nbits": 4} | settings.get(side, {})
    settings["rotation"] = KeyRotation(1 / 100 ** (torch.arange(head_dim // 2) / (head_dim // 2)), head_dim)
    layer = filled_layer(309, uneven=True, **(settings if rotary else settings | {"rotation": None}))
    assert layer.quantized_length >= 256
    for store in layer._block_stores():
        if store.spec.has_factor:
            assert store.factor.amax() > 2 * store.factor.amin()  # else nothing would show
    check(layer, 6, 1, None)
    check(layer, 2, 3, torch.rand(2, 1, 3, 309) > 0.3)


PROMOTED = {
    "k2": {"key": {"nbits": 2, "promoted": 0.25}},
    "k3-half": {"key": {"nbits": 3, "promoted": 0.5, "group_size": 64}, "value": {"nbits": 2}, "head_dim": 64},
    "k4-eighth": {"key": {"nbits": 4, "promoted": 0.125, "group_size": 16}, "head_dim": 80, "dtype": torch.bfloat16},
    "short-groups": {
        "key": {"nbits": 2, "promoted": 0.25, "group_size": 16},
        "value": {"method": "variance_normalized"},
    },
    "k2v16": {"key": {"nbits": 2, "promoted": 0.5}, "value": {"nbits": 16}, "dtype": torch.float16},
    "hadamard-values": {"key": {"nbits": 2, "promoted": 0.25}, "value": {"nbits": 2, "rotation": "hadamard"}},
    "torch-only": {"key": {"nbits": 2, "promoted": 0.25}, "head_dim": 24},
}


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        *itertools.product(["k2", "torch-only"], ["post", "half", "interleaved", "partial"]),
        ("k3-half", "half"),
        ("k4-eighth", "interleaved"),
        ("short-groups", "partial"),
        ("short-groups", "post"),
        ("k2v16", "half"),
        ("hadamard-values", "post"),
    ],
)
def test_promoted_channels(name, rope):
    settings = dict(PROMOTED[name])
    head_dim = settings.setdefault("head_dim", 32)
    width = head_dim if rope != "partial" else 8
    frequencies = 1 / 100 ** (torch.arange(width // 2) / (width // 2))
    pairing = "interleaved" if rope == "interleaved" else "half"
    settings["rotation"] = None if rope == "post" else KeyRotation(frequencies, head_dim, head_dim - width, pairing)
    layer = filled_layer(309, uneven=True, **settings)
    store = layer._block_stores()[0]
    assert store.promoted.shape[-1] == store.spec.num_promoted(head_dim) and layer.quantized_length >= 192
    check(layer, 6, 1, None)
    check(layer, 2, 3, torch.rand(2, 1, 3, 309) > 0.3)
    padded = filled_layer(140, batch_size=3, padding=[37, 2, 0], **settings)
    check(padded, 6, 1, mask_of([37, 2, 0], 140))


def test_factors_of_padded_rows():
    sides = {side: {"method": "variance_normalized", "rotation": "hadamard"} for side in ("key", "value")}
    layer = filled_layer(140, batch_size=3, padding=[37, 2, 0], uneven=True, **sides)
    check(layer, 4, 1, mask_of([37, 2, 0], 140))


def test_factors_in_float32_are_read():
    sides = {side: {"method": "variance_normalized"} for side in ("key", "value")}
    layer = filled_layer(150, uneven=True, **sides)
    for store in layer._block_stores():
        store.factor = store.factor.float()
    assert cpu.unsupported(layer.view()) is None
    check(layer, 4, 1, None)


def test_values_of_another_size_than_keys():
    check(filled_layer(120, head_dim=24, value_dim=16), 4, 2, None)


def test_granularities_can_be_swapped():
    layer = filled_layer(
        150, key={"granularity": "per_token"}, value={"granularity": "per_channel", "rotation": "hadamard"}
    )
    assert layer.quantized_length == 128
    check(layer, 4, 1, None)


@pytest.mark.parametrize(
    ("query", "mask", "message"),
    [
        (torch.zeros(2, 4, 32), None, r"`query` must have the shape \[2, H_q, q_len, 32\], got \[2, 4, 32\]"),
        (torch.zeros(1, 4, 1, 32), None, r"`query` must have the shape"),
        (torch.zeros(2, 4, 1, 16), None, r"`query` must have the shape"),
        (torch.zeros(2, 3, 1, 32), None, r"multiple of 2 heads, got 3"),
        (torch.zeros(2, 4, 1, 32), torch.ones(2, 1, 1, 99, dtype=torch.bool), r"`mask` must be broadcastable to"),
        (torch.zeros(2, 4, 1, 32), torch.ones(2, 2, 1, 100, dtype=torch.bool), r"`mask` must be broadcastable to"),
    ],
)
def test_shapes_that_do_not_fit_are_named(query, mask, message):
    with pytest.raises(ValueError, match=message):
        decode_attention(query, filled_layer(100).view(), mask)
