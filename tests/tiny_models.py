"""Tiny random models of every supported family, shared by all tests.

The weights are drawn here instead of by Transformers: several families ignore `initializer_range`, and with the usual
0.02 attention is almost uniform, so that most cache bugs are invisible.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 128
HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 128
HEAD_DIM = 16
MAX_POSITIONS = 512
SLIDING_WINDOW = 16
INITIALIZER_RANGE = 0.2
PAD_TOKEN_ID = 0

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": INITIALIZER_RANGE,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA_LIKE: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 2,
    "intermediate_size": INTERMEDIATE_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
}
_GPT2_LIKE: dict[str, Any] = {**_COMMON, "n_positions": MAX_POSITIONS, "n_inner": INTERMEDIATE_SIZE}


def _family(model_type: str, base: dict[str, Any], **fields: Any) -> Callable[..., PreTrainedConfig]:
    """A factory of configs of one family; its keyword arguments override single fields."""

    def make(**overrides: Any) -> PreTrainedConfig:
        arguments = {**base, **fields, **overrides}
        # Configs keep and even edit the dictionaries they are given: every config gets its own.
        arguments = {
            name: dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
            for name, value in arguments.items()
        }
        config = AutoConfig.for_model(model_type, **arguments)
        # Some families replace a missing EOS by their own.
        config.eos_token_id = overrides.get("eos_token_id")
        return config

    return make


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **parameters}


FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": _family("llama", _LLAMA_LIKE),
    "llama-linear": _family("llama", _LLAMA_LIKE, rope_parameters=_rope("linear", factor=4.0)),
    "llama-dynamic": _family(
        "llama", _LLAMA_LIKE, max_position_embeddings=64, rope_parameters=_rope("dynamic", factor=4.0)
    ),
    "llama-yarn": _family(
        "llama",
        _LLAMA_LIKE,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    "llama-llama3": _family(
        "llama",
        _LLAMA_LIKE,
        rope_parameters=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "mistral": _family("mistral", _LLAMA_LIKE, sliding_window=None),
    "mistral-sliding": _family("mistral", _LLAMA_LIKE, sliding_window=SLIDING_WINDOW),
    "qwen2": _family("qwen2", _LLAMA_LIKE),
    "qwen3": _family("qwen3", _LLAMA_LIKE, head_dim=HEAD_DIM),
    "gemma2": _family(
        "gemma2",
        _LLAMA_LIKE,
        num_hidden_layers=4,
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=SLIDING_WINDOW,
    ),
    "gemma3": _family(
        "gemma3_text",
        _LLAMA_LIKE,
        num_hidden_layers=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=SLIDING_WINDOW,
        sliding_window_pattern=2,
        rope_parameters={
            "sliding_attention": _rope("default"),
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    ),
    "phi": _family("phi", _LLAMA_LIKE),
    "phi3": _family("phi3", _LLAMA_LIKE),
    "phi3-longrope": _family(
        "phi3",
        _LLAMA_LIKE,
        original_max_position_embeddings=48,
        rope_parameters=_rope(
            "longrope",
            short_factor=[1.0] * (HEAD_DIM // 2),
            long_factor=[4.0] * (HEAD_DIM // 2),
            original_max_position_embeddings=48,
        ),
    ),
    "glm4": _family("glm4", _LLAMA_LIKE, head_dim=HEAD_DIM),
    "cohere": _family("cohere", _LLAMA_LIKE, logit_scale=1.0),
    "stablelm": _family("stablelm", _LLAMA_LIKE),
    "gpt_neox": _family(
        "gpt_neox", _COMMON, intermediate_size=INTERMEDIATE_SIZE, max_position_embeddings=MAX_POSITIONS
    ),
    "gpt2": _family("gpt2", _GPT2_LIKE),
    "gptj": _family("gptj", _GPT2_LIKE, rotary_dim=8),
    "codegen": _family("codegen", _GPT2_LIKE, rotary_dim=8),
    "opt": _family(
        "opt",
        _COMMON,
        ffn_dim=INTERMEDIATE_SIZE,
        word_embed_proj_dim=HIDDEN_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        init_std=INITIALIZER_RANGE,
    ),
    "bloom": _family("bloom", _COMMON),
    "mpt": _family("mpt", _COMMON, expansion_ratio=2, max_seq_len=MAX_POSITIONS),
    "falcon": _family(
        "falcon", _COMMON, ffn_hidden_size=INTERMEDIATE_SIZE, max_position_embeddings=MAX_POSITIONS, multi_query=True
    ),
    "falcon-alibi": _family(
        "falcon", _COMMON, ffn_hidden_size=INTERMEDIATE_SIZE, max_position_embeddings=MAX_POSITIONS, alibi=True
    ),
    "gpt_oss": _family(
        "gpt_oss",
        _LLAMA_LIKE,
        num_hidden_layers=4,
        head_dim=HEAD_DIM,
        sliding_window=SLIDING_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_rope("yarn", factor=4.0, truncate=False, original_max_position_embeddings=128),
    ),
    "smollm3": _family("smollm3", _LLAMA_LIKE, num_hidden_layers=4, no_rope_layer_interval=2),
    "deepseek_v3": _family(
        "deepseek_v3",
        _LLAMA_LIKE,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=HEAD_DIM,
        qk_rope_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
    ),
}
"""Config factories by family or `family-variant`; every one takes overrides of single config fields."""


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny causal language model with random weights: fp32, CPU, evaluation mode, no EOS, pad token 0.

    Args:
        family: A key of `FAMILIES`.
        seed: Seed of the weights; the global random state is left as it was.
        **overrides: Config fields to change (`num_hidden_layers=1`), and `attn_implementation` (the family's default:
            `sdpa` where it supports that).

    Returns:
        A model whose matrices are drawn from a normal distribution of width 0.2, biases and norms as Transformers
        initialises them.
    """
    attn_implementation = overrides.pop("attn_implementation", None)
    config = FAMILIES[family](**overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0.0, INITIALIZER_RANGE)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    return model.eval()
