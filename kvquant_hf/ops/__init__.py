"""Attention over packed keys and values. Knows tensors and views, nothing of Transformers."""

from kvquant_hf.ops.dispatch import available_backends, block_layouts, decode_attention, encode_blocks

__all__ = ["available_backends", "block_layouts", "decode_attention", "encode_blocks"]
