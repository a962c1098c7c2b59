"""How codes lie in memory for the GPU kernels: 32-bit words along the channels of one token.

Everything here is plain PyTorch, so that a cache in this layout can be read, saved and tested anywhere.
"""

from dataclasses import dataclass
from functools import cache

import torch

from kvquant_hf.blocks import EncodedBlocks
from kvquant_hf.quantizers import QuantizedGroups, along, join_codes, split_codes
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rotation import FOLDABLE
from kvquant_hf.spec import EXTRA_BITS, QuantSpec

# Rotation in float16 must not overflow: sqrt(2) times this stays below the largest float16, 65504.
MAX_MAGNITUDE = 32768.0


@dataclass(frozen=True)
class ChannelOrder:
    """In which order the channels of a head are stored.

    Attention sums over channels, so any order serves as long as the query follows it. Rotary pairs are put half a
    head apart, whatever pairing the model uses, and channels that are not rotated form pairs of angle zero: the
    kernel then knows one rotation only.

    Attributes:
        head_dim: Channels, `D`, even.
        rotary_dim: Rotated channels, `W`; 0 without rotation.
        offset: First rotated channel.
        interleaved: Pairs are neighbours (`2i`, `2i + 1`) rather than half a rotary width apart.
    """

    head_dim: int
    rotary_dim: int = 0
    offset: int = 0
    interleaved: bool = False

    @classmethod
    def of(cls, rotation: KeyRotation | None, head_dim: int) -> "ChannelOrder":
        """The order that suits a rotation."""
        if rotation is None:
            return cls(head_dim)
        return cls(head_dim, rotation.rotary_dim, rotation.offset, rotation.pairing == "interleaved")

    @property
    def is_natural(self) -> bool:
        """Whether channels stay where they are."""
        return self.rotary_dim == 0 or (self.rotary_dim == self.head_dim and not self.interleaved)

    def channels(self) -> list[int]:
        """The channel at each of the `D` stored places."""
        window = range(self.offset, self.offset + self.rotary_dim)
        rest = [channel for channel in range(self.head_dim) if channel not in window]
        half, middle = self.rotary_dim // 2, len(rest) // 2
        if self.interleaved:
            first, second = list(window[0::2]), list(window[1::2])
        else:
            first, second = list(window[:half]), list(window[half:])
        return first + rest[:middle] + second + rest[middle:]


def reads_rotation(spec: QuantSpec) -> bool:
    """Whether the kernels read a side in its rotation.

    Of keys (per channel) the queries are rotated before them, as any rotation within a head may be; outputs, which
    belong to values (per token), in the kernel that puts them together.
    """
    known = FOLDABLE if spec.granularity == "per_channel" else ("hadamard",)
    return not spec.is_quantized or spec.rotation in ("none", *known)


def unread_codes(spec: QuantSpec) -> str | None:
    """What codes a side has that the kernels cannot make numbers of; `None` if they can."""
    if not spec.is_quantized:
        return None
    if spec.method == "innerq":
        return "`method: innerq`"
    if spec.outliers:
        return "keys or values with `outliers`"
    if spec.centered:
        return "`centered` groups"
    if spec.shares:
        return "groups that share a parameter (`shared_groups`)"
    if spec.levels != "uniform":
        return f"codes of uneven levels (`levels` {spec.levels_name})"
    # A zero point of 8 bits takes tables and a list, a scale one power of two.
    if spec.has_second_level and not (spec.symmetric and spec.granularity == "per_token"):
        return "`metadata_nbits=8` but of symmetric codes per token"
    return None


def word_layouts(
    specs: tuple[QuantSpec, QuantSpec],
    block_length: int,
    head_dims: tuple[int, int],
    rotation: KeyRotation | None,
) -> tuple["WordLayout | None", "WordLayout | None"]:
    """Layouts of keys and values, `None` for a side that the kernels do not read in words."""
    key, value = specs
    if any(size % 16 for size in head_dims) or (key.is_quantized and key.granularity != "per_channel"):
        return None, None
    if value.is_quantized and value.granularity != "per_token":
        return None, None
    if any(unread_codes(spec) is not None for spec in specs):
        return None, None
    if not all(map(reads_rotation, specs)):
        return None, None
    if key.is_quantized and key.rotation != "none" and rotation is not None:
        return None, None  # has to be undone before RoPE
    keys = WordLayout(key, block_length, ChannelOrder.of(rotation, head_dims[0])) if key.is_quantized else None
    values = WordLayout(value, block_length, ChannelOrder(head_dims[1])) if value.is_quantized else None
    return keys, values


