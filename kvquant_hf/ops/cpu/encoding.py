"""Quantizing and packing with the compiled code."""

import ctypes
from array import array
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvquant_hf.blocks import EncodedBlocks
from kvquant_hf.ops.cpu.build import ELEMENT_KINDS, BuildError, load, parallel_region
from kvquant_hf.ops.cpu.tables import offset_tables, start_tables
from kvquant_hf.quantizers.second_level import scale_table

if TYPE_CHECKING:
    from kvquant_hf.rope import KeyRotation
    from kvquant_hf.spec import QuantSpec

_MAX_BLOCK, _MAX_DIM = 128, 256


@cache
def _library_or_error() -> Any:
    """The compiled library, or the `BuildError` that says why there is none: not to be sought for every block."""
    try:
        # Products and sums must round as PyTorch's do.
        found = load("encode", extra=("-ffp-contract=off",))
    except BuildError as error:
        return error
    found.kvquant_encode.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    found.kvquant_encode.restype = ctypes.c_int
    found.kvquant_append.argtypes = (ctypes.c_void_p,)
    found.kvquant_append.restype = None
    return found


def library() -> Any:
    """The compiled `encode.cpp`.

    Raises:
        BuildError: It could not be compiled.
    """
    found = _library_or_error()
    if isinstance(found, BuildError):
        raise found
    return found


def can_encode(spec: "QuantSpec", dtype: torch.dtype, device: torch.device, block_length: int, head_dim: int) -> bool:
    """Whether `encode` serves blocks of this kind."""
    return (
        device.type == "cpu"
        and spec.method == "affine"
        and spec.levels == "uniform"
        and not spec.outliers
        and not spec.shares
        and spec.rotation in ("none", "hadamard")
        and not spec.channel_order
        and not (spec.promotes and spec.clip == "mse")
        and not (spec.has_second_level and not (spec.symmetric and spec.granularity == "per_token"))
        and dtype in ELEMENT_KINDS
        and block_length % 16 == 0
        and head_dim % 16 == 0
        and block_length <= _MAX_BLOCK
        and head_dim <= _MAX_DIM
    )


def encode(
    spec: "QuantSpec",
    states: torch.Tensor,
    block_length: int,
    rotation: "KeyRotation | None" = None,
    num_sinks: int = 0,
    first_block: int = 0,
    fitted: torch.Tensor | None = None,
    feedback: torch.Tensor | None = None,
    partners: torch.Tensor | None = None,
) -> EncodedBlocks | None:
    """Quantize and pack whole blocks, see `BlockStore.encode`.

    With `clip="minmax"` the result is that of `AffineQuantizer` and `PlanarLayout` bit for bit; with `clip="mse"` sums
    of squared errors round differently, so that another one of two almost equal ranges may be chosen.

    Args:
        spec: How the tensor is stored; `can_encode` has agreed.
        states: `[B, H, N · block_length, D]`, the last dimension contiguous.
        block_length: Tokens of a block.
        rotation: The rotary embedding to undo first.
        num_sinks: Slot at which block 0 of the layer begins.
        first_block: Which block of the layer the first of these is.
        fitted: `[B, H, N, block_length, D]`, float32, contiguous: what ranges are fitted to, where that differs.
        feedback: `[H, D, D]`, float32, contiguous: see `BlockStore`.
        partners: `[D]`, int64: likewise.

    Returns:
        The blocks in the common layout, or `None` where something is not finite or needs parameters in float32: the
        quantizer knows what to do then.

    Raises:
        BuildError: The code could not be compiled.
    """
    function = library().kvquant_encode
    batch_size, heads, tokens, head_dim = states.shape
    blocks = tokens // block_length
    if states.stride(3) != 1:
        states = states.contiguous()
    per_channel = spec.granularity == "per_channel"
    rows, row = (head_dim, block_length) if per_channel else (block_length, head_dim)
    shape = (batch_size, heads, blocks, rows)
    codes = torch.empty((*shape, row * spec.nbits // 8), dtype=torch.uint8)
    scale_type = torch.uint8 if spec.has_second_level else torch.float16
    scale = torch.empty((*shape, -(-row // spec.group_size)), dtype=scale_type)
    zero_point = None if spec.symmetric else torch.empty_like(scale)
    turn = [0] * 8
    tables: tuple[torch.Tensor, ...] = ()
    if rotation is not None:
        starts = start_tables(rotation, num_sinks, block_length, first_block + blocks)
        tables = (*starts, *offset_tables(rotation, block_length))
        pairs = starts[0].shape[1]
        turn = [1 if rotation.pairing == "half" else 2, rotation.offset, rotation.rotary_dim, pairs]
        turn += [table.data_ptr() + 4 * pairs * first_block for table in starts]
        turn += [table.data_ptr() for table in tables[2:]]
    source = [states.data_ptr(), *states.stride()[:3], ELEMENT_KINDS[states.dtype]]
    settings = [spec.nbits, spec.group_size, spec.symmetric, spec.clip == "mse", spec.rotation == "hadamard"]
    fields = [*source, 0 if fitted is None else fitted.data_ptr(), batch_size, heads, blocks, block_length, head_dim]
    fields += [per_channel, *settings, *turn, codes.data_ptr(), scale.data_ptr()]
    count = spec.num_promoted(head_dim)
    extra = torch.empty((*shape[:3], count, row // 4), dtype=torch.uint8) if count else None
    promoted = torch.empty((*shape[:3], count), dtype=torch.uint8) if count else None
    fields += [0 if tensor is None else tensor.data_ptr() for tensor in (zero_point, feedback)]
    fields += [count, *(0 if tensor is None else tensor.data_ptr() for tensor in (partners, extra, promoted))]
    base = torch.empty((*shape[:3], 1), dtype=torch.float16) if spec.has_second_level else None
    if base is not None:
        fields += [scale_table(states.device).data_ptr(), scale.data_ptr(), base.data_ptr()]
    else:
        fields += [0, 0, 0]
    args = array("q", fields)
    parallel = parallel_region()
    threads = torch.get_num_threads() if parallel and blocks > 1 else 1
    failed = function(args.buffer_info()[0], threads, parallel)
    del tables
    if failed:
        return None
    return EncodedBlocks(codes, scale, zero_point, extra=extra, promoted=promoted, second_level=base)
