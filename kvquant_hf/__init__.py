"""Keys and values of Transformers decoders in 2 to 8 bits, read with fused dequantize-attention."""

from kvquant_hf.attention import register_attention
from kvquant_hf.cache import QuantCache
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.lazy import LazyKV
from kvquant_hf.memory import MemoryReport
from kvquant_hf.presets import list_presets
from kvquant_hf.query_moments import QueryMoments
from kvquant_hf.spec import QuantSpec
from kvquant_hf.view import StaleViewError

__version__ = "0.1.0"

__all__ = [
    "KVQuantConfig",
    "LazyKV",
    "MemoryReport",
    "QuantCache",
    "QuantSpec",
    "QueryMoments",
    "StaleViewError",
    "list_presets",
    "register_attention",
]
