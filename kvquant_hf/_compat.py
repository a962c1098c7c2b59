"""Every question about a library version is asked and answered here."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache

TRANSFORMERS_VERSION = Version(version("transformers"))
MINIMUM_TRANSFORMERS = Version("5.17.0")

if TRANSFORMERS_VERSION < MINIMUM_TRANSFORMERS:
    raise ImportError(
        f"kvquant_hf needs transformers >= {MINIMUM_TRANSFORMERS}, found {TRANSFORMERS_VERSION}. "
        "Install a newer one with `pip install -U transformers`."
    )

# 5.24 renamed the argument of `forward` and `generate` that takes a cache.
CACHE_KW = "cache" if Version("5.24.0.dev0") <= TRANSFORMERS_VERSION else "past_key_values"


def cache_kwargs(cache: Cache | None) -> dict[str, Any]:
    """`{name: cache}` under the name that `model(...)` and `model.generate(...)` expect in this version."""
    return {CACHE_KW: cache}


def output_cache(outputs: Any) -> Cache:
    """The cache held by a model or generate output, under the name of this version."""
    cache: Cache = getattr(outputs, CACHE_KW)
    return cache


def layer_types_and_classes(config: Any) -> tuple[list[str], list[Any]]:
    """Layer types of a decoder config and Transformers' own cache layer object for each, as `DynamicCache` has them.

    Args:
        config: Text decoder config (after `get_text_config(decoder=True)`).

    Returns:
        `(layer_types, layers)`, one entry per cache layer.

    Raises:
        ValueError: A layer type has no cache layer class; the message names the types.
    """
    cache_utils: Any = transformers.cache_utils
    mapping = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    layer_types, layer_kwargs = cache_utils.get_layer_types_and_kwargs(config)
    if isinstance(layer_kwargs, dict):  # up to 5.23 all layers share one set of arguments
        layer_kwargs = [layer_kwargs] * len(layer_types)
    unknown = sorted(set(layer_types) - set(mapping))
    if unknown:
        raise ValueError(f"`config` has layers of types {unknown}; cache layers exist for {sorted(mapping)}.")
    return layer_types, [mapping[kind](**kwargs) for kind, kwargs in zip(layer_types, layer_kwargs, strict=True)]


@dataclass(frozen=True)
class GenerateCall:
    """What `generate` was asked to do, as far as the cache it was given can learn.

    Attributes:
        attention_mask: `[B, P]` or `None`.
        prompt_length: Tokens of the prompt, or `None` where only embeddings of unknown extent are known.
        use_cache: The setting in force for this call.
        prefill_chunk_size: Chunk length of the prefill, or `None`.
        assisted: Whether drafts of an assistant or of the prompt are checked.
        max_length: Longest sequence the call may reach, or `None`.
    """

    attention_mask: torch.Tensor | None
    prompt_length: int | None
    use_cache: bool
    prefill_chunk_size: int | None
    assisted: bool
    max_length: int | None


def current_generate_call(depth: int) -> GenerateCall | None:
    """The `generate` call that is marking a user's cache, `depth` frames up from the caller, or `None`.

    Transformers marks a cache given by the user (`cache._is_user_defined = True`) before the first forward, but hands
    it neither the attention mask nor the settings of the call, without which a stale cache cannot be told from a
    reused prefix. They are read from the marking function's local variables; where these have other names nothing is
    learned, and the checks that need them are left to the position ids seen by `update`.
    """
    local = sys._getframe(depth + 1).f_locals
    model_kwargs, generation_config = local.get("model_kwargs"), local.get("generation_config")
    if not isinstance(model_kwargs, Mapping) or generation_config is None:
        return None
    mask = model_kwargs.get("attention_mask")
    mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
    embeds = model_kwargs.get("inputs_embeds")
    length: int | None
    if mask is not None:
        length = mask.shape[1]
    elif isinstance(embeds, torch.Tensor):
        length = embeds.shape[1]
    else:
        length = getattr(generation_config, "_mask_length", None)
    mode = local.get("generation_mode")
    use_cache = model_kwargs.get("use_cache", generation_config.use_cache)
    return GenerateCall(
        attention_mask=mask,
        prompt_length=length,
        use_cache=use_cache is not False and generation_config.use_cache is not False,
        prefill_chunk_size=generation_config.prefill_chunk_size,
        assisted=mode is not None and getattr(mode, "value", mode) == "assisted_generation",
        max_length=generation_config.max_length,
    )


# Up to 5.23, a chunked prefill that resumes a non-empty cache feeds the whole prompt again.
CHUNKED_PREFILL_RESUMES = Version("5.24.0.dev0") <= TRANSFORMERS_VERSION
