"""The registered attention `kvquant`: strict reading of a quantized cache.

With `attn_implementation="kvquant"` one or few new tokens read the packed history through the fused operation or the
call fails: nothing falls back silently. It also serves versions of Transformers whose `sdpa` wrapper repeats keys and
values before it attends, which makes them dense.
"""

from typing import Any, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvquant_hf.lazy import LazyKV, fits_fused, is_lazy_pair
from kvquant_hf.ops import decode_attention

ATTENTION_NAME = "kvquant"
# Arguments that change what attention computes and that the fused operation does not know.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "relative_position")


def kvquant_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over what a cache handed out.

    Args:
        module: The attention module.
        query: `[B, H_q, q_len, D]`.
        key: `[B, H, T, D]`: `LazyKV` where a quantized history exists or a guard wants to see the queries, a plain
            tensor in a first prefill otherwise.
        value: `[B, H, T, D_v]`, likewise.
        attention_mask: `[B|1, H_q|1, q_len, T]`, boolean or additive, or `None`.
        dropout: Must be 0 where the history is quantized.
        scaling: Factor of the scores.
        kwargs: Further arguments of the attention interface.

    Returns:
        `([B, q_len, H_q, D_v], None)`.

    Raises:
        ValueError: The fused operation cannot compute what is asked for.
    """
    named = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if named:
        raise ValueError(f"`attn_implementation='kvquant'` does not support {named}; use 'sdpa' or 'eager'.")
    if kwargs.get("output_attentions"):
        raise ValueError("`attn_implementation='kvquant'` does not support `output_attentions=True`; use 'eager'.")
    if isinstance(key, LazyKV):
        key.show(query, query.shape[-1] ** -0.5 if scaling is None else scaling)
        if key.is_given or key.is_arranged:  # a prompt attends to itself exactly
            key, value = key.to_dense(), value.to_dense() if isinstance(value, LazyKV) else value
    if not isinstance(key, LazyKV):
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    if not is_lazy_pair(key, value):
        raise ValueError("`attn_implementation='kvquant'` needs the keys and values of one cache update.")
    if dropout:
        raise ValueError(f"`dropout` must be 0 while a quantized cache is read, got {dropout}.")
    view = key.view_of_cache
    if not fits_fused(query, view):
        # Many query rows share one dense dequantization, by design rather than as a fallback.
        dense = (key.to_dense(), cast(LazyKV, value).to_dense())
        output, _ = sdpa_attention_forward(
            module, query, *dense, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    if attention_mask is None and query.shape[2] > 1:
        raise ValueError("Several new tokens over a history need an attention mask, got None.")
    return decode_attention(query, view, attention_mask, scaling).transpose(1, 2).contiguous(), None


def register_attention() -> str:
    """Make `attn_implementation="kvquant"` known to Transformers; calling it again does nothing.

    Returns:
        The name, `"kvquant"`.
    """
    AttentionInterface.register(ATTENTION_NAME, kvquant_attention_forward)
    # Without a mask function of its own, a registered attention gets no mask at all.
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME
