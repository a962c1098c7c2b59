"""Codes of 2, 3, 4 and 8 bits to bytes and back.

A layout is a small object with `pack` and `unpack`; each backend owns the one its kernels read.
"""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

PACKED_NBITS = (2, 3, 4, 8)
# Planes a code is split into, low bits first: a 3-bit code that straddled bytes would cost several extra
# instructions per code on reading, two whole-bit planes cost one shift and one or.
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


class Layout(Protocol):
    """How codes lie in bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one packed row."""

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """`[..., length]` uint8 codes to `[..., num_bytes]` uint8."""

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """`[..., num_bytes]` uint8 to `[..., length]` uint8 codes."""


@dataclass(frozen=True)
class PlanarLayout:
    """Rows of codes in units of 32 (16, 8 where 32 does not divide the row), `4 · nbits` bytes a unit of 32.

    Within a unit of `u` codes a plane of `p` bits takes `u · p / 8` bytes; byte `j` holds the codes
    `j + k · u · p / 8` at bit `k · p`. A vector load of a plane, one shift and one mask therefore give consecutive
    codes in consecutive lanes, with no shuffle. 3 bits are a plane of 2 bits followed by a plane of 1 bit.

    Attributes:
        nbits: Bits per code, one of 2, 3, 4, 8.
        length: Codes in a row; a row that 8 does not divide is filled up with zero codes.
    """

    nbits: int
    length: int

    def __post_init__(self) -> None:
        if self.nbits not in PACKED_NBITS:
            raise ValueError(f"`nbits` must be one of {PACKED_NBITS} to be packed, got {self.nbits!r}.")
        if self.length < 1:
            raise ValueError(f"`length` must be at least 1, got {self.length!r}.")

    @property
    def padded_length(self) -> int:
        """Codes in a stored row."""
        return -(-self.length // 8) * 8

    @property
    def unit(self) -> int:
        """Codes in a unit."""
        return next(unit for unit in (32, 16, 8) if self.padded_length % unit == 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of a stored row."""
        return self.padded_length * self.nbits // 8

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes to bytes.

        Args:
            codes: `[..., length]`, uint8, below `2 ** nbits`.

        Returns:
            `[..., num_bytes]`, uint8.
        """
        if self.nbits == 8 and self.padded_length == self.length:
            return codes.contiguous()
        codes = torch.nn.functional.pad(codes, (0, self.padded_length - self.length))
        units = codes.reshape(*codes.shape[:-1], -1, self.unit)
        planes, low = [], 0
        for width in _PLANES[self.nbits]:
            bits = (units >> low) & ((1 << width) - 1)
            bits = bits.reshape(*units.shape[:-1], 8 // width, -1)
            planes.append((bits << _shifts(width, codes.device)).sum(-2, dtype=torch.uint8))
            low += width
        return torch.cat(planes, dim=-1).flatten(-2)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Bytes to codes.

        Args:
            packed: `[..., num_bytes]`, uint8.

        Returns:
            `[..., length]`, uint8.
        """
        if self.nbits == 8:
            return packed[..., : self.length]
        units = packed.reshape(*packed.shape[:-1], -1, self.unit * self.nbits // 8)
        codes: torch.Tensor | None = None
        low = first = 0
        for width in _PLANES[self.nbits]:
            size = self.unit * width // 8
            bits = _plane_codes(units[..., first : first + size], width)
            codes = bits if codes is None else codes | (bits << low)
            low, first = low + width, first + size
        assert codes is not None  # every width has a plane
        return codes.flatten(-2)[..., : self.length]


def _plane_codes(plane: torch.Tensor, width: int) -> torch.Tensor:
    """Codes `[..., 8 / width · size]` of the bytes `[..., size]` of one plane."""
    size = plane.shape[-1]
    # Shifting words instead of bytes is four times less work; bits that cross bytes are masked away.
    word, mask = (torch.int32, 0x01010101) if size % 4 == 0 else (torch.uint8, 1)
    mask *= (1 << width) - 1
    plane = plane.contiguous()
    if any(step % 4 for step in (*plane.stride()[:-1], plane.storage_offset())):
        plane = plane.clone(memory_format=torch.contiguous_format)  # a row of its own starts on a word
    words = plane.view(word)
    codes = torch.empty((*plane.shape[:-1], 8 // width, size), dtype=torch.uint8, device=plane.device)
    for place, row in enumerate(codes.view(word).unbind(-2)):
        torch.bitwise_and(words >> (place * width) if place else words, mask, out=row)
    return codes.flatten(-2)


@cache
def _shifts(width: int, device: torch.device) -> torch.Tensor:
    """Bit positions of the codes of a byte, `[8 / width, 1]`."""
    with torch.inference_mode(False):  # shared by later calls in any mode
        return torch.arange(0, 8, width, dtype=torch.uint8, device=device)[:, None]