@cache
def _place_index(order: ChannelOrder, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`(channel of each place, place of each channel)`, int64, `[D]` each."""
    with torch.inference_mode(False):
        channels = torch.tensor(order.channels(), device=device)
        return channels, torch.argsort(channels)


@dataclass(frozen=True)
class WordLayout:
    """Blocks as rows of int32 words, one row a token, and parameters beside them in words as well.

    With `b` bits and `D` channels a row has `DW = D·b/32` words. Place `c` lies in plane `p = c // (2·DW)`; with
    `r = c % (2·DW)` it is in word `r // 2` at bit `p·b + 16·(r % 2)`. The two halves of a word hold neighbouring
    places, so that one 32-bit operation treats two of them, and the planes of a word hold both places of a rotary
    pair. 3 bits are the low two as above, then `⌈D/32⌉` words of the top bit: that of word `w` and plane `p` in word
    `w % ⌈D/32⌉` at bit `2·p + w // ⌈D/32⌉` of the same half.

    Parameters: keys have one row per group of tokens, `D/2` words of scales (float16 pairs), then `D/2` of zero
    points; values have one word a group, the scale in its low half and the zero point in its high half. Symmetric
    codes have scales only: `D/2` words for keys, one float16 a group for values, or a byte where a base goes with it.

    Of promoted channels the rows hold the high bits and the parameters `2^2` times the scale, which is that of the
    high bits. Their low bits lie apart, `L/16` words a channel: that of token `t` in word `t // 16` at bit
    `2·(t % 16 // 2) + 16·(t % 2)`.

    Attributes:
        spec: How the tensor is quantized.
        block_length: Tokens in a block, `L`.
        order: Order of the channels.
    """

    spec: QuantSpec
    block_length: int
    order: ChannelOrder

    @property
    def nbits(self) -> int:
        """Bits per code."""
        return self.spec.nbits

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.order.head_dim

    @property
    def along_tokens(self) -> bool:
        """Whether groups run along tokens (keys) rather than channels (values)."""
        return self.spec.granularity == "per_channel"

    @property
    def plane_words(self) -> int:
        """`DW`: words of a token, those of the top bits of 3-bit codes left out."""
        return self.head_dim * (2 if self.nbits == 3 else self.nbits) // 32

    @property
    def row_words(self) -> int:
        """Words of a token in all."""
        return self.plane_words + (-(-self.plane_words // 2) if self.nbits == 3 else 0)

    def encode(self, groups: QuantizedGroups) -> EncodedBlocks | None:
        """Codes and parameters as the kernels read them.

        Args:
            groups: Rows along tokens `[B, H, n, D, L]` or along channels `[B, H, n, L, D]`.

        Returns:
            Codes `[B, H, n, L, row_words]` int32 with their parameters, the low bits of promoted channels
            `[B, H, n, P, L/16]` int32, or `None` where numbers are too large for float16 arithmetic.
        """
        codes, scale, zero_point, extra = groups.codes, groups.scale, groups.zero_point, None
        if groups.promoted is not None:
            codes, low = split_codes(codes, groups.promoted)
            extra = _pack_low(low)
            scale = _scaled(scale, groups.promoted, 2.0**EXTRA_BITS)
        # Bytes are multiplied by their base in float32, after the products.
        if groups.second_level is None and not _fit_half(scale, zero_point, self.nbits):
            return None
        if self.along_tokens:
            codes, scale = codes.transpose(-1, -2), scale.transpose(-1, -2)
            zero_point = None if zero_point is None else zero_point.transpose(-1, -2)
            rows = [self._in_places(t) for t in (scale, zero_point) if t is not None]
            metadata = torch.cat(rows, dim=-1).contiguous().view(torch.int32)
        elif zero_point is None:
            metadata = scale.contiguous()
        else:
            metadata = torch.stack((scale, zero_point), dim=-1).contiguous().view(torch.int32).squeeze(-1)
        packed = self._pack(self._in_places(codes))
        return EncodedBlocks(
            packed, None, None, metadata, extra=extra, promoted=groups.promoted, second_level=groups.second_level
        )

    def decode(self, blocks: EncodedBlocks) -> QuantizedGroups:
        """The inverse of `encode`."""
        unpacked, metadata = self._in_channels(self._unpack(blocks.codes)), blocks.metadata
        assert metadata is not None
        scale: torch.Tensor
        zero_point: torch.Tensor | None
        if self.along_tokens:
            halves = metadata.contiguous().view(torch.float16)
            scale = self._in_channels(halves[..., : self.head_dim]).transpose(-1, -2)
            zero_point = None
            if not self.spec.symmetric:
                zero_point = self._in_channels(halves[..., self.head_dim :]).transpose(-1, -2)
            unpacked = unpacked.transpose(-1, -2)
        elif self.spec.symmetric:
            scale, zero_point = metadata, None
        else:
            scale, zero_point = metadata.contiguous().view(torch.float16).unflatten(-1, (-1, 2)).unbind(-1)
        if blocks.promoted is not None and blocks.extra is not None:
            unpacked = join_codes(unpacked, _unpack_low(blocks.extra), blocks.promoted)
            scale = _scaled(scale, blocks.promoted, 2.0**-EXTRA_BITS)
        return QuantizedGroups(
            unpacked.contiguous(), scale, zero_point, promoted=blocks.promoted, second_level=blocks.second_level
        )

    def _in_places(self, channels: torch.Tensor) -> torch.Tensor:
        """`[…, D]` in the order of channels, to the order of storage."""
        return channels if self.order.is_natural else channels[..., _place_index(self.order, channels.device)[0]]

    def _in_channels(self, places: torch.Tensor) -> torch.Tensor:
        return places if self.order.is_natural else places[..., _place_index(self.order, places.device)[1]]

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """`[…, D]` uint8 to `[…, row_words]` int32."""
        width = 2 if self.nbits == 3 else self.nbits
        parts = codes.unflatten(-1, (-1, self.plane_words, 2)).int()  # plane, word, half
        words: torch.Tensor = ((parts & ((1 << width) - 1)) << _bits(width, codes.device)).sum(
            (-3, -1), dtype=torch.int32
        )
        if self.nbits != 3:
            return words
        high = (parts >> 2) << _bits(2, codes.device)
        odd = self.plane_words % 2
        tops = torch.nn.functional.pad(high.sum((-3, -1), dtype=torch.int32), (0, odd)).unflatten(-1, (2, -1))
        return torch.cat([words, tops[..., 0, :] | (tops[..., 1, :] << 1)], dim=-1)

    def _unpack(self, words: torch.Tensor) -> torch.Tensor:
        """`[…, row_words]` int32 to `[…, D]` uint8."""
        width = 2 if self.nbits == 3 else self.nbits
        planes = words[..., None, : self.plane_words, None] >> _bits(width, words.device)
        codes = planes & ((1 << width) - 1)
        if self.nbits == 3:
            tops = words[..., self.plane_words :]
            tops = torch.cat([tops, tops >> 1], dim=-1)[..., : self.plane_words]
            codes |= ((tops[..., None, :, None] >> _bits(2, words.device)) & 1) << 2
        return codes.to(torch.uint8).flatten(-3)


def _fit_half(scale: torch.Tensor, zero_point: torch.Tensor | None, nbits: int) -> bool:
    """Whether dequantized numbers, and their rotations, are finite in float16."""
    if scale.dtype != torch.float16:
        return False
    reach = scale.float() * 2**nbits
    if zero_point is not None:
        reach = reach + zero_point.float().abs()
    return bool((reach <= MAX_MAGNITUDE).all())


def _scaled(scale: torch.Tensor, promoted: torch.Tensor, factor: float) -> torch.Tensor:
    """Scales `[…, D, groups]` with those of promoted channels times a power of two; exact unless it overflows."""
    index = along(promoted, scale)
    return scale.scatter(-2, index, scale.gather(-2, index) * factor)


def _pack_low(low: torch.Tensor) -> torch.Tensor:
    """Low bits `[…, L]` uint8 to `[…, L/16]` int32."""
    shifts = _bits(EXTRA_BITS, low.device)[:, 0]
    words: torch.Tensor = (low.unflatten(-1, (-1, 8, 2)).int() << shifts).sum((-2, -1), dtype=torch.int32)
    return words


def _unpack_low(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_low`."""
    codes: torch.Tensor = (words[..., None, None] >> _bits(EXTRA_BITS, words.device)[:, 0]) & (2**EXTRA_BITS - 1)
    return codes.to(torch.uint8).flatten(-3)


@cache
def _bits(width: int, device: torch.device) -> torch.Tensor:
    """First bit of the code of each plane and half of a word, `[planes, 1, 2]`, int32."""
    with torch.inference_mode(False):
        planes = torch.arange(0, 16, width, dtype=torch.int32, device=device)
        return planes[:, None, None] + torch.tensor([0, 16], dtype=torch.int32, device=device)
