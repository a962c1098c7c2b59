"""Orthonormal rotations of keys and values before they are quantized (QuaRot, arXiv 2404.00456, section 4)."""

import math
from functools import cache

import torch

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.spec import QuantSpec

# Rotations within a head: as `q·k = (qR)·(kR)`, attention may leave them in and rotate queries and outputs instead.
FOLDABLE = ("hadamard", "hadamard_signs")
# Most heads that are mixed; RotateKV's group.
HEAD_GROUP = 4
# A token with a number above this is rotated at a fraction of its size, so that no sum overflows …
_LARGE = 2.0**100
_SHRINK = 2.0**-24
# … and comes out below this, so that a range twice as wide is finite and so are its errors.
_LARGEST = 2.0**126


def hadamard_width(head_dim: int) -> int:
    """Largest power of two that divides `head_dim`: the size of a Hadamard block."""
    return head_dim & -head_dim


def head_group(num_heads: int) -> int:
    """Heads that `grouped_heads` mixes: the largest power of two up to 4 that divides their number."""
    return min(HEAD_GROUP, num_heads & -num_heads)


def check_head_dim(rotation: str, head_dim: int) -> None:
    """Raise if a rotation does not serve a head size.

    Raises:
        ValueError: `head_dim` is odd, so that there is nothing to mix.
    """
    if rotation != "none" and head_dim % 2:
        raise ValueError(f"`rotation={rotation!r}` needs an even head size, got {head_dim}.")


def check_channel_order(channel_order: tuple[int, ...], head_dim: int) -> None:
    """Raise if an order of channels is not one of heads of this size.

    Raises:
        ValueError: It has another number of channels.
    """
    if channel_order and len(channel_order) != head_dim:
        raise ValueError(
            f"`channel_order` must list the {head_dim} channels of a head, got {len(channel_order)}: orders are made "
            "for one model and one side."
        )


def check_rotation(spec: QuantSpec, head_dim: int) -> None:
    """Raise if one side is to be quantized in a rotation that does not serve heads of this size.

    Raises:
        ValueError: See `check_head_dim` and `check_channel_order`.
    """
    if spec.is_quantized:
        check_head_dim(spec.rotation, head_dim)
        check_channel_order(spec.channel_order, head_dim)


def check_rotations(config: KVQuantConfig, head_dims: tuple[int, int] | None, layer_idx: int) -> None:
    """Raise if the rotations of one layer do not serve its heads.

    Args:
        config: Settings of the layer.
        head_dims: Size of its key and value vectors, `None` where that is not known before it is fed.
        layer_idx: The layer, for the message.

    Raises:
        ValueError: A side has a rotation, or an order of channels, for heads of another size.
    """
    for name, spec, head_dim in zip(("key", "value"), (config.key, config.value), head_dims or (), strict=False):
        try:
            check_rotation(spec, head_dim)
        except ValueError as error:
            raise ValueError(f"Layer {layer_idx}, `{name}`: {error}") from error


def check_head_groups(rotation: str, num_heads: int, whole: int | None) -> None:
    """Raise if a rotation would mix heads that different processes hold.

    Args:
        rotation: A name in `kvquant_hf.spec.ROTATIONS`.
        num_heads: Key/value heads that this process holds.
        whole: Those of the whole model, `None` where that is not known.

    Raises:
        ValueError: It would.
    """
    if rotation == "grouped_heads" and whole and head_group(num_heads) != head_group(whole):
        raise ValueError(
            f"`rotation='grouped_heads'` mixes {head_group(whole)} of the model's {whole} key/value heads at a time, "
            f"this process holds {num_heads}: use 'hadamard' or split the model into fewer tensor parallel parts."
        )


def hadamard(states: torch.Tensor) -> torch.Tensor:
    """Multiply the last dimension by a (block) Hadamard matrix; the transform is its own inverse.

    Computed by additions and subtractions rather than as a matrix product: the latter rounds differently with the
    size of the batch, and codes must not depend on how many tokens were handed over at once.

    Args:
        states: `[..., head_dim]`, float. A head size that is no power of two is transformed in equal blocks of
            `hadamard_width(head_dim)`.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        ValueError: `head_dim` is odd, so that there is nothing to mix.
    """
    width = hadamard_width(states.shape[-1])
    check_head_dim("hadamard", states.shape[-1])
    return _butterflies(states, width, 1) / math.sqrt(width)


def _butterflies(states: torch.Tensor, width: int, stride: int) -> torch.Tensor:
    """Sums and differences that make up a Hadamard matrix along elements `stride` apart of the last dimension."""
    mixed, half = states, 1
    while half < width:
        pairs = mixed.reshape(*states.shape[:-1], -1, 2, half * stride)
        first, second = pairs.unbind(-2)
        mixed = torch.stack((first + second, first - second), dim=-2)
        half *= 2
    return mixed.reshape(states.shape)


