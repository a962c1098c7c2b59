"""The Hadamard rotation."""

import pytest
import torch

from kvquant_hf.rotation import hadamard, hadamard_width


@pytest.mark.parametrize("head_dim", [2, 16, 24, 64, 80, 96, 128, 256])
def test_it_is_orthonormal_symmetric_and_its_own_inverse(head_dim):
    matrix = hadamard(torch.eye(head_dim, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64))
    torch.testing.assert_close(matrix, matrix.T)
    assert ((matrix != 0).sum(0) == hadamard_width(head_dim)).all()


def test_a_row_does_not_depend_on_its_neighbours():
    rows = torch.randn(1000, 64)
    assert torch.equal(hadamard(rows)[17:19], hadamard(rows[17:19]))


def test_odd_heads_are_refused():
    with pytest.raises(ValueError, match="even head size, got 15"):
        hadamard(torch.zeros(3, 15))
