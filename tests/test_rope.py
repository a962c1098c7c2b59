import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant_hf.rope import KeyRotation, Pairing

CPU = torch.device("cpu")
SHAPES = [
    pytest.param(16, 16, 0, id="full"),
    pytest.param(128, 128, 0, id="full-128"),
    pytest.param(16, 8, 0, id="partial"),
    pytest.param(24, 10, 14, id="offset-at-end"),
    pytest.param(32, 6, 5, id="offset-inside"),
    pytest.param(8, 2, 0, id="one-pair"),
]
PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")


def rotation_of(head_dim: int, width: int, offset: int, pairing: Pairing, theta: float = 10_000.0) -> KeyRotation:
    inv_freq = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
    return KeyRotation(inv_freq, head_dim, offset, pairing)


def rotated_by_definition(rotation: KeyRotation, key: list[float], position: int) -> list[float]:
    """One key, pair by pair, in Python floats."""
    out = list(key)
    pairs = rotation.rotary_dim // 2
    for i, frequency in enumerate(rotation.inv_freq.tolist()):
        first, second = (i, i + pairs) if rotation.pairing == "half" else (2 * i, 2 * i + 1)
        x, y = key[rotation.offset + first], key[rotation.offset + second]
        turned = complex(x, y) * complex(math.cos(position * frequency), math.sin(position * frequency))
        out[rotation.offset + first], out[rotation.offset + second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("head_dim", "width", "offset"), SHAPES)
def test_follows_the_definition_pair_by_pair(head_dim: int, width: int, offset: int, pairing: Pairing) -> None:
    rotation = rotation_of(head_dim, width, offset, pairing)
    positions = torch.tensor([0, 1, 7, 4095, 99_999])
    keys = torch.randn(2, 3, len(positions), head_dim)
    rotated = rotation.apply(keys, *rotation.tables(positions))
    for b, h, t in [(0, 0, 0), (0, 1, 1), (1, 2, 2), (1, 0, 3), (0, 2, 4)]:
        expected = rotated_by_definition(rotation, keys[b, h, t].tolist(), int(positions[t]))
        torch.testing.assert_close(rotated[b, h, t], torch.tensor(expected), atol=2e-6, rtol=0)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("head_dim", "width", "offset"), SHAPES)
@pytest.mark.parametrize("first", [0, 1, 300, 32_767, 100_000])
def test_round_trip_is_the_identity(head_dim: int, width: int, offset: int, pairing: Pairing, first: int) -> None:
    rotation = rotation_of(head_dim, width, offset, pairing)
    keys = torch.randn(2, 2, 40, head_dim) * 10
    tables = rotation.tables(first + torch.arange(40))
    there = rotation.apply(keys, *tables, inverse=True)
    back = rotation.apply(there, *tables)
    assert (back - keys).abs().max() <= 1e-5 * keys.abs().max()
    if first:
        assert (there - keys).abs().max() > 0.1  # something was rotated at all


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.integers(1, 32),
    spare=st.integers(0, 9),
    pairing=st.sampled_from(PAIRINGS),
    first=st.integers(0, 100_000),
    theta=st.floats(10.0, 1e7),
    data=st.data(),
)
def test_round_trip_of_any_rotation(
    pairs: int, spare: int, pairing: Pairing, first: int, theta: float, data: st.DataObject
) -> None:
    rotation = rotation_of(2 * pairs + spare, 2 * pairs, data.draw(st.integers(0, spare)), pairing, theta)
    keys = torch.randn(3, rotation.head_dim, generator=torch.Generator().manual_seed(first))
    tables = rotation.tables(torch.tensor([first, first + 1, first + 17]))
    back = rotation.apply(rotation.apply(keys, *tables, inverse=True), *tables)
    assert (back - keys).abs().max() <= 1e-5 * keys.abs().max()


@pytest.mark.parametrize("first", [0, 4, 4096, 100_000, 1_000_000])
@pytest.mark.parametrize(("num_blocks", "block_length"), [(1, 32), (7, 16), (3, 1), (5, 63)])
def test_block_tables_equal_direct_tables(first: int, num_blocks: int, block_length: int) -> None:
    rotation = rotation_of(128, 128, 0, "half")
    cos, sin = rotation.block_tables(first, num_blocks, block_length, CPU)
    positions = first + torch.arange(num_blocks * block_length).reshape(num_blocks, block_length)
    direct_cos, direct_sin = rotation.tables(positions)
    assert cos.shape == (num_blocks, block_length, 64)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos, direct_cos, atol=5e-7, rtol=0)
    torch.testing.assert_close(sin, direct_sin, atol=5e-7, rtol=0)


