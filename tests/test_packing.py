"""Packing against plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant_hf.packing import PACKED_NBITS, PlanarLayout

LENGTHS = [1, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 80, 96, 111, 128, 256]


def plain_bytes(codes: list[int], nbits: int) -> list[int]:
    """The documented layout, bit by bit."""
    codes = codes + [0] * (-len(codes) % 8)
    unit = next(u for u in (32, 16, 8) if len(codes) % u == 0)
    packed = []
    for first in range(0, len(codes), unit):
        group, low = codes[first : first + unit], 0
        for width in {2: [2], 3: [2, 1], 4: [4], 8: [8]}[nbits]:
            size = unit * width // 8
            plane = [0] * size
            for i, code in enumerate(group):
                place, byte = divmod(i, size)
                plane[byte] |= ((code >> low) & (2**width - 1)) << (place * width)
            packed += plane
            low += width
    return packed


@settings(max_examples=60, deadline=None)
@given(nbits=st.sampled_from(PACKED_NBITS), length=st.sampled_from(LENGTHS), data=st.data())
def test_bytes_are_those_of_the_documented_layout(nbits, length, data):
    codes = data.draw(st.lists(st.integers(0, 2**nbits - 1), min_size=length, max_size=length))
    layout = PlanarLayout(nbits, length)
    packed = layout.pack(torch.tensor(codes, dtype=torch.uint8))
    assert packed.tolist() == plain_bytes(codes, nbits)
    assert packed.numel() == layout.num_bytes
    assert layout.unpack(packed).tolist() == codes


@pytest.mark.parametrize("nbits", PACKED_NBITS)
@pytest.mark.parametrize("length", LENGTHS)
def test_strided_batches_round_trip(nbits, length):
    layout = PlanarLayout(nbits, length)
    codes = torch.randint(0, 2**nbits, (2, length, 3, 5), dtype=torch.uint8).permute(0, 2, 3, 1)
    assert not codes.is_contiguous() or length == 1
    packed = layout.pack(codes)
    assert packed.shape == (2, 3, 5, layout.num_bytes)
    buffer = torch.full((2, 6, 5, layout.num_bytes), 0xFF, dtype=torch.uint8)
    buffer[:, ::2] = packed
    assert torch.equal(layout.unpack(buffer[:, ::2]), codes)


@pytest.mark.parametrize("nbits", PACKED_NBITS)
def test_32_codes_take_4_bytes_a_bit(nbits):
    assert PlanarLayout(nbits, 32).num_bytes == 4 * nbits


@pytest.mark.parametrize(("nbits", "length"), [(1, 32), (5, 32), (16, 32), (4, 0)])
def test_impossible_layouts_are_refused(nbits, length):
    with pytest.raises(ValueError, match=r"`(nbits|length)` must be"):
        PlanarLayout(nbits, length)
