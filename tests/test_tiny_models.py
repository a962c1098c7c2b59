"""The tiny models must be worth testing with: a cache bug has to show in their logits."""

import math

import pytest
import torch
from tiny_models import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE, tiny_model

NUM_TOKENS = 60


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_not_uniform_and_logits_spread(family: str) -> None:
    model = tiny_model(family, attn_implementation="eager")
    ids = torch.randint(3, VOCAB_SIZE, (2, NUM_TOKENS))
    with torch.no_grad():
        out = model(input_ids=ids, output_attentions=True)
    assert out.logits.shape == (2, NUM_TOKENS, VOCAB_SIZE)
    assert out.logits.isfinite().all()
    assert out.logits.std() > 1.0
    weights = out.attentions[0][:, :, -1].double()
    # A sink takes the rest of the weight in gpt-oss.
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(dim=-1).mean()
    assert entropy < 0.95 * math.log(NUM_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_and_settings(family: str) -> None:
    model = tiny_model(family)
    config = model.config
    assert config.hidden_size == HIDDEN_SIZE
    assert config.num_hidden_layers == (4 if family in {"gemma2", "gemma3", "gpt_oss", "smollm3"} else 2)
    assert config.num_attention_heads == 4
    assert config.eos_token_id is None and model.generation_config.eos_token_id is None
    assert model.generation_config.pad_token_id == 0
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_seed_decides_the_weights_and_the_global_random_state_stays() -> None:
    state = torch.get_rng_state()
    first, again, other = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in first.named_parameters():
        assert torch.equal(weight, again.get_parameter(name))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mpt"])
def test_overrides_change_single_fields(family: str) -> None:
    assert tiny_model(family, num_hidden_layers=1).config.num_hidden_layers == 1
    assert tiny_model(family, attn_implementation="eager").config._attn_implementation == "eager"
