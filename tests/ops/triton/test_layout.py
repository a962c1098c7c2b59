"""Words of codes in plain PyTorch: what goes in comes out, wherever the kernels run."""

import pytest
import torch

from kvquant_hf.ops.triton import ChannelOrder, WordLayout
from kvquant_hf.quantizers import QuantizedGroups
from kvquant_hf.rope import KeyRotation
from kvquant_hf.spec import QuantSpec
from tests.ops.test_decode_attention import filled_layer

L = 64


def promoted_groups(nbits: int, share: float, head_dim: int) -> QuantizedGroups:
    """Codes of two blocks of two heads, every block with its own promoted channels."""
    generator = torch.Generator().manual_seed(head_dim + nbits)
    spec = QuantSpec(nbits, promoted=share)
    shape = (1, 2, 2, head_dim)
    order = torch.rand(shape, generator=generator).argsort(-1)[..., : spec.num_promoted(head_dim)]
    promoted = order.sort(-1).values
    limit = torch.full(shape, 2**nbits).scatter(-1, promoted, 2 ** (nbits + 2))
    codes = (torch.rand(*shape, L, generator=generator) * limit[..., None]).to(torch.uint8)
    scale = torch.rand(*shape, L // spec.group_size, generator=generator).half()
    scale[..., ::7, :] = 2.0**-24  # the smallest float16 there is
    return QuantizedGroups(codes, scale, scale.flip(-1) - 0.5, promoted=promoted.to(torch.uint8))


@pytest.mark.parametrize("rotary", ["none", "half", "interleaved", "partial"])
@pytest.mark.parametrize(("nbits", "share", "head_dim"), [(2, 0.25, 64), (3, 0.5, 80), (4, 0.125, 16)])
def test_promoted_channels_come_back_as_they_went_in(nbits, share, head_dim, rotary):
    width = 8 if rotary == "partial" else head_dim
    pairing = "interleaved" if rotary == "interleaved" else "half"
    rotation = None if rotary == "none" else KeyRotation(torch.ones(width // 2), head_dim, head_dim - width, pairing)
    layout = WordLayout(QuantSpec(nbits, promoted=share), L, ChannelOrder.of(rotation, head_dim))
    groups = promoted_groups(nbits, share, head_dim)
    blocks = layout.encode(groups)
    assert blocks.extra.dtype == torch.int32 and blocks.extra.shape == (*groups.promoted.shape, L // 16)
    back = layout.decode(blocks)
    for name in ("codes", "scale", "zero_point", "promoted"):
        assert torch.equal(getattr(back, name), getattr(groups, name)), name


def test_low_bits_lie_where_the_layout_says():
    groups = promoted_groups(2, 0.25, 16)
    extra = WordLayout(QuantSpec(2, promoted=0.25), L, ChannelOrder(16)).encode(groups).extra[0, 1, 1]
    for row, channel in enumerate(groups.promoted[0, 1, 1].tolist()):
        for token in range(L):
            bit = 2 * (token % 16 // 2) + 16 * (token % 2)
            assert int(extra[row, token // 16]) >> bit & 3 == int(groups.codes[0, 1, 1, channel, token]) & 3


def test_a_promoted_scale_that_float16_cannot_hold_fourfold_is_refused():
    layout = WordLayout(QuantSpec(2, promoted=0.25), L, ChannelOrder(16))
    groups = promoted_groups(2, 0.25, 16)
    channel = int(groups.promoted[0, 0, 0, 0])
    groups.scale[0, 0, 0, channel] = 2000.0  # 15 times this fits
    assert layout.encode(groups) is not None
    groups.scale[0, 0, 0, channel] = 3000.0
    assert layout.encode(groups) is None
    groups.scale[0, 0, 0, channel] = 20000.0
    assert layout.encode(groups) is None


BYTES = {"value": {"nbits": 3, "symmetric": True, "metadata_nbits": 8}}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("nbits", "group", "head_dim"), [(2, 32, 96), (3, 64, 80), (4, 128, 64), (8, 32, 128)])
def test_scales_of_a_byte_come_back_as_they_went_in(nbits, group, head_dim, dtype):
    generator = torch.Generator().manual_seed(nbits)
    spec = QuantSpec(nbits, "per_token", group, symmetric=True, metadata_nbits=8)
    codes = torch.randint(2**nbits, (1, 2, 3, L, head_dim), generator=generator, dtype=torch.uint8)
    scale = torch.randint(256, (1, 2, 3, L, -(-head_dim // group)), generator=generator, dtype=torch.uint8)
    base = torch.randn(1, 2, 3, 1, generator=generator).to(dtype) * (1 if dtype == torch.float16 else 1e20)
    groups = QuantizedGroups(codes, scale, None, second_level=base)
    blocks = WordLayout(spec, L, ChannelOrder(head_dim)).encode(groups)
    assert blocks.metadata.dtype == torch.uint8 and blocks.metadata.numel() == scale.numel()
    back = WordLayout(spec, L, ChannelOrder(head_dim)).decode(blocks)
    for name in ("codes", "scale", "second_level"):
        assert torch.equal(getattr(back, name), getattr(groups, name)), name
    assert back.zero_point is None


@pytest.mark.parametrize(
    "preset", [{}, {"key": {"nbits": 2, "promoted": 0.25}}, BYTES], ids=["plain", "promoted", "bytes"]
)
def test_reading_the_gpu_layout_needs_no_triton(preset):
    """A cache configured for the GPU backend fills and dequantizes anywhere, with the common layout's values."""
    layers = [filled_layer(150, backend=backend, **preset) for backend in ("triton", "torch")]
    assert isinstance(layers[0]._block_stores()[0].own_layout, WordLayout)
    for mine, theirs in zip(*(layer.dequantize() for layer in layers), strict=True):
        assert torch.equal(mine, theirs)


def test_values_with_scales_of_a_byte_leave_the_layout_and_come_back_unchanged():
    store = filled_layer(150, backend="triton", **BYTES)._block_stores()[1]
    words, numbers, layout = store.codes, store.read(0, store.num_blocks), store.own_layout
    state = store.state()
    store.leave_own_layout()
    assert store.metadata is None and store.scale.dtype == torch.uint8
    assert torch.equal(store.read(0, store.num_blocks), numbers)
    store.own_layout = layout
    store.load_state(state)
    assert torch.equal(store.codes, words[:, :, : store.num_blocks])
    assert torch.equal(store.read(0, store.num_blocks), numbers)
