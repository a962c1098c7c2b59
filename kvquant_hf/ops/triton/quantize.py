"""Calling the quantize kernels: which stores they fill, and the arguments they are handed."""

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch

from kvquant_hf.blocks import EncodedBlocks
from kvquant_hf.ops.triton.availability import why_unavailable
from kvquant_hf.ops.triton.layout import MAX_MAGNITUDE, WordLayout
from kvquant_hf.ops.triton.tables import angle_table
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rotation import hadamard_width

if TYPE_CHECKING:
    from kvquant_hf.storage import BlockStore

# Tokens of values that a program quantizes.
_VALUE_TOKENS = 32


def quantizes(store: "BlockStore") -> bool:
    """Whether the kernels quantize for a store.

    They do min-max ranges of affine codes of one width without feedback, with metadata of 16 bits and channels in
    their order, for head sizes that are a power of two; everything else is left to the store's quantizer.
    """
    spec = store.spec
    return (
        isinstance(store.own_layout, WordLayout)
        and spec.method == "affine"
        and spec.clip == "minmax"
        and store.feedback is None
        and not spec.promotes
        and not spec.has_second_level
        and store.head_dim & (store.head_dim - 1) == 0
        and not (spec.rotation != "none" and spec.granularity == "per_channel")
        and not spec.channel_order
    )


def encode_blocks(
    store: "BlockStore", states: torch.Tensor, slot: int, rotation: KeyRotation | None
) -> EncodedBlocks | None:
    """Quantize and pack raw keys or values.

    Args:
        store: Where they will go; nothing is stored yet.
        states: `[B, H, n · L, D]`, keys rotated as the model rotates them.
        slot: Slot of the first token.
        rotation: The rotary embedding to undo, or `None`.

    Returns:
        What `store.encode` would return, or `None` if that has to do it.
    """
    if not quantizes(store) or why_unavailable(states.device) is not None:
        return None
    if states.stride(3) != 1:
        states = states.contiguous()
    with torch.cuda.device(states.device) if states.device.type == "cuda" else contextlib.nullcontext():
        grid, arguments = quantize_arguments(store, states, slot, rotation)
        # Fused multiply-adds would round once where the quantizer rounds twice.
        _kernel(store)[grid](**arguments, num_warps=4, enable_fp_fusion=False)
        if bool(arguments["flag"]):
            return None
    metadata = arguments["metadata"]
    if store.spec.granularity == "per_channel":
        metadata = metadata.view(torch.int32)
    return EncodedBlocks(arguments["codes"], None, None, metadata)


def _kernel(store: "BlockStore") -> Any:
    from kvquant_hf.ops.triton import quantize_kernel

    keys = store.spec.granularity == "per_channel"
    return quantize_kernel.quantize_keys_kernel if keys else quantize_kernel.quantize_values_kernel


def quantize_arguments(
    store: "BlockStore", states: torch.Tensor, slot: int, rotation: KeyRotation | None
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and arguments of the kernel for a store, results included."""
    layout, spec = store.own_layout, store.spec
    assert isinstance(layout, WordLayout)
    batch_size, heads, tokens, head_dim = states.shape
    length, device = store.block_length, states.device
    lead = (batch_size, heads, tokens // length)
    arguments: dict[str, Any] = {
        "states": states,
        "codes": torch.empty(*lead, length, layout.row_words, dtype=torch.int32, device=device),
        "flag": torch.zeros(1, dtype=torch.int32, device=device),
        "states_b": states.stride(0),
        "states_h": states.stride(1),
        "states_t": states.stride(2),
        "NBITS": spec.nbits,
        "SYMMETRIC": spec.symmetric,
        "LIMIT": MAX_MAGNITUDE,
        "D": head_dim,
        "DW": layout.plane_words,
        "TOPS": layout.row_words - layout.plane_words,
    }
    if spec.granularity == "per_channel":
        rotary = 0 if rotation is None else rotation.rotary_dim
        flag = arguments["flag"]
        starts, offsets, first = (
            (flag, flag, 0) if rotation is None else _tables(rotation, slot, length, lead[2], device)
        )
        width = head_dim if spec.symmetric else 2 * head_dim
        arguments |= {
            "metadata": torch.empty(*lead, 1, width, dtype=torch.float16, device=device),
            "start_table": starts,
            "offset_table": offsets,
            "first_start": first,
            "L": length,
            "ROTARY": rotary,
            "OFFSET": layout.order.offset,
            "INTERLEAVED": layout.order.interleaved,
        }
        return (lead[2], heads, batch_size), arguments
    group = min(spec.group_size, head_dim)
    width = hadamard_width(head_dim) if spec.rotation == "hadamard" else 0
    dtype = torch.float16 if spec.symmetric else torch.int32
    arguments |= {
        "metadata": torch.empty(*lead, length, head_dim // group, dtype=dtype, device=device),
        "num_tokens": tokens,
        "GROUP": group,
        "WIDTH": width,
        "ROOT": math.sqrt(width),
        "BT": _VALUE_TOKENS,
    }
    return (-(-tokens // _VALUE_TOKENS), heads, batch_size), arguments


def _tables(
    rotation: KeyRotation, slot: int, length: int, blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tables of block starts and of offsets, and the row of the first block in the former."""
    first = slot // length
    count = max(64, 1 << (first + blocks - 1).bit_length())
    starts = angle_table(rotation, slot % length, length, count, device)
    return starts, angle_table(rotation, 0, 1, length, device), first
