"""Sums whose result depends on the summed numbers alone."""

import torch


def sum_by_halves(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum along `dim`, kept as a dimension, by halves.

    The order of a reduction of torch's depends on how many there are at once and how they lie in memory; codes must
    depend on the block alone.
    """
    while (size := tensor.shape[dim]) > 1:
        half = size // 2
        total = tensor.narrow(dim, 0, half) + tensor.narrow(dim, half, half)
        tensor = torch.cat([total, tensor.narrow(dim, size - 1, 1)], dim) if size % 2 else total
    return tensor
