"""Block and token buffers against plain Python lists."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant_hf.spec import QuantSpec
from kvquant_hf.storage import BlockStore
from kvquant_hf.window import ExactTokens

B, H, L = 2, 3, 16

SPECS = [
    QuantSpec(nbits=nbits, granularity=granularity, group_size=16, rotation=rotation, symmetric=symmetric)
    for nbits in (2, 3, 4, 8)
    for granularity in ("per_channel", "per_token")
    for rotation, symmetric in (("none", False), ("hadamard", True))
]
SPECS += [
    QuantSpec(nbits, granularity, 16, rotation=rotation, symmetric=symmetric, method="variance_normalized")
    for nbits in (2, 8)
    for granularity in ("per_channel", "per_token")
    for rotation, symmetric in (("none", False), ("hadamard", True))
]
SPECS += [
    QuantSpec(nbits, granularity, 16, symmetric=symmetric, **method)
    for nbits in (2, 8)
    for granularity in ("per_channel", "per_token")
    for symmetric in (False, True)
    for method in ({"method": "innerq"}, {"outliers": 0.02})
]
SPECS += [
    QuantSpec(nbits, granularity, 16, rotation=rotation, symmetric=symmetric, metadata_nbits=8)
    for nbits in (2, 8)
    for granularity in ("per_channel", "per_token")
    for rotation, symmetric in (("none", False), ("hadamard", True))
]
SPECS += [
    QuantSpec(3, "per_channel", 16, levels="gaussian", clip="mse"),
    QuantSpec(2, "per_token", 16, rotation="hadamard", symmetric=True, levels="laplace"),
    QuantSpec(4, "per_token", 16, symmetric=True, levels="e2m1"),
    QuantSpec(4, "per_token", 16, symmetric=True, levels="e2m1", metadata_nbits=8),
    QuantSpec(4, "per_channel", 16, symmetric=True, levels="e2m1", metadata_nbits=8, clip="mse"),
    QuantSpec(2, "per_channel", 16, outliers=0.02, levels=(-0.9, -0.2, 0.3, 1.0)),
    QuantSpec(2, "per_token", 16, rotation="hadamard", symmetric=True, clip="mse", levels=(-1.0, -0.3, 0.3, 1.0)),
    QuantSpec(3, "per_token", 128, rotation="hadamard", symmetric=True, levels="gaussian", method="turboquant"),
    QuantSpec(3, "per_token", 128, rotation="hadamard", symmetric=True, levels="gaussian", method="turboquant_prod"),
    QuantSpec(2, "per_token", 16, rotation="hadamard", symmetric=True, levels="gaussian", method="turboquant_prod"),
]
SPECS += [
    QuantSpec(nbits, granularity, 16, clip=clip, shared_groups=2, shared_parameter=parameter)
    for nbits in (2, 8)
    for granularity in ("per_channel", "per_token")
    for parameter, clip in (("scale", "minmax"), ("zero_point", "mse"))
]
SPECS += [QuantSpec(nbits=16)]


def spec_id(spec: QuantSpec) -> str:
    return str(spec).replace(" ", "-")


def blocks_of(count: int, head_dim: int, seed: int) -> torch.Tensor:
    return torch.randn(B, H, count, L, head_dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("head_dim", [16, 24, 40, 80])
@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_growth_changes_no_earlier_value(spec, head_dim):
    """Blocks read back the same however they were appended, and as long as the store lives."""
    data = blocks_of(7, head_dim, seed=0)
    at_once = BlockStore(spec, L, head_dim, torch.float32)
    at_once.append(at_once.encode(data), spare=False)
    one_by_one = BlockStore(spec, L, head_dim, torch.float32)
    for i in range(7):
        one_by_one.append(one_by_one.encode(data[:, :, i : i + 1]))
        assert torch.equal(one_by_one.read(0, i + 1), at_once.read(0, i + 1))
    if spec.is_quantized:
        step = 2 * data.abs().max() * (head_dim**0.5 if spec.rotation == "hadamard" else 1)
        assert (at_once.read(0, 7) - data).abs().max() < step
        assert not torch.equal(at_once.read(0, 7), data)
        if spec.nbits == 8:
            assert (at_once.read(0, 7) - data).abs().max() < 0.03 * data.abs().max()
    else:
        assert torch.equal(at_once.read(0, 7), data)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_reported_bytes_are_the_storages(spec):
    store = BlockStore(spec, L, 32, torch.bfloat16)
    for i in range(9):
        store.append(store.encode(blocks_of(1, 32, seed=i)))
        parts = store.tensors()
        held = sum(t.untyped_storage().nbytes() for t in parts)
        assert sum(store.bytes_by_part().values()) == held
    values = B * H * 9 * L * 32
    assert store.bytes_by_part()["codes"] == values * spec.nbits // 8
    assert (store.factor is not None) == spec.has_factor
    if store.factor is not None:
        assert store.bytes_by_part()["scales"] == 2 * B * H * 9 * (
            store.scale[0, 0, 0].numel() + store.factor.shape[3]
        )


def test_scales_widen_without_changing_what_is_stored():
    store = BlockStore(QuantSpec(nbits=4, group_size=16), L, 16, torch.float32)
    store.append(store.encode(blocks_of(2, 16, seed=0)))
    before = store.read(0, 2).clone()
    assert store.scale.dtype == torch.float16
    store.append(store.encode(1e6 * blocks_of(1, 16, seed=1)))
    assert store.scale.dtype == torch.float32
    assert torch.equal(store.read(0, 2), before)
    store.append(store.encode(blocks_of(1, 16, seed=2)))
    assert store.scale.dtype == torch.float32
    assert torch.isfinite(store.read(0, 4)).all()


def test_factors_widen_without_changing_what_is_stored():
    """No method stores float32 factors yet; the format has room for them."""
    spec = QuantSpec(nbits=4, group_size=16, method="variance_normalized")
    store = BlockStore(spec, L, 16, torch.float32)
    store.append(store.encode(blocks_of(2, 16, seed=0)))
    before = store.read(0, 2).clone()
    assert store.factor.dtype == torch.float16
    wide = store.encode(blocks_of(1, 16, seed=1))
    wide.factor = 1e6 * wide.factor.float()
    store.append(wide)
    assert (store.factor.dtype, store.scale.dtype) == (torch.float32, torch.float16)
    assert torch.equal(store.read(0, 2), before)
    assert store.read(2, 3).abs().max() > 1e5


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 70)),
        st.tuples(st.just("drop_front"), st.integers(0, 40)),
        st.tuples(st.just("truncate"), st.integers(0, 120)),
        st.tuples(st.just("replace"), st.integers(1, 50)),
        st.tuples(st.just("reorder"), st.integers(0, 1)),
    ),
    max_size=25,
)


@settings(max_examples=80, deadline=None)
@given(actions=ACTIONS, limit=st.sampled_from([None, 48]))
def test_exact_tokens_behave_like_a_list(actions, limit):
    window, plain, counter = ExactTokens(limit), [], 0
    for action, number in actions:
        if action in ("append", "replace"):
            new = torch.arange(counter, counter + number).float()[None, None, :, None].expand(2, 1, -1, 2)
            getattr(window, action)(new)
            plain = (plain if action == "append" else []) + list(range(counter, counter + number))
            counter += number
        elif action == "drop_front" and number <= len(plain) and plain:
            window.drop_front(number)
            plain = plain[number:]
        elif action == "truncate":
            window.truncate(number)
            plain = plain[:number]
        elif action == "reorder":
            window.map(lambda t: t.flip(0))
        held = window.view()
        assert (held is None and not plain) or held[0, 0, :, 0].tolist() == plain
        assert window.bytes_used() <= window.bytes_held()


def test_buffers_grow_rarely_and_waste_little():
    window = ExactTokens()
    storages = set()
    for _ in range(4096):
        window.append(torch.zeros(1, 1, 1, 8))
        storages.add(window.buffer.data_ptr())
    assert len(storages) < 120
    assert window.bytes_held() < 1.1 * window.bytes_used()


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_state_round_trip_and_damage(spec):
    store = BlockStore(spec, L, 24, torch.float32)
    store.append(store.encode(blocks_of(3, 24, seed=0)))
    state = store.state()
    other = BlockStore(spec, L, 24, torch.float32)
    other.load_state(state)
    assert torch.equal(other.read(0, 3), store.read(0, 3))
    damaged = copy.copy(state)
    damaged["codes"] = damaged["codes"][..., :-1]
    with pytest.raises(ValueError, match="stored `codes` must have the shape"):
        BlockStore(spec, L, 24, torch.float32).load_state(damaged)
    for name in set(state) - {"codes"}:
        with pytest.raises(ValueError, match=f"stored `{name}` must have the shape"):
            BlockStore(spec, L, 24, torch.float32).load_state(state | {name: state[name][..., :-1]})
        with pytest.raises(ValueError, match="stored blocks must have the tensors"):
            BlockStore(spec, L, 24, torch.float32).load_state({k: t for k, t in state.items() if k != name})
    with pytest.raises(ValueError, match="stored blocks must have the tensors"):
        BlockStore(spec, L, 24, torch.float32).load_state({"scale": state["codes"]})
