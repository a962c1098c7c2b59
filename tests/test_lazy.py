"""Lazy keys and values: what reads the codes, what makes them dense, what refuses."""

import copy

import pytest
import torch
from torch.nn import functional as F

import kvquant_hf.lazy as lazy_module
from kvquant_hf import LazyKV, StaleViewError
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.layer import QuantLayer


def updated(tokens: int = 90, new: int = 1, **settings) -> tuple[QuantLayer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = QuantLayer(KVQuantConfig().replace(**{"residual_length": 16} | settings))
    layer.update(torch.randn(2, 2, tokens, 16), torch.randn(2, 2, tokens, 16))
    return layer, *layer.update(torch.randn(2, 2, new, 16), torch.randn(2, 2, new, 16))


@pytest.fixture
def fused_calls(monkeypatch):
    """Shapes of the queries that reached the fused operation."""
    calls = []
    real = lazy_module.decode_attention

    def counted(query, *args):
        calls.append(tuple(query.shape))
        return real(query, *args)

    monkeypatch.setattr(lazy_module, "decode_attention", counted)
    return calls


def dense_attention(layer, query, **kwargs):
    return F.scaled_dot_product_attention(query, *layer.dequantize(), **kwargs)


def test_metadata_needs_no_numbers(monkeypatch):
    layer, keys, values = updated()
    monkeypatch.setattr(type(keys.view_of_cache), "dense", lambda self: pytest.fail("made dense"))
    for states in (keys, values):
        assert isinstance(states, LazyKV)
        assert isinstance(states, torch.Tensor)
        assert states.shape == (2, 2, 91, 16)
        assert states.size(-2) == 91
        assert states.dtype == torch.float32
        assert states.device == torch.device("cpu")
        assert states.ndim == 4
        assert not states.requires_grad
        assert "shape=(2, 2, 91, 16)" in repr(states)
    assert (keys.is_key, values.is_key) == (True, False)


def test_sdpa_reads_the_codes(fused_calls):
    layer, keys, values = updated()
    query = torch.randn(2, 2, 1, 16)
    output = F.scaled_dot_product_attention(query, keys, values)
    assert fused_calls == [(2, 2, 1, 16)]
    torch.testing.assert_close(output, dense_attention(layer, query))
    assert type(output) is torch.Tensor


def test_sdpa_with_grouped_heads_and_a_mask(fused_calls):
    layer, keys, values = updated()
    query = torch.randn(2, 6, 1, 16)
    mask = torch.rand(2, 1, 1, 91) > 0.5
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True, scale=0.3)
    assert fused_calls
    expected = dense_attention(layer, query, attn_mask=mask, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(output, expected)


def test_many_rows_share_one_dense_copy(fused_calls, monkeypatch):
    layer, keys, values = updated(new=40)
    view_type = type(keys.view_of_cache)
    made = []
    real = view_type.dense
    monkeypatch.setattr(view_type, "dense", lambda self: made.append(1) or real(self))
    query = torch.randn(2, 2, 40, 16)
    mask = torch.ones(40, 130, dtype=torch.bool).tril(90)
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    assert not fused_calls
    assert made == [1]
    torch.testing.assert_close(output, dense_attention(layer, query, attn_mask=mask))


@pytest.mark.parametrize("new", [2, 8, 9])
def test_sixteen_rows_a_head_are_the_limit(fused_calls, new):
    layer, keys, values = updated(new=new)
    mask = torch.ones(new, 90 + new, dtype=torch.bool).tril(90)
    F.scaled_dot_product_attention(torch.randn(2, 4, new, 16), keys, values, attn_mask=mask, enable_gqa=True)
    assert bool(fused_calls) == (2 * new <= 16)


def test_one_new_token_is_fused_whatever_the_number_of_query_heads(fused_calls):
    _, keys, values = updated()
    F.scaled_dot_product_attention(torch.randn(2, 2, 71, 16), keys, values)
    assert fused_calls


@pytest.mark.parametrize(
    "operation",
    [
        lambda k: k + 1,
        lambda k: k.transpose(-1, -2).contiguous(),
        lambda k: torch.cat([k, k], dim=2),
        lambda k: k[:, :, None].expand(2, 2, 3, 91, 16).reshape(2, 6, 91, 16),
        lambda k: k.repeat_interleave(2, 1),
        lambda k: torch.ones(2, 2, 1, 16) @ k.transpose(-1, -2),
        lambda k: torch.einsum("bhtd->bth", k),
        lambda k: k.float().to(torch.float64),
        lambda k: k[..., :5],
        lambda k: k.clone(),
        lambda k: k.sum().item(),
        lambda k: k.detach().numpy().sum(),
        lambda k: k.split(1, dim=1)[0],
        lambda k: torch.where(k > 0, k, 0.0),
    ],
)
def test_any_other_operation_sees_the_dense_tensor(operation):
    layer, keys, values = updated()
    for lazy, dense in zip((keys, values), layer.dequantize(), strict=True):
        got, expected = operation(lazy), operation(dense)
        torch.testing.assert_close(got, expected)
        assert not isinstance(got, LazyKV)


def test_dropout_and_causal_take_the_dense_path(fused_calls):
    _, keys, values = updated()
    F.scaled_dot_product_attention(torch.randn(2, 2, 1, 16), keys, values, dropout_p=0.5)
    F.scaled_dot_product_attention(torch.randn(2, 2, 91, 16), keys, values, is_causal=True)
    assert not fused_calls


def test_mixed_pairs_take_the_dense_path(fused_calls):
    layer, keys, values = updated()
    query = torch.randn(2, 2, 1, 16)
    output = F.scaled_dot_product_attention(query, values, keys)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, *reversed(layer.dequantize())))
    half = F.scaled_dot_product_attention(query, keys, layer.dequantize()[1])
    torch.testing.assert_close(half, dense_attention(layer, query))
    assert not fused_calls


