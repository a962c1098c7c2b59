"""Calls that would corrupt or drop a cache, refused or warned of before anything has changed."""

import warnings
from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from kvquant_hf import _compat


def check_generate_call(call: _compat.GenerateCall, held: int) -> None:
    """Refuse calls of `generate` that a cache of `held` tokens cannot serve.

    Raises:
        ValueError: The call uses no cache, brings another prompt, or would feed the whole prompt again.
    """
    if not call.use_cache:
        raise ValueError(
            "`use_cache` must be true where a cache is passed, got False: every step would append the whole "
            "sequence to the cache again. Drop `use_cache=False` or the cache."
        )
    if not held:
        return
    if call.prompt_length is not None and call.prompt_length <= held:
        raise ValueError(
            f"The cache holds {held} tokens, but the prompt has {call.prompt_length}. A reused cache must hold a "
            "proper prefix of the prompt, and `attention_mask` must span the cached tokens as well. For another "
            "prompt use a new cache or `cache.reset()`; to go back, `cache.crop(-n)`."
        )
    if call.assisted:
        raise ValueError(
            f"The cache holds {held} tokens. Assisted and prompt-lookup decoding feed the whole prompt again and "
            "need an empty cache: use a new one or `cache.reset()`."
        )
    if call.prefill_chunk_size is not None and not _compat.CHUNKED_PREFILL_RESUMES:
        raise ValueError(
            f"The cache holds {held} tokens. In this version of Transformers `prefill_chunk_size` feeds the whole "
            "prompt again and needs an empty cache."
        )


def check_positions(position_ids: torch.Tensor, held: int, padding: torch.Tensor | None) -> None:
    """Refuse new tokens that do not continue what is stored.

    Args:
        position_ids: `[B, t]` of the new tokens.
        held: Tokens stored.
        padding: Left padding of each row, `[B]`, or `None`.

    Raises:
        ValueError: They start before the end.
    """
    first = position_ids[:, 0]
    padded = 0 if padding is None else int(padding.max())
    if int(first.max()) + padded < held:
        raise ValueError(
            f"The cache holds {held} tokens, but the new tokens start at position {int(first.max())}: they do "
            "not continue it. A cache is for one sequence: use a new one, or `cache.reset()`, for another prompt; "
            "pass only the new tokens of this one; and do not combine a cache with `use_cache=False`."
        )


def warn_before_switch(switch: int, held: int, new: int) -> None:
    """Warn when `new` tokens after `held` ones reach the length at which LongRoPE changes its frequencies."""
    if held < switch <= held + new and (held or new == switch):
        warnings.warn(
            f"This sequence crosses {switch} tokens, where LongRoPE changes its frequencies "
            "(`original_max_position_embeddings`). `generate` of Phi-3 models then drops the cache it was given, "
            "computes the whole prompt again and goes on with an unquantized `DynamicCache`. To keep "
            "quantization, end the call here and start another with a new QuantCache on the longer prompt.",
            stacklevel=3,
        )


def longrope_switch(config: PreTrainedConfig) -> int | None:
    """Length at which LongRoPE changes its frequencies, or `None` for models without it."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or parameters.get("rope_type") != "longrope":
        return None
    switch = parameters.get("original_max_position_embeddings")
    return int(switch) if switch is not None else None
