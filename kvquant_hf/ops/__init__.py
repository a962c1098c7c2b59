"""Attention over packed keys and values, and packing them. Knows tensors and views, nothing of Transformers."""

from kvquant_hf.ops.cpu import Appender
from kvquant_hf.ops.dispatch import appender, available_backends, block_layouts, decode_attention, encode_blocks

__all__ = ["Appender", "appender", "available_backends", "block_layouts", "decode_attention", "encode_blocks"]