def test_the_dense_backend_never_fuses(fused_calls):
    _, keys, values = updated(backend="dense")
    F.scaled_dot_product_attention(torch.randn(2, 2, 1, 16), keys, values)
    assert not fused_calls


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.update(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)),
        lambda layer: layer.crop(-1),
        lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
        lambda layer: layer.batch_select_indices(torch.tensor([0])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.reset(),
    ],
    ids=["update", "crop", "reorder", "select", "repeat", "reset"],
)
def test_reading_after_a_change_raises(change):
    layer, keys, values = updated()
    keys.to_dense()  # also what was already made
    change(layer)
    with pytest.raises(StaleViewError, match="after the cache had changed"):
        F.scaled_dot_product_attention(torch.randn(2, 2, 1, 16), keys, values)
    with pytest.raises(StaleViewError):
        keys + 1


def test_a_copy_of_the_layer_does_not_make_the_original_stale():
    layer, keys, _ = updated()
    copied = copy.deepcopy(layer)
    copied.update(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16))
    assert keys.to_dense().shape == (2, 2, 91, 16)


def test_gradients_reach_the_query():
    layer, keys, values = updated()
    query = torch.randn(2, 2, 1, 16, requires_grad=True)
    F.scaled_dot_product_attention(query, keys, values).sum().backward()
    fused = query.grad.clone()
    query.grad = None
    dense_attention(layer, query).sum().backward()
    torch.testing.assert_close(fused, query.grad)


def test_inference_mode_and_plain_calls_can_be_mixed():
    torch.manual_seed(0)
    layer = QuantLayer(KVQuantConfig(residual_length=0))
    with torch.inference_mode():
        layer.update(torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16))
    for _ in range(70):
        keys, values = layer.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
    F.scaled_dot_product_attention(torch.randn(1, 2, 1, 16, requires_grad=True), keys, values).sum().backward()
    with torch.inference_mode():
        keys, values = layer.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
        F.scaled_dot_product_attention(torch.randn(1, 2, 1, 16), keys, values)
    copy.deepcopy(layer)


@pytest.mark.parametrize("backend", ["auto", "torch", "dense"])
def test_no_query_gets_no_output(backend):
    layer, keys, values = updated(new=3, backend=backend)
    output = F.scaled_dot_product_attention(torch.randn(2, 2, 0, 16), keys, values)
    assert output.shape == (2, 2, 0, 16)
