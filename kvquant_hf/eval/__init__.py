"""Measuring what a quantized cache costs: scoring through the cache, bytes really held, rival caches to compare."""

from kvquant_hf.eval.baselines import BASELINES, baseline_factory
from kvquant_hf.eval.bits import HeldBits, held_bits, replayed_bits, storage_bytes
from kvquant_hf.eval.environment import run_environment
from kvquant_hf.eval.score import CacheFactory, Protocol, Score, score_windows
from kvquant_hf.eval.settings import parse_quant
from kvquant_hf.eval.text import load_text, locate, token_windows

__all__ = [
    "BASELINES",
    "CacheFactory",
    "HeldBits",
    "Protocol",
    "Score",
    "baseline_factory",
    "held_bits",
    "load_text",
    "locate",
    "parse_quant",
    "replayed_bits",
    "run_environment",
    "score_windows",
    "storage_bytes",
    "token_windows",
]
