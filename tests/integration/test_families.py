"""Every supported family: lossless equals `DynamicCache`, K4V4 runs on codes, constant key offsets cost nothing."""

import pytest
import torch
from harness import (
    CACHE_KW,
    Q,
    assert_close,
    assert_reported_bytes,
    dynamic_cache,
    each_attention,
    each_lossless,
    forward,
    kl,
    left_pad,
    model_or_skip,
    quant_cache,
    random_ids,
    roll,
    scored_chunk,
    settings,
)
from tiny_models import FAMILIES, tiny_model

REQUIRED = {
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3", "glm4", "cohere", "stablelm", "gpt_neox",
    "gpt2", "opt", "bloom", "gpt_oss", "smollm3", "falcon", "deepseek_v3",
}  # fmt: skip
NO_ROPE = {"gpt2", "opt", "bloom", "mpt", "falcon-alibi"}
# Every layer slides: refused, see A6.
REFUSED = {"mistral-sliding"}
SERVED = sorted(set(FAMILIES) - REFUSED)

each_family = pytest.mark.parametrize("family", SERVED)


def quantized_layers(cache):
    """Indices of the layers that hold codes."""
    kinds = getattr(cache, "layer_types", None) or []
    return [index for index, kind in enumerate(kinds) if kind == "full_attention"]


def cache_or_refusal(model, quant):
    """The cache of a model, or a skip if the family is refused; only DeepSeek's latent attention may be."""
    try:
        return quant_cache(model, quant)
    except ValueError as error:
        if model.config.model_type != "deepseek_v3":
            raise
        assert "latent" in str(error).lower() or "mla" in str(error).lower(), f"no reason given: {error}"
        pytest.skip(f"refused with a reason: {error}")


def test_all_required_families_are_here():
    missing = REQUIRED.difference(SERVED)
    assert not missing


@each_family
@each_attention
@each_lossless
class TestLossless:
    def test_equals_dynamic_cache(self, family, attention, lossless):
        model = model_or_skip(family, attention)
        ids, steps = random_ids(2, 50), random_ids(2, 12, seed=1)
        cache = cache_or_refusal(model, lossless)
        expected = roll(model, dynamic_cache(model), ids, steps)
        assert expected.std() > 0.3, "the model is too uniform to notice anything"
        assert_close(roll(model, cache, ids, steps), expected)

    def test_left_padded_equals_dynamic_cache(self, family, attention, lossless):
        model = model_or_skip(family, attention)
        ids, mask = left_pad(random_ids(2, 30), (11, 0))
        steps = random_ids(2, 6, seed=1)
        expected = roll(model, dynamic_cache(model), ids, steps, mask)
        assert_close(roll(model, cache_or_refusal(model, lossless), ids, steps, mask), expected)

    def test_generate_equals_plain(self, family, attention, lossless):
        model = model_or_skip(family, attention)
        ids = random_ids(2, 30)
        # MPT's config turns the cache off by default; a cache that is passed is then refused, see test_generation.
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "use_cache": True}
        cache = cache_or_refusal(model, lossless)
        assert torch.equal(model.generate(ids, **options, **{CACHE_KW: cache}), model.generate(ids, **options))
        assert cache.get_seq_length() == 41


@each_family
@each_attention
def test_k4v4_runs_on_codes(family, attention):
    ids = random_ids(4, 140)
    model = model_or_skip(family, attention)
    expected = scored_chunk(model, dynamic_cache(model), ids, prefill=100, step=20)
    measured = {}
    for bits in (4, 8):
        model = model_or_skip(family, attention)  # dynamic RoPE leaves a state behind in the model
        cache = cache_or_refusal(model, settings(bits, bits))
        measured[bits] = kl(expected, scored_chunk(model, cache, ids, prefill=100, step=20))
        layers = quantized_layers(cache)
        assert layers
        for index in layers:
            assert cache.get_seq_length(index) == 140
            assert cache.quantized_length(index) == 112
            assert not torch.isnan(cache.dequantize(index)[0]).any()
        assert_reported_bytes(cache)
        assert 0 < cache.memory_report().bits_per_value < 24
    assert 0 < measured[4] < 0.2, measured
    assert 0 < measured[8] < 0.02 * max(measured[4], 0.02), measured


@each_family
def test_k4v4_single_steps_run(family):
    model = tiny_model(family)
    cache = cache_or_refusal(model, Q)
    ids, steps = random_ids(2, 40), random_ids(2, 40, seed=1)
    logits = roll(model, cache, ids, steps)
    assert torch.isfinite(logits).all()
    model = tiny_model(family)
    assert kl(roll(model, dynamic_cache(model), ids, steps), logits) < 0.5
    for index in quantized_layers(cache):
        assert cache.quantized_length(index) == 48


# ---------------------------------------------------------------- constant offsets before RoPE

# Where the key of head 0 begins in the output of the projection that makes it.
FUSED = {
    "phi3": ("qkv_proj", 64),
    "phi3-longrope": ("qkv_proj", 64),
    "gpt_neox": ("query_key_value", 16),
    "bloom": ("query_key_value", 16),
    "falcon": ("query_key_value", 64),
    "falcon-alibi": ("query_key_value", 64),
    "gpt2": ("c_attn", 64),
    "mpt": ("Wqkv", 64),
    "codegen": ("qkv_proj", 32),
}
CHANNEL = 0  # rotates fastest in every family, by a radian per token, whichever channels form a pair
OFFSET = 300.0
PREFILL, CHUNK = 96, 32


