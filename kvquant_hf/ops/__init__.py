"""Attention over packed keys and values, and packing them. Knows tensors and views, nothing of Transformers."""

from kvquant_hf.ops.cpu import Appender
from kvquant_hf.ops.dispatch import appender, available_backends, decode_attention, encode

__all__ = ["Appender", "appender", "available_backends", "decode_attention", "encode"]
