"""A3: only what exceeds sinks and window is quantized; sinks stay exact; the window is bounded."""

import pytest
import torch
from harness import (
    GROUP,
    Q,
    assert_close,
    dynamic_cache,
    exact_tokens,
    expected_quantized,
    forward,
    probe,
    quant_cache,
    random_ids,
    random_states,
    reachable_storages,
    settings,
)
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=1)


def filled(model, quant, length):
    ids = random_ids(2, length)
    expected, actual = dynamic_cache(model), quant_cache(model, quant)
    forward(model, ids, expected)
    forward(model, ids, actual)
    return expected, actual


def test_a03_window_longer_than_the_prompt_protects_all_of_it(model):
    expected, actual = filled(model, settings(residual=32), 10)
    token = torch.full((2, 1), 9)
    assert_close(forward(model, token, actual), forward(model, token, expected), 1e-5)
    assert actual.quantized_length(0) == 0


@pytest.mark.parametrize("sinks", [0, 1, 4, 5, 16])
@pytest.mark.parametrize("residual", [0, 1, 16, 17])
@pytest.mark.parametrize("length", [50, 200, 400])
def test_a03_exactly_the_promised_tokens_are_exact(model, sinks, residual, length):
    quant = settings(sinks=sinks, residual=residual)
    expected, actual = filled(model, quant, length)
    quantized = expected_quantized(length, sinks=sinks, residual=residual)
    assert actual.quantized_length(0) == quantized
    assert residual <= length - sinks - quantized <= residual + GROUP - 1
    for name, true, mine, read in zip(
        ("keys", "values"),
        (expected.layers[0].keys, expected.layers[0].values),
        actual.dequantize(0),
        read_by_the_last_token(model, quant, length),
        strict=True,
    ):
        assert_close(read, mine, 1e-5, f"{name}: what attention reads and `dequantize`")
        exact = exact_tokens(mine, true)
        assert exact[:sinks].all(), f"{name}: sinks are not exact"
        assert exact[sinks + quantized :].all(), f"{name}: the window is not exact"
        error = (mine - true)[:, :, sinks : sinks + quantized].abs().amax(dim=(0, 1, 3))
        assert error.min() > 1e-3, f"{name}: tokens that count as quantized are exact"
        assert error.max() < 0.2 * true.abs().max() + 0.2, f"{name}: error out of any 4-bit bound"


def read_by_the_last_token(model, quant, length):
    """Keys and values attention receives for the last of the `length` tokens of `filled`."""
    ids = random_ids(2, length)
    cache = quant_cache(model, quant)
    forward(model, ids[:, :-1], cache)
    return probe(model, cache, ids[:, -1:])[0]


def test_a03_sinks_stay_exact_for_ever(model):
    expected, actual = filled(model, Q, 60)
    for token in random_ids(2, 300, seed=3).split(1, dim=1):
        forward(model, token, expected)
        forward(model, token, actual)
    assert actual.quantized_length(0) == expected_quantized(360)
    for true, mine in zip(probe(model, expected)[0], probe(model, actual)[0], strict=True):
        assert exact_tokens(mine, true)[:4].all()


def test_a03_exact_incoming_states_are_used_while_prefilling(model):
    """The logits of a prompt fed to an empty cache come from its exact keys and values."""
    ids = random_ids(2, 200)
    assert_close(forward(model, ids, quant_cache(model)), forward(model, ids, dynamic_cache(model)), 1e-6)


def test_a03_prefill_tensors_do_not_survive(model):
    """Nothing the cache keeps is a view into the prompt's keys and values."""
    keys, values = random_states(1, 2, 400, 16)
    cache = quant_cache(model)
    cache.update(keys, values, 0)
    held = reachable_storages(cache)
    assert keys.untyped_storage().data_ptr() not in held
    assert values.untyped_storage().data_ptr() not in held
    before = [part.clone() for part in cache.dequantize(0)]
    keys.fill_(1e4)
    values.fill_(1e4)
    for first, second in zip(before, cache.dequantize(0), strict=True):
        assert torch.equal(first, second)
