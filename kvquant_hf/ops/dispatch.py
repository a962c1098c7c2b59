"""The fused entry: checks its arguments, picks a backend, calls it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvquant_hf.ops import cpu, reference
from kvquant_hf.ops.notice import no_compiler, tell_once

if TYPE_CHECKING:
    from kvquant_hf.config import QuantSpec
    from kvquant_hf.rope import KeyRotation
    from kvquant_hf.view import KVView

Backend = Callable[[torch.Tensor, "KVView", torch.Tensor | None, float], torch.Tensor]

_BACKENDS: dict[str, Backend] = {"torch": reference.decode_attention, "cpu": cpu.decode_attention}


def available_backends() -> tuple[str, ...]:
    """Names of the backends that can compute fused attention in this installation."""
    return tuple(_BACKENDS)


def _automatic(query: torch.Tensor, view: "KVView", mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """The fast backend of the tensors' device where it can serve the call, else the reference."""
    wants_gradient = query.requires_grad or (mask is not None and mask.requires_grad)
    if view.device.type == "cpu" and not (wants_gradient and torch.is_grad_enabled()):
        reason = cpu.unsupported(view)
        if reason is not None:
            tell_once(f"The CPU kernel does not read {reason}; the slower torch backend does.")
        else:
            try:
                return cpu.decode_attention(query, view, mask, scale)
            except cpu.BuildError as error:
                no_compiler(error)
    return reference.decode_attention(query, view, mask, scale)


def decode_attention(
    query: torch.Tensor, view: "KVView", mask: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    """Attention of few query rows over a layer's stored history, dequantizing on the way.

    Computes `softmax(scale · q Kᵀ + mask) V` over all `T` tokens of the view with one pass of online softmax
    (Milakov and Gimelshein, arXiv 1805.02867, section 3), in float32, without forming the dense keys and values.

    Args:
        query: `[B, H_q, q_len, D]`, rotated as the model rotates it. `H_q` is a multiple of the view's key/value
            heads, consecutive query heads sharing one.
        view: What `QuantLayer` handed over.
        mask: Broadcastable to `[B, H_q, q_len, T]`: boolean (true: attend) or additive; `None` attends to everything,
            also for several rows. Rows that attend to nothing give zeros.
        scale: Factor of the scores; `1 / sqrt(D)` by default.

    Returns:
        `[B, H_q, q_len, D_v]`, the dtype of `query`.

    Raises:
        ValueError: A shape does not fit, or the view's backend is not available.
        StaleViewError: The layer has changed since the view was made.
    """
    batch_size, num_kv_heads, kv_len, head_dim = view.key_shape
    if query.ndim != 4 or query.shape[0] != batch_size or query.shape[3] != head_dim:
        raise ValueError(
            f"`query` must have the shape [{batch_size}, H_q, q_len, {head_dim}], got {list(query.shape)}."
        )
    if query.shape[1] % num_kv_heads:
        raise ValueError(f"`query` must have a multiple of {num_kv_heads} heads, got {query.shape[1]}.")
    if mask is not None:
        wanted = (batch_size, query.shape[1], query.shape[2], kv_len)
        padded = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if mask.ndim > 4 or any(have not in (1, want) for have, want in zip(padded, wanted, strict=True)):
            raise ValueError(f"`mask` must be broadcastable to {list(wanted)}, got {list(mask.shape)}.")
        if padded[3] != kv_len:
            mask = mask.expand(*mask.shape[:-1], kv_len)
        mask = mask.reshape(*padded[:3], kv_len)
    scale = head_dim**-0.5 if scale is None else scale
    if view.backend in ("auto", "dense"):
        return _automatic(query, view, mask, scale)
    if view.backend not in _BACKENDS:
        raise ValueError(
            f"`backend` must be one of {available_backends()} in this installation, got {view.backend!r}."
        )
    return _BACKENDS[view.backend](query, view, mask, scale)


def encode(
    spec: "QuantSpec",
    states: torch.Tensor,
    block_length: int,
    rotation: "KeyRotation | None" = None,
    num_sinks: int = 0,
    first_block: int = 0,
    fitted: torch.Tensor | None = None,
) -> cpu.Packed | None:
    """Quantize and pack whole blocks with compiled code where there is some for these tensors.

    Args:
        spec: How the tensor is stored.
        states: `[B, H, N · block_length, D]`.
        block_length: Tokens of a block.
        rotation: The rotary embedding to undo first.
        num_sinks: Slot at which block 0 of the layer begins.
        first_block: Which block of the layer the first of these is.
        fitted: `[B, H, N, block_length, D]`, float32: what ranges are fitted to, where that differs.

    Returns:
        The blocks, or `None`: the quantizer of the method does it then.
    """
    if not cpu.can_encode(spec, states.dtype, states.device, block_length, states.shape[3]):
        return None
    try:
        return cpu.encode(spec, states, block_length, rotation, num_sinks, first_block, fitted)
    except cpu.BuildError as error:
        no_compiler(error)
        return None


def appender(keys: torch.Tensor, values: torch.Tensor) -> cpu.Appender | None:
    """What copies single tokens into these buffers `[B, H, capacity, D]` faster than tensors do, if anything."""
    return cpu.appender(keys, values)