def test_tables_are_exact_at_far_positions() -> None:
    rotation = KeyRotation(torch.tensor([1.0, 0.86596]), 4)
    cos, sin = rotation.tables(torch.tensor([100_003]))
    for i, frequency in enumerate(rotation.inv_freq.tolist()):
        assert cos[0, i] == pytest.approx(math.cos(100_003 * frequency), abs=1e-7)
        assert sin[0, i] == pytest.approx(math.sin(100_003 * frequency), abs=1e-7)


def test_blocks_round_trip_through_direct_tables() -> None:
    """What is un-rotated block by block may be rotated token by token, and the other way round."""
    rotation = rotation_of(64, 64, 0, "interleaved")
    keys = torch.randn(1, 2, 4, 32, 64)
    first = 100_004
    stored = rotation.apply(keys, *rotation.block_tables(first, 4, 32, CPU), inverse=True)
    positions = first + torch.arange(128)
    read = rotation.apply(stored.flatten(2, 3), *rotation.tables(positions))
    assert (read - keys.flatten(2, 3)).abs().max() <= 1e-5 * keys.abs().max()


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_channels_outside_the_rotary_part_pass_bit_by_bit(pairing: Pairing) -> None:
    rotation = rotation_of(32, 6, 5, pairing)
    keys = torch.randn(1, 1, 9, 32)
    before = keys.clone()
    rotated = rotation.apply(keys, *rotation.tables(torch.arange(9) + 50))
    assert torch.equal(keys, before)
    assert torch.equal(rotated[..., :5], keys[..., :5])
    assert torch.equal(rotated[..., 11:], keys[..., 11:])
    assert ((rotated - keys)[..., 5:11].abs().amax(dim=(0, 1, 2)) > 1e-3).all()


def test_the_other_pairing_does_not_undo_a_rotation() -> None:
    half, interleaved = (rotation_of(16, 16, 0, pairing) for pairing in PAIRINGS)
    keys = torch.randn(1, 1, 64, 16)
    tables = half.tables(torch.arange(64))
    mixed = interleaved.apply(half.apply(keys, *tables), *tables, inverse=True)
    assert (mixed - keys).abs().max() > 0.5


def test_scores_depend_on_distance_only() -> None:
    rotation = rotation_of(64, 64, 0, "half")
    query, key = torch.randn(1, 64), torch.randn(1, 64)

    def score(query_at: int, key_at: int) -> float:
        tables = [rotation.tables(torch.tensor([at])) for at in (query_at, key_at)]
        return float(rotation.apply(query, *tables[0]) @ rotation.apply(key, *tables[1]).T)

    assert score(90, 20) == pytest.approx(score(90_070, 90_000), abs=1e-4)
    assert score(90, 20) != pytest.approx(score(90, 21), abs=1e-2)


def test_long_table_replaces_the_short_one_beyond_the_limit() -> None:
    short, long = torch.tensor([1.0, 0.1]), torch.tensor([0.25, 0.025])
    rotation = KeyRotation(short, 4, long_inv_freq=long, original_length=48)
    assert rotation.for_length(48) is rotation
    beyond = rotation.for_length(49)
    assert torch.equal(beyond.inv_freq, long)
    assert beyond.for_length(10) is beyond
    plain = replace(rotation, long_inv_freq=None, original_length=None)
    assert plain.for_length(10_000) is plain


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_survives_copy_and_pickle(copied) -> None:
    rotation = rotation_of(24, 10, 14, "interleaved")
    again = copied(rotation)
    assert torch.equal(again.inv_freq, rotation.inv_freq)
    assert (again.head_dim, again.offset, again.pairing) == (24, 14, "interleaved")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inv_freq": torch.ones(2, 2), "head_dim": 8}, "`inv_freq` must be a non-empty vector"),
        ({"inv_freq": torch.ones(0), "head_dim": 8}, "`inv_freq` must be a non-empty vector"),
        ({"inv_freq": torch.ones(4), "head_dim": 8, "pairing": "thirds"}, r"`pairing` must be one of .*'thirds'"),
        ({"inv_freq": torch.ones(4), "head_dim": 6}, r"`head_dim` \(6\), got 0 \+ 8"),
        ({"inv_freq": torch.ones(4), "head_dim": 8, "offset": 1}, r"`head_dim` \(8\), got 1 \+ 8"),
        ({"inv_freq": torch.ones(2), "head_dim": 8, "offset": -1}, r"got -1 \+ 4"),
    ],
)
def test_impossible_rotations_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyRotation(**arguments)


def test_repr_names_pairing_and_width() -> None:
    assert repr(rotation_of(16, 16, 0, "half")) == "KeyRotation(half)"
    assert repr(rotation_of(16, 8, 0, "interleaved")) == "KeyRotation(interleaved, 8 of 16 channels)"