def offset_model(family, offset, seed=0):
    """A tiny model with `offset` added to one key channel of every layer before RoPE, after any norm of the keys."""
    model = tiny_model(family, seed=seed)
    name, start = FUSED.get(family, (None, 0))
    modules = dict(model.named_modules())
    found = [key for key in modules if key.endswith(f".{name}")] if name else []
    for suffix in ("k_norm", "k_proj"):
        found = found or [key for key in modules if key.endswith(f".{suffix}")]
    assert len(found) == model.config.num_hidden_layers, found

    def shift(module, args, output):
        output = output.clone()
        output[..., start + CHANNEL] += offset
        return output

    for key in found:
        modules[key].register_forward_hook(shift)
    return model


class Offset:
    """Costs of 4-bit keys in one family, summed over models, without and with the offset.

    Attributes:
        kl: KL to `DynamicCache` by offset.
        control: KL of the model with the offset when its exact keys get the errors that quantization makes without
            it: what the sharper attention of that model makes of an unchanged quality of the keys.
        error: Root mean square error of the coded keys by offset.
    """

    def __init__(self, family, quant, seeds=3):
        self.kl, self.error, self.control = {0.0: 0.0, OFFSET: 0.0}, {0.0: 0.0, OFFSET: 0.0}, 0.0
        for seed in range(seeds):
            errors = {}
            for offset in self.kl:
                # Dynamic RoPE leaves a state behind in a model: each run has its own.
                reference, model = offset_model(family, offset, seed), offset_model(family, offset, seed)
                ids = random_ids(6, PREFILL + CHUNK, seed)
                exact, cache = dynamic_cache(reference), quant_cache(model, quant)
                expected = scored_chunk(reference, exact, ids, PREFILL, CHUNK)
                self.kl[offset] += kl(expected, scored_chunk(model, cache, ids, PREFILL, CHUNK))
                assert torch.isfinite(expected).all()
                first = quantized_layers(cache)[0]
                coded = slice(4, 4 + cache.quantized_length(first))
                difference = (cache.dequantize(first)[0] - exact.layers[first].keys)[:, :, coded]
                self.error[offset] += difference.square().mean().sqrt().item()
                errors = errors or {
                    index: (cache.dequantize(index)[0] - exact.layers[index].keys)[:, :, :PREFILL]
                    for index in quantized_layers(cache)
                }
            self.control += kl(expected, self.disturbed(family, seed, ids, errors))

    def disturbed(self, family, seed, ids, errors):
        """Logits of the model with the offset whose exact prefill keys are changed by `errors`."""
        model = offset_model(family, OFFSET, seed)
        cache = dynamic_cache(model)
        forward(model, ids[:, :PREFILL], cache)
        for index, error in errors.items():
            cache.layers[index].keys = cache.layers[index].keys + error
        return forward(model, ids[:, PREFILL:], cache)


def is_pre_rope(family):
    """Whether the cache claims, layer by layer, that quantized keys are stored as they were before any rotation."""
    text = repr(quant_cache(tiny_model(family)))
    return "post-RoPE" not in text


@pytest.mark.parametrize("family", [name for name in SERVED if name != "deepseek_v3"])
def test_the_offset_hook_moves_one_key_channel(family):
    """The hook does what the next test needs: at position 0, where no rotation acts, one channel is shifted."""
    ids = random_ids(1, 1)
    keys = []
    for offset in (0.0, OFFSET):
        model = offset_model(family, offset)
        cache = dynamic_cache(model)
        forward(model, ids, cache)
        keys.append(cache.layers[0].keys[0, 0, 0])
    moved = (keys[1] - keys[0]).abs()
    assert moved[CHANNEL] > 0.8 * OFFSET
    moved[CHANNEL] = 0
    assert moved.max() < 1e-2


@pytest.mark.parametrize("family", [name for name in SERVED if name != "deepseek_v3"])
def test_a_constant_key_offset_costs_nothing(family):
    assert is_pre_rope(family), repr(quant_cache(tiny_model(family)))
    cost = Offset(family, settings(4, 16))
    assert cost.error[OFFSET] <= 1.1 * cost.error[0.0], cost.error
    # The offset also sharpens attention, to which some families react more strongly than others: the control knows.
    assert cost.kl[OFFSET] <= 1.5 * max(cost.kl[0.0], cost.control), (cost.kl, cost.control)


@pytest.mark.parametrize("family", sorted(set(SERVED) - NO_ROPE - {"deepseek_v3"}))
def test_the_offset_measure_sees_rotated_storage(family):
    """The same measure on keys quantized after RoPE: it must fail there, or it proves nothing."""
    cost = Offset(family, settings(4, 16, key={"rope": "post"}), seeds=2)
    assert cost.error[OFFSET] > 1.5 * cost.error[0.0], cost.error
    if family in ("llama", "qwen2", "cohere", "phi3", "falcon"):
        assert cost.kl[OFFSET] > 1.5 * max(cost.kl[0.0], cost.control), (cost.kl, cost.control)


@pytest.mark.parametrize("family", sorted(NO_ROPE))
def test_families_without_rope_say_so(family):
    text = repr(quant_cache(tiny_model(family)))
    assert "pre-RoPE" not in text and "post-RoPE" not in text, text
    assert "no rotary" in text.lower(), text
