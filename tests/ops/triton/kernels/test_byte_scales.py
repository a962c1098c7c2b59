"""The decode kernels on values whose scales are bytes, against the float32 twin."""

import pytest
import torch

from kvquant_hf.ops.triton import WordLayout
from tests.ops.triton.kernels.test_decode import BF16, F32, WIDE, check, promoted, rope

BYTES = {"symmetric": True, "metadata_nbits": 8}
TURNED = {**BYTES, "rotation": "hadamard", "clip": "mse"}


def values(nbits: int, group: int, **more) -> dict:
    """Keys in groups of 32, so that blocks have 32 tokens."""
    return {"value": {"nbits": nbits, "group_size": group, **BYTES, **more}}


# id, tokens, then what differs from one row, two heads, one query head each, D 32, float16, RoPE over the whole head.
CASES = [
    ("v2-group-32-d64", 133, {**values(2, 32), "D": 64}),
    ("v3-group-64-d64", 133, {**values(3, 64), "D": 64, "dtype": BF16}),
    ("v4-group-128-d64", 133, {**values(4, 128), "D": 64}),
    ("v8-group-32-d64", 133, {**values(8, 32), "D": 64}),
    ("v2-group-64-d96", 133, {**values(2, 64), "D": 96}),
    ("v3-group-32-d96", 133, {**values(3, 32), "D": 96, "H": 1}),
    ("v4-group-64-d96-hadamard", 133, {**values(4, 64, rotation="hadamard"), "D": 96, "dtype": BF16}),
    ("v8-group-128-d96", 133, {**values(8, 128), "D": 96, "H": 1}),
    ("v2-group-128-d128", 133, {**values(2, 128), "D": 128, "H": 1}),
    ("v3-group-32-d128", 133, {**values(3, 32), "D": 128, "H": 1}),
    ("v4-group-64-d128-hadamard", 133, {**values(4, 64, rotation="hadamard"), "D": 128, "dtype": BF16}),
    ("v8-group-32-d128", 133, {**values(8, 32), "D": 128, "H": 1}),
    ("v2-group-64-d256-hadamard", 100, {**values(2, 64, rotation="hadamard"), "D": 256, "H": 1}),
    ("v3-group-128-d256", 100, {**values(3, 128), "D": 256, "H": 1}),
    ("v4-group-32-d256", 100, {**values(4, 32), "D": 256, "H": 1, "dtype": BF16}),
    ("v8-group-64-d256", 100, {**values(8, 64), "D": 256, "H": 1}),
    ("v4-group-16-d16", 133, {**values(4, 16), "D": 16}),
    ("k2v2-d64", 300, {**promoted(2, 0.25, 2, 64, **TURNED), "D": 64, "launch": WIDE, "B": 2, "H": 1}),
    ("k2v3-d96", 220, {**promoted(2, 0.5, 3, 64, **TURNED), "D": 96, "rotation": rope(96, 96), "H": 1}),
    ("k3v4-d128", 220, {**promoted(3, 0.25, 4, 64, **TURNED), "D": 128, "launch": WIDE, "H": 1, "dtype": BF16}),
    ("k4pv8-d256", 100, {**promoted(4, 0.25, 8, 32, **TURNED), "D": 256, "H": 1}),
    ("promoted-blocks-of-128", 420, {**promoted(2, 0.25, 4, 128, **BYTES), "D": 64, "launch": WIDE, "H": 1, "sm": 5}),
    ("promoted-padded", 150, {**promoted(2, 0.25, 3, **BYTES), "B": 3, "padding": [37, 2, 0], "mask": "pads"}),
    ("promoted-many-rows", 133, {**promoted(2, 0.25, 3, **BYTES), "G": 5, "q_len": 8, "mask": "causal", "H": 1}),
    ("k16", 133, {"key": {"nbits": 16}, **values(4, 32), "dtype": F32}),
    ("tiles-no-longer-than-blocks", 179, {**values(4, 32), "B": 2, "launch": WIDE}),
    ("other-value-size", 133, {**values(3, 32), "D": 64, "DV": 48}),
    ("many-splits", 700, {**values(4, 32), "H": 1, "sm": 9}),
    ("only-window", 19, values(4, 32)),
    ("bool-mask", 133, {**values(2, 32), "B": 2, "G": 2, "mask": "bool", "q_len": 2}),
    ("additive-mask", 133, {**values(8, 32), "B": 2, "G": 2, "mask": "additive", "dtype": BF16}),
    ("one-token-only", 133, {**values(4, 32), "mask": "one"}),
    ("padded", 150, {**values(4, 32), "B": 2, "padding": [101, 0], "mask": "pads"}),
]


@pytest.mark.parametrize(("tokens", "shape"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_decode_against_the_twin(tokens, shape, device, monkeypatch):
    case = check(tokens, device, monkeypatch, **shape)
    store = case.view.value_store
    assert isinstance(store.own_layout, WordLayout)
    assert store.metadata is None or store.metadata.dtype == torch.uint8


@pytest.mark.parametrize("name", ["v2-group-32-d64", "v3-group-32-d96", "v8-group-32-d128", "k2v2-d64", "padded"])
def test_the_path_without_ptx(name, device, monkeypatch):
    tokens, shape = next(case[1:] for case in CASES if case[0] == name)
    check(tokens, device, monkeypatch, ptx=False, **shape)


@pytest.mark.parametrize("mask", [None, "fifths"])
@pytest.mark.parametrize(("nbits", "faint"), [(2, 2.0**-15), (3, 2.0**-10), (4, 2.0**-15), (8, 2.0**-11)])
def test_coarse_blocks(nbits, faint, mask, device, monkeypatch):
    """Every fifth token is faint; also where nothing else is attended to, their scales are precise enough."""
    shape = {**values(nbits, 32), "D": 64, "H": 1, "faint": faint, "mask": mask, "dtype": F32}
    store = check(133, device, monkeypatch, **shape).view.value_store
    assert (store.second_level[:, :, : store.num_blocks] < 0).all()


@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_groups_of_zeros(nbits, device, monkeypatch):
    shape = {**promoted(2, 0.25, nbits, 32, **BYTES), "faint": 0.0, "sink_length": 0, "residual_length": 0, "H": 1}
    store = check(128, device, monkeypatch, **shape).view.value_store
    assert (store.metadata[:, :, : store.num_blocks].flatten(2, 3)[:, :, ::5] == 0).all()
    assert (store.second_level[:, :, : store.num_blocks] > 0).all()
    check(128, device, monkeypatch, **shape | {"mask": "fifths"})


@pytest.mark.parametrize("nbits", [2, 8])
@pytest.mark.parametrize("magnitude", [1e-15, 1e-7, 1e8, 1e15])
def test_bases_in_float32(nbits, magnitude, device, monkeypatch):
    """One head in numbers that float16 does not hold, the other one as usual: both are read as precisely as ever."""
    shape = {**values(nbits, 32), "D": 64, "value_magnitude": magnitude, "dtype": F32}
    store = check(133, device, monkeypatch, **shape).view.value_store
    assert store.second_level.dtype == torch.float32 and isinstance(store.own_layout, WordLayout)
