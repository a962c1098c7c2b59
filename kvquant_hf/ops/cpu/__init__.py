"""The CPU backend: C++ compiled on first use with the system compiler."""

from kvquant_hf.ops.cpu.append import Appender, appender
from kvquant_hf.ops.cpu.build import BuildError
from kvquant_hf.ops.cpu.encoding import can_encode, encode
from kvquant_hf.ops.cpu.formats import unsupported
from kvquant_hf.ops.cpu.kernel import decode_attention

__all__ = ["Appender", "BuildError", "appender", "can_encode", "decode_attention", "encode", "unsupported"]
