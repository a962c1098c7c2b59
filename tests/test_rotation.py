"""Rotations: matrices, signs, groups of heads, and what they are worth."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant_hf import QuantSpec
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rotation import (
    FOLDABLE,
    check_head_groups,
    hadamard,
    hadamard_of_heads,
    hadamard_width,
    head_group,
    rotate,
    rotate_bounded,
    signs,
    unrotate,
)
from kvquant_hf.spec import ROTATIONS
from kvquant_hf.storage import BlockStore

D, L = 32, 16


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
    for rotation in ROTATIONS[1:]:
        with pytest.raises(ValueError, match=f"`rotation='{rotation}'` needs an even head size, got 15"):
            BlockStore(QuantSpec(rotation=rotation), L, 15, torch.float32)
    BlockStore(QuantSpec(nbits=16, rotation="hadamard"), L, 15, torch.float32)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (2, 80), (3, 96), (4, 32), (6, 24), (8, 16)])
def test_every_rotation_is_orthonormal_and_undone(rotation, heads, head_dim):
    size = heads * head_dim
    basis = torch.eye(size, dtype=torch.float64).reshape(size, heads, 1, head_dim)
    matrix = rotate(basis, rotation).reshape(size, size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(unrotate(rotate(basis, rotation), rotation), basis)
    mixed = {"none": 1, "grouped_heads": head_group(heads) * hadamard_width(head_dim)}
    assert ((matrix != 0).sum(0) == mixed.get(rotation, hadamard_width(head_dim))).all()


@pytest.mark.parametrize("rotation", FOLDABLE)
def test_scores_and_outputs_may_be_rotated_instead(rotation):
    query, keys, values = torch.randn(3, 2, 4, 10, D, dtype=torch.float64)
    weights = query @ keys.transpose(-1, -2)
    torch.testing.assert_close(rotate(query, rotation) @ rotate(keys, rotation).transpose(-1, -2), weights)
    torch.testing.assert_close(unrotate(weights @ rotate(values, rotation), rotation), weights @ values)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_results_depend_on_the_token_alone(rotation):
    states = torch.randn(3, 4, 5, 7, D)
    whole = rotate_bounded(states, rotation)
    assert torch.equal(rotate_bounded(states[1:2, :, 2:3, 3:5], rotation), whole[1:2, :, 2:3, 3:5])
    strided = states.transpose(1, 3).contiguous().transpose(1, 3)
    assert torch.equal(rotate_bounded(strided, rotation), whole)


# ---- signs -------------------------------------------------------------------------------------------------------


def test_signs_are_those_of_the_documented_hash():
    """Written files depend on them: they may never change."""
    cpu = torch.device("cpu")
    text = "".join("+" if sign > 0 else "-" for sign in signs(64, cpu).tolist())
    assert text == SIGNS
    assert set(signs(256, cpu).tolist()) == {-1.0, 1.0} and abs(signs(256, cpu).sum()) <= 32
    assert torch.equal(signs(24, cpu), signs(64, cpu)[:24])


SIGNS = "-+---++--++-+--++-+--++-+-+++--+++++--+-+++-+-+++-+---+---+---++"


def test_signs_need_no_random_numbers_and_agree_between_processes():
    state = torch.get_rng_state()
    here = rotate(torch.ones(1, 1, 1, 48), "hadamard_signs")
    assert torch.equal(torch.get_rng_state(), state)
    code = "import torch; from kvquant_hf.rotation import rotate; torch.manual_seed(7); "
    code += "print(rotate(torch.ones(1, 1, 1, 48), 'hadamard_signs').flatten().tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == str(here.flatten().tolist())


def test_signs_spread_a_vector_that_the_plain_matrix_gathers():
    """A mean that all channels share becomes one outlier without them."""
    ones = torch.ones(1, 1, 1, 64)
    assert rotate(ones, "hadamard").abs().max() == 8
    assert rotate(ones, "hadamard_signs").abs().max() < 4


# ---- heads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 2), (3, 1), (4, 4), (5, 1), (6, 2), (8, 4), (12, 4)])
def test_groups_are_the_largest_that_divide_the_heads(heads, group):
    assert head_group(heads) == group
    states = torch.zeros(1, heads, 1, 4)
    states[:, heads - 1] = 1
    reached = hadamard_of_heads(states)[0, :, 0, 0] != 0
    assert reached.nonzero().flatten().tolist() == list(range(heads - group, heads))


def test_one_head_and_three_are_left_to_the_plain_matrix():
    for heads in (1, 3):
        states = torch.randn(2, heads, 5, D)
        assert torch.equal(rotate(states, "grouped_heads"), rotate(states, "hadamard"))


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_mixing_heads_commutes_with_the_rotary_embedding(pairing):
    rotation = KeyRotation(1 / 100 ** (torch.arange(8) / 8), D, 4, pairing)
    keys = torch.randn(2, 8, 50, D, dtype=torch.float64)
    angles = [table.double() for table in rotation.tables(torch.arange(50))]
    torch.testing.assert_close(
        hadamard_of_heads(rotation.apply(keys, *angles)), rotation.apply(hadamard_of_heads(keys), *angles)
    )


@pytest.mark.parametrize(("held", "whole"), [(1, 2), (2, 4), (3, 6), (1, 8)])
def test_groups_that_cross_processes_are_refused(held, whole):
    with pytest.raises(ValueError, match=rf"`rotation='grouped_heads'` .* {whole} key/value .* holds {held}:"):
        check_head_groups("grouped_heads", held, whole)
    check_head_groups("hadamard", held, whole)
    check_head_groups("grouped_heads", held, None)


@pytest.mark.parametrize(("held", "whole"), [(2, 2), (4, 8), (2, 6), (1, 3), (4, 12)])
def test_groups_within_processes_are_not(held, whole):
    check_head_groups("grouped_heads", held, whole)
    states = torch.randn(1, whole, 2, D)
    parts = [rotate(part, "grouped_heads") for part in states.split(held, dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), rotate(states, "grouped_heads"))


# ---- numbers of any size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", ROTATIONS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_finite_numbers_stay_finite(rotation, data):
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
    flat = data.draw(st.lists(numbers, min_size=2 * 8, max_size=2 * 8))
    blocks = torch.tensor(flat).reshape(1, 2, 1, 1, 8).expand(1, 2, 1, L, 8)
    for granularity in ("per_channel", "per_token"):
        spec = QuantSpec(nbits=8, granularity=granularity, group_size=16, rotation=rotation)
        store = BlockStore(spec, L, 8, torch.float32)
        store.append(store.encode(blocks))
        back = store.read(0, 1)
        assert torch.isfinite(back).all() and torch.isfinite(store.state()["scale"]).all()
        if blocks.abs().max() <= 2.0**120:
            # An orthonormal matrix leaves lengths alone: half a step of each number, as far as those of a group.
            bound = 0.02 * blocks.abs().amax() * 4 + 1e-6
            assert ((back - blocks).abs() <= bound).all()


def test_large_numbers_do_not_touch_the_tokens_beside_them():
    states = torch.randn(1, 4, 6, D)
    want = rotate_bounded(states, "grouped_heads")
    states[0, :, 3] = 3e38  # sums of these are infinite
    got = rotate_bounded(states, "grouped_heads")
    assert torch.isfinite(got).all() and got[:, :, 3].abs().max() > 1e37
    others = [0, 1, 2, 4, 5]
    assert torch.equal(got[:, :, others], want[:, :, others])


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_large_numbers_that_fit_come_out_as_ever(rotation):
    states = torch.randn(1, 4, 6, D)
    assert torch.equal(rotate_bounded(states * 2.0**110, rotation), rotate(states, rotation) * 2.0**110)
