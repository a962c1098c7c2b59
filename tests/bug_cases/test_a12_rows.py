"""A12: a row's result does not depend on what else is in the batch."""

import pytest
import torch
from harness import (
    Q,
    assert_close,
    dynamic_cache,
    forward,
    quant_cache,
    random_ids,
    random_states,
    settings,
    steady_model,
)
from tiny_models import tiny_model

VARIANTS = {
    "K4V4": Q,
    "K2V2": settings(2, 2),
    "per-token-keys": settings(key={"granularity": "per_token"}),
    "mse": settings(key={"clip": "mse"}, value={"clip": "mse"}),
    "symmetric": settings(key={"symmetric": True}, value={"symmetric": True}),
}
each_variant = pytest.mark.parametrize("quant", list(VARIANTS.values()), ids=list(VARIANTS))


@each_variant
def test_a12_row_alone_equals_row_in_batch(quant):
    model = steady_model()
    ids, token = random_ids(4, 70), random_ids(4, 1, seed=1)
    batch = quant_cache(model, quant)
    forward(model, ids, batch)
    together = forward(model, token, batch)
    for row in range(4):
        single = quant_cache(model, quant)
        forward(model, ids[row : row + 1], single)
        assert_close(together[row : row + 1], forward(model, token[row : row + 1], single), 1e-4, f"row {row}")


@each_variant
def test_a12_a_loud_neighbour_changes_nothing(quant):
    ids, token = random_ids(4, 70), random_ids(4, 1, seed=1)
    logits = []
    for loud in (False, True):
        model = tiny_model("llama")
        if loud:
            for layer in model.model.layers:
                for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                    projection.register_forward_hook(_louder)
        cache = quant_cache(model, quant)
        forward(model, ids, cache)
        logits.append(forward(model, token, cache))
    assert_close(logits[1][[0, 1, 3]], logits[0][[0, 1, 3]], 1e-6)
    assert (logits[1][2] - logits[0][2]).abs().max() > 0.1


def _louder(module, args, output):
    output = output.clone()
    output[2] *= 50
    return output


@each_variant
def test_a12_scales_never_cross_heads(quant):
    """One head a thousand times larger: the other head's stored values stay bit for bit the same."""
    model = tiny_model("llama", num_hidden_layers=1)
    keys, values = random_states(2, 2, 100, 16)
    results = []
    for factor in (1.0, 1000.0):
        scale = torch.tensor([1.0, factor])[None, :, None, None]
        cache = quant_cache(model, quant)
        cache.update(keys * scale, values * scale, 0)
        results.append([part[:, 0] for part in cache.dequantize(0)])
    for quiet, loud in zip(*results, strict=True):
        assert torch.equal(quiet, loud)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a12_dynamic_cache_itself_passes(rows):
    """The tolerance is not hiding anything: the reference moves less than it allows."""
    model = tiny_model("llama")
    ids, token = random_ids(4, 70), random_ids(4, 1, seed=1)
    batch, single = dynamic_cache(model), dynamic_cache(model)
    forward(model, ids, batch)
    forward(model, ids[:rows], single)
    assert_close(forward(model, token, batch)[:rows], forward(model, token[:rows], single), 1e-5)
