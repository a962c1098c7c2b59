"""Orthonormal rotations of the head dimension (QuaRot, arXiv 2404.00456, section 4)."""

import math

import torch


def hadamard_width(head_dim: int) -> int:
    """Largest power of two that divides `head_dim`: the size of a Hadamard block."""
    return head_dim & -head_dim


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
    if width == 1:
        raise ValueError(f"`rotation='hadamard'` needs an even head size, got {states.shape[-1]}.")
    mixed, half = states, 1
    while half < width:
        pairs = mixed.reshape(*states.shape[:-1], -1, 2, half)
        first, second = pairs.unbind(-2)
        mixed = torch.stack((first + second, first - second), dim=-2)
        half *= 2
    return mixed.reshape(states.shape) / math.sqrt(width)