def hadamard_of_heads(states: torch.Tensor) -> torch.Tensor:
    """Mix neighbouring heads at equal channel by a Hadamard matrix; the transform is its own inverse.

    Every head turns equal channels by equal angles, so this mixing commutes with the rotary embedding (RotateKV,
    IJCAI 2025, arXiv 2501.16383, "Pre-RoPE Grouped-Head Rotation"). It shares the error of a wide channel out among
    heads and lowers the sum of errors no further than a rotation within heads does.

    Args:
        states: `[B, H, ..., D]`, float; heads are mixed in groups of `head_group(H)`, one head not at all.
    """
    group = head_group(states.shape[1])
    if group == 1:
        return states
    mixed = _butterflies(states.movedim(1, -1), group, 1).movedim(-1, 1)
    return mixed / math.sqrt(group)


@cache
def signs(head_dim: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The signs of `hadamard_signs`, `[head_dim]`, +1 or -1, the same in every layer, process and version.

    Channel `c` has the sign `-1` where the lowest bit of `h(c + 1)` is set, `h` being the 32-bit finalizer of
    MurmurHash3: `h ^= h >> 16; h *= 0x85EBCA6B; h ^= h >> 13; h *= 0xC2B2AE35; h ^= h >> 16`.
    """
    with torch.inference_mode(False):
        values = [1.0 - 2.0 * (hashed(channel + 1) & 1) for channel in range(head_dim)]
        return torch.tensor(values, device=device, dtype=dtype)


def hashed(number: int) -> int:
    """`h` of `signs`, of a number below 2^32."""
    number ^= number >> 16
    number = number * 0x85EBCA6B & 0xFFFFFFFF
    number ^= number >> 13
    number = number * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


@cache
def order_index(channel_order: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`(channel of each place, place of each channel)`, `[D]`, int32; kept for ever."""
    with torch.inference_mode(False):
        channels = torch.tensor(channel_order, device=device, dtype=torch.int32)
        return channels, channels.argsort().int()


def rotate(states: torch.Tensor, rotation: str, channel_order: tuple[int, ...] = ()) -> torch.Tensor:
    """Keys or values in the basis they are quantized in.

    Args:
        states: `[B, H, ..., D]`, float. For the rotations in `FOLDABLE` the leading dimensions are free.
        rotation: A name in `kvquant_hf.spec.ROTATIONS`.
        channel_order: In which order the transform takes the channels of each head, see `QuantSpec.channel_order`.

    Returns:
        A tensor of the same shape and dtype; `states` itself for `none`.

    Raises:
        ValueError: The head size is odd, or the order has another number of channels.
    """
    if rotation == "none":
        return states
    check_channel_order(channel_order, states.shape[-1])
    if rotation == "grouped_heads":
        states = hadamard_of_heads(states)
    if channel_order:
        states = states.index_select(-1, order_index(channel_order, states.device)[0])
    if rotation == "hadamard_signs":
        states = states * signs(states.shape[-1], states.device, states.dtype)
    return hadamard(states)


def rotate_bounded(
    states: torch.Tensor, rotation: str, channel_order: tuple[int, ...] = (), *, inverse: bool = False
) -> torch.Tensor:
    """`rotate` (or `unrotate`) whose results are finite for finite float32 numbers of any size.

    An orthonormal matrix multiplies the largest number of a vector by up to the root of its length, beyond float32 for
    the largest of them. Results then stop at 2^126; those that fit are what `rotate` gives, bit for bit.
    """
    turn = unrotate if inverse else rotate
    if rotation == "none":
        return states
    peak = states.abs().amax(-1, keepdim=True)
    if rotation == "grouped_heads":
        peak = peak.amax(1, keepdim=True)
    large = peak > _LARGE
    if not bool(large.any()):
        return turn(states, rotation, channel_order)
    shrink = torch.where(large, _SHRINK, 1.0)
    bounds = _LARGEST * shrink
    return turn(states * shrink, rotation, channel_order).clamp(-bounds, bounds) / shrink


def unrotate(states: torch.Tensor, rotation: str, channel_order: tuple[int, ...] = ()) -> torch.Tensor:
    """Undo `rotate`; arguments and errors as there."""
    if rotation == "none":
        return states
    check_channel_order(channel_order, states.shape[-1])
    states = hadamard(states)
    if rotation == "hadamard_signs":
        states = states * signs(states.shape[-1], states.device, states.dtype)
    if channel_order:
        states = states.index_select(-1, order_index(channel_order, states.device)[1])
    return hadamard_of_heads(states) if rotation == "grouped_heads" else states
