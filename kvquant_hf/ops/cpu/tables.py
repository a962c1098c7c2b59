"""Tables that the compiled code reads, shared by all layers and caches of a process.

Tables of cosines and sines are kept for ever, so that their addresses stay valid: 8 bytes per rotated channel pair and
block of the longest sequence so far, which is less than a thousandth of one layer's codes.
"""

from functools import cache
from typing import TYPE_CHECKING

import torch

from kvquant_hf.quantizers.levels import levels_of
from kvquant_hf.rotation import head_group, order_index, signs

if TYPE_CHECKING:
    from kvquant_hf.rope import KeyRotation
    from kvquant_hf.spec import QuantSpec

_LANES = 16
# Tables of block starts double in length, so that few of them are ever made.
_SHORTEST = 64
# `enum Spacing` in levels.h. Codes of formats are turned into numbers by their bits, those of other tables looked up.
_EVEN, _TABLE, _SIGNED = 0, 1, 4
_FORMATS = {"e4m3": 2, "e5m2": 3}
# `enum Coding` in decode.h, by the levels that the scales belong to.
_NUMBERS, _CODINGS = 0, {"uniform": 1, "e2m1": 2}
# `enum Basis` in decode.h; mixed heads are told apart by their number.
_BASES = {"none": 0, "hadamard": 1, "hadamard_signs": 2, "grouped_heads": 1}


def spacing(spec: "QuantSpec") -> int:
    """How the kernel gets from a code to the number it stands for."""
    if not spec.is_quantized or spec.levels == "uniform":
        return _SIGNED if spec.is_quantized and spec.method == "innerq" else _EVEN
    return _FORMATS.get(spec.levels_name, _TABLE)


def scale_coding(spec: "QuantSpec") -> int:
    """What scales are: numbers, or bytes of one of two kinds."""
    return _CODINGS[spec.levels_name] if spec.has_second_level else _NUMBERS


def basis(spec: "QuantSpec") -> int:
    """In which basis the channels of a head are stored."""
    return _BASES[spec.rotation] if spec.is_quantized else _BASES["none"]


def mixed_heads(spec: "QuantSpec", num_heads: int) -> int:
    """How many of so many heads are mixed with each other, 1 for none."""
    return head_group(num_heads) if spec.is_quantized and spec.rotation == "grouped_heads" else 1


def sign_table(spec: "QuantSpec", head_dim: int) -> torch.Tensor | None:
    """Signs of channels before they were mixed, `[head_dim]`, float32, or `None`; kept for ever."""
    is_signed = spec.is_quantized and spec.rotation == "hadamard_signs"
    return signs(head_dim, torch.device("cpu")) if is_signed else None


def order_table(spec: "QuantSpec") -> torch.Tensor | None:
    """Channel of each place before they were mixed, `[head_dim]`, int32, or `None`; kept for ever."""
    is_ordered = spec.is_quantized and spec.channel_order
    return order_index(spec.channel_order, torch.device("cpu"))[0] if is_ordered else None


def level_table(spec: "QuantSpec") -> torch.Tensor | None:
    """What each code stands for before scale and zero point, `[2 ** nbits]`, float32; `None` for the code itself."""
    if spacing(spec) in (_EVEN, _SIGNED):
        return None
    return levels_of(spec.levels, spec.nbits, torch.device("cpu")).table


def start_tables(
    rotation: "KeyRotation", first: int, block_length: int, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotation of the starts of at least `blocks` blocks, the first of which begins at the slot `first`.

    Returns:
        `(cos, sin)`, each `[≥ blocks, pairs]`, float32, `pairs` being filled up with zeros to a multiple of 16.
    """
    length = max(_SHORTEST, 1 << (blocks - 1).bit_length())
    return _start_tables(rotation, first, block_length, length)


@cache
def _start_tables(
    rotation: "KeyRotation", first: int, block_length: int, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):
        return _filled(rotation.tables(first + block_length * torch.arange(blocks)))


@cache
def offset_tables(rotation: "KeyRotation", block_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotation of the offsets in a block: `(cos, sin)`, each `[block_length, pairs]`, like `start_tables`."""
    with torch.inference_mode(False):
        return _filled(rotation.tables(torch.arange(block_length)))


@cache
def offset_columns(rotation: "KeyRotation", block_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `offset_tables` with the tokens of a pair side by side, each `[rotary_dim / 2, block_length]`."""
    with torch.inference_mode(False):
        cos, sin = rotation.tables(torch.arange(block_length))
        return cos.T.contiguous(), sin.T.contiguous()


def _filled(tables: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    missing = -tables[0].shape[-1] % _LANES
    cos, sin = (torch.nn.functional.pad(table, (0, missing)).contiguous() for table in tables)
    return cos, sin
