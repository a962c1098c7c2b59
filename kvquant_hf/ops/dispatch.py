"""The fused entry: checks its arguments, picks a backend, calls it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvquant_hf.ops import cpu, reference, triton
from kvquant_hf.ops.notice import no_compiler, tell_once
from kvquant_hf.rope import KeyRotation
from kvquant_hf.spec import QuantSpec

if TYPE_CHECKING:
    from kvquant_hf.blocks import BlockLayout, EncodedBlocks
    from kvquant_hf.storage import BlockStore
    from kvquant_hf.view import KVView

Backend = Callable[[torch.Tensor, "KVView", torch.Tensor | None, float], torch.Tensor]

_BACKENDS: dict[str, Backend] = {
    "torch": reference.decode_attention,
    "cpu": cpu.decode_attention,
    "triton": triton.decode_attention,
}


def available_backends() -> tuple[str, ...]:
    """Names of the backends that can compute fused attention in this installation."""
    usable = triton.is_interpreted() or triton.has_driver()
    return tuple(name for name in _BACKENDS if usable or name != "triton")


def block_layouts(
    backend: str,
    specs: tuple[QuantSpec, QuantSpec],
    block_length: int,
    head_dims: tuple[int, int],
    rotation: KeyRotation | None,
    device: torch.device,
) -> tuple["BlockLayout | None", "BlockLayout | None"]:
    """Layouts of the blocks of keys and of values for whoever will read them on a device.

    Args:
        backend: Configured backend.
        specs: How keys and values are stored.
        block_length: Tokens in a block.
        head_dims: Sizes of a key and of a value.
        rotation: The rotary embedding that is undone before keys are stored.
        device: Where the tensors live.

    Returns:
        Layouts for `BlockStore`, `None` for the common one.
    """
    if backend == "triton" or (
        backend in ("auto", "dense") and device.type != "cpu" and triton.why_unavailable(device) is None
    ):
        return triton.word_layouts(specs, block_length, head_dims, rotation)
    return None, None


def encode_blocks(
    store: "BlockStore",
    states: torch.Tensor,
    slot: int,
    num_sinks: int,
    rotation: KeyRotation | None = None,
    fitted: torch.Tensor | None = None,
) -> "EncodedBlocks | None":
    """Quantize and pack raw keys or values with compiled code, where there is some for the store's layout.

    Args:
        store: Where they will go; nothing is stored yet.
        states: `[B, H, n · L, D]`, keys rotated as the model rotates them.
        slot: Slot of the first token.
        num_sinks: Slot at which the blocks of the layer begin.
        rotation: The rotary embedding to undo first, or `None`.
        fitted: `[B, H, n, L, D]`, float32: what ranges are fitted to, where that differs.

    Returns:
        What `store.encode` would return, or `None` if that has to do it.
    """
    if isinstance(store.own_layout, triton.WordLayout):
        return None if fitted is not None else triton.encode_blocks(store, states, slot, rotation)
    length = store.block_length
    if store.own_layout is not None or not cpu.can_encode(
        store.spec, states.dtype, states.device, length, states.shape[3]
    ):
        return None
    try:
        first_block = (slot - num_sinks) // length
        return cpu.encode(
            store.spec,
            states,
            length,
            rotation,
            num_sinks,
            first_block,
            fitted,
            store.feedback,
            store.partners,
        )
    except cpu.BuildError as error:
        no_compiler(error)
        return None


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
    elif view.device.type == "cuda" and not (wants_gradient and torch.is_grad_enabled()):
        reason = triton.why_unavailable(view.device)
        if reason is not None:
            tell_once(f"The GPU kernels cannot run, the slower torch backend is used: {reason}.")
        else:
            reason = triton.unsupported(view)
            if reason is None:
                return triton.decode_attention(query, view, mask, scale)
            tell_once(f"The GPU kernels do not read {reason}; the slower torch backend does.")
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
    if view.backend not in available_backends():
        why = f" {triton.why_unavailable(view.device)}." if view.backend == "triton" else ""
        raise ValueError(
            f"`backend` must be one of {available_backends()} in this installation, got {view.backend!r}.{why}"
        )
    return _BACKENDS[view.backend](query, view, mask, scale)


def appender(keys: torch.Tensor, values: torch.Tensor) -> cpu.Appender | None:
    """What copies single tokens into these buffers `[B, H, capacity, D]` faster than tensors do, if anything."""
    return cpu.appender(keys, values)
