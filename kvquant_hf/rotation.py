"""Orthonormal rotations of the head dimension (QuaRot, arXiv 2404.00456, section 4)."""

from functools import cache

import torch


def hadamard_width(head_dim: int) -> int:
    """Largest power of two that divides `head_dim`: the size of a Hadamard block."""
    return 1 << ((head_dim & -head_dim).bit_length() - 1)


@cache
def _hadamard_matrix(width: int) -> torch.Tensor:
    """Sylvester's matrix scaled to be orthonormal (and symmetric, so its own inverse), `[width, width]`, float32."""
    with torch.inference_mode(False):  # shared by later calls in any mode
        matrix = torch.ones(1, 1)
        while matrix.shape[0] < width:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix * width**-0.5


def hadamard(states: torch.Tensor) -> torch.Tensor:
    """Multiply the last dimension by a (block) Hadamard matrix; the transform is its own inverse.

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
    matrix = _hadamard_matrix(width).to(states.device, states.dtype)
    blocks = states.reshape(*states.shape[:-1], -1, width)
    return (blocks @ matrix).flatten(-2)
