"""The GPU backend: Triton kernels over words of codes. Importing this needs no Triton; running it does."""

from kvquant_hf.ops.triton.availability import has_driver, is_interpreted, why_unavailable
from kvquant_hf.ops.triton.launch import decode_attention, unsupported
from kvquant_hf.ops.triton.layout import ChannelOrder, WordLayout, word_layouts
from kvquant_hf.ops.triton.quantize import encode_blocks

__all__ = [
    "ChannelOrder",
    "WordLayout",
    "decode_attention",
    "encode_blocks",
    "has_driver",
    "is_interpreted",
    "unsupported",
    "why_unavailable",
    "word_layouts",
]
