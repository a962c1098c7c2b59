"""The CPU backend: one C++ kernel, compiled on first use with the system compiler."""

from kvquant_hf.ops.cpu.build import BuildError
from kvquant_hf.ops.cpu.kernel import decode_attention, unsupported

__all__ = ["BuildError", "decode_attention", "unsupported"]
