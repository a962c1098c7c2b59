"""Every generation feature of Transformers on a quantized cache, and refusals where it would corrupt silently."""

import copy

import pytest
import torch
from harness import (
    CACHE_KW,
    GENERATE_KWS,
    LOSSLESS,
    PASSES_POSITIONS,
    Q,
    assert_close,
    assert_same_content,
    dynamic_cache,
    each_attention,
    each_lossless,
    expected_quantized,
    forward,
    left_pad,
    quant_cache,
    random_ids,
    settings,
    steady_model,
)
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.streamers import BaseStreamer

NEW = 24
PROMPT = 60


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def generate(model, ids, cache=None, mask=None, keyword=CACHE_KW, seed=0, **options):
    """`model.generate` with a seeded sampler; greedy unless told otherwise."""
    torch.manual_seed(seed)
    if cache is not None:
        options[keyword] = cache
    if ids is not None:
        mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": mask, **options}
    return model.generate(ids, **options)


MODES = {
    "greedy": {},
    "greedy-one-token": {"max_new_tokens": 1},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3},
    "beam-sampling": {"num_beams": 3, "do_sample": True},
    "several-sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams-and-sequences": {"num_beams": 4, "num_return_sequences": 2},
    "chunked-prefill": {"prefill_chunk_size": 17},
    "chunked-prefill-beams": {"prefill_chunk_size": 17, "num_beams": 2},
    "repetition-penalty": {"repetition_penalty": 1.3},
    "min-length": {"min_new_tokens": 10},
    "all-outputs": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}
each_mode = pytest.mark.parametrize("options", list(MODES.values()), ids=list(MODES))


def sequences(out):
    return out if isinstance(out, torch.Tensor) else out.sequences


class TestModes:
    @each_mode
    @each_lossless
    def test_lossless_equals_plain_generate(self, model, options, lossless):
        ids = random_ids(2, PROMPT)
        expected = generate(model, ids, **options)
        cache = quant_cache(model, lossless)
        actual = generate(model, ids, cache, **options)
        assert torch.equal(sequences(actual), sequences(expected))
        assert cache.get_seq_length() == PROMPT + options.get("max_new_tokens", NEW) - 1

    @each_mode
    @each_attention
    def test_quantized_runs_and_holds_codes(self, options, attention):
        model = tiny_model("llama", attn_implementation=attention)
        ids = random_ids(2, PROMPT)
        cache = quant_cache(model)
        out = generate(model, ids, cache, **{**options, "return_dict_in_generate": True, "output_logits": True})
        new = options.get("max_new_tokens", NEW)
        rows = 2 * options.get("num_return_sequences", 1)
        assert out.sequences.shape == (rows, PROMPT + new)
        assert all(torch.isfinite(step).all() for step in out.logits)
        assert getattr(out, CACHE_KW) is cache
        assert cache.quantized_length(0) == expected_quantized(PROMPT + new - 1)

    @each_mode
    @each_lossless
    @pytest.mark.parametrize("pads", [(25, 7), (0, 40)], ids=str)
    def test_lossless_left_padded_batch(self, model, options, lossless, pads):
        ids, mask = left_pad(random_ids(2, PROMPT), pads)
        expected = generate(model, ids, mask=mask, **options)
        cache = quant_cache(model, lossless)
        assert torch.equal(sequences(generate(model, ids, cache, mask, **options)), sequences(expected))


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("keyword", GENERATE_KWS)
@pytest.mark.parametrize("quant", [Q, LOSSLESS["16-bit"]], ids=["K4V4", "16-bit"])
def test_each_keyword(model, keyword, quant):
    ids = random_ids(2, PROMPT)
    first, second = quant_cache(model, quant), quant_cache(model, quant)
    assert torch.equal(generate(model, ids, first, keyword=keyword), generate(model, ids, second))
    assert first.get_seq_length() == PROMPT + NEW - 1


def test_quantized_generation_repeats_itself(model):
    ids = random_ids(3, PROMPT)
    for options in MODES.values():
        runs = [sequences(generate(model, ids, quant_cache(model), **options)) for _ in range(2)]
        assert torch.equal(*runs)


def test_eight_bits_follow_greedy(model):
    """K8V8 greedy decoding agrees with plain decoding on most tokens of a random model."""
    agreed = total = 0
    for seed in range(4):
        ids = random_ids(2, PROMPT, seed)
        expected = generate(model, ids)[:, PROMPT:]
        actual = generate(model, ids, quant_cache(model, settings(8, 8)))[:, PROMPT:]
        first_split = ((expected != actual).long().cumsum(1) == 0).sum().item()
        agreed, total = agreed + first_split, total + expected.numel()
    assert agreed >= 0.6 * total, (agreed, total)


# ---------------------------------------------------------------- assisted decoding


ASSISTED = {
    "prompt-lookup": lambda: {"prompt_lookup_num_tokens": 4},
    "assistant": lambda: {"assistant_model": tiny_model("llama", seed=1, num_hidden_layers=1)},
    "assistant-is-the-model": lambda: {"assistant_model": tiny_model("llama")},
}


@pytest.mark.parametrize("make", list(ASSISTED.values()), ids=list(ASSISTED))
class TestAssisted:
    @each_lossless
    @each_attention
    def test_lossless_equals_greedy(self, make, lossless, attention):
        model = tiny_model("llama", attn_implementation=attention)
        ids = random_ids(1, 12).repeat(1, 4)
        cache = quant_cache(model, lossless)
        assert torch.equal(generate(model, ids, cache, **make()), generate(model, ids))
        assert cache.get_seq_length() == 48 + NEW - 1

    def test_quantized_runs(self, model, make):
        ids = random_ids(1, 12).repeat(1, 4)
        cache = quant_cache(model)
        out = generate(model, ids, cache, **make())
        assert out.shape == (1, 48 + NEW)
        assert cache.get_seq_length() == 48 + NEW - 1
        assert cache.quantized_length(0) > 0

    @pytest.mark.parametrize("prefix", [1, 30])
    def test_a_reused_prefix_is_refused(self, model, make, prefix):
        """Transformers would feed the whole prompt on top of the prefix; verified wrong with its own cache."""
        ids = random_ids(1, 12).repeat(1, 4)
        cache = quant_cache(model)
        forward(model, ids[:, :prefix], cache)
        with pytest.raises(ValueError, match=r"(?i)assist|speculat"):
            generate(model, ids, cache, **make())
        assert cache.get_seq_length() == prefix


# ---------------------------------------------------------------- prefixes and turns


@each_lossless
@pytest.mark.parametrize("prefix", [1, 20, 47, PROMPT - 1])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left-padded"])
def test_prefix_reuse_by_deepcopy(model, lossless, prefix, padded):
    """One prefix, three prompts, each on its own copy; full ids and full mask are given to `generate`."""
    ids, mask = random_ids(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    if padded:
        ids, mask = left_pad(ids, (15, 0))
    shared = quant_cache(model, lossless)
    if padded:
        shared.set_padding(mask[:, :prefix])
    forward(model, ids[:, :prefix], shared, mask[:, :prefix])
    for seed in range(3):
        prompt = ids.clone()
        prompt[:, max(prefix, 15) :] = random_ids(2, PROMPT, seed + 5)[:, max(prefix, 15) :]
        expected = generate(model, prompt, mask=mask)
        assert torch.equal(generate(model, prompt, copy.deepcopy(shared), mask), expected)
    assert shared.get_seq_length() == prefix


@pytest.mark.parametrize("prefix", [30, 47])
def test_quantized_prefix_reuse_equals_the_same_cache_used_directly(model, prefix):
    ids = random_ids(2, PROMPT)
    shared = quant_cache(model)
    forward(model, ids[:, :prefix], shared)
    first = generate(model, ids, copy.deepcopy(shared))
    second = generate(model, ids, copy.deepcopy(shared))
    assert torch.equal(first, second)
    fresh = quant_cache(model)
    forward(model, ids[:, :prefix], fresh)
    assert torch.equal(generate(model, ids, fresh), first)
    assert_same_content(shared, _after(model, ids[:, :prefix]))


def _after(model, ids, quant=Q):
    cache = quant_cache(model, quant)
    forward(model, ids, cache)
    return cache


@each_lossless
@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=["beams", "sequences"]
)
def test_prefix_reuse_by_repeat_interleave(model, lossless, options):
    ids = random_ids(2, PROMPT)
    shared = _after(model, ids[:, :40], lossless)
    shared.batch_repeat_interleave(3)
    assert torch.equal(generate(model, ids, shared, **options), generate(model, ids, **options))


def test_prefix_of_the_wrong_batch_size_is_refused(model):
    """Without `batch_repeat_interleave` the rows do not fit; that must not broadcast silently."""
    ids = random_ids(2, PROMPT)
    shared = _after(model, ids[:1, :40])
    with pytest.raises((ValueError, RuntimeError)):
        generate(model, ids, shared)


@each_lossless
@pytest.mark.parametrize("chunk", [5, 16, 200])
def test_prefix_reuse_with_chunked_prefill_is_right_or_refused(model, lossless, chunk):
    ids = random_ids(2, PROMPT)
    shared = _after(model, ids[:, :40], lossless)
    expected = generate(model, ids)
    try:
        actual = generate(model, ids, shared, prefill_chunk_size=chunk)
    except ValueError as error:
        assert "prefill_chunk_size" in str(error)
        assert shared.get_seq_length() == 40
        return
    assert torch.equal(actual, expected)


@each_lossless
@pytest.mark.parametrize("give", ["full-ids", "new-ids"])
def test_conversation_equals_dynamic_cache(model, lossless, give):
    """Three turns that keep everything: prompts grow by the answer and a question; all ids or the new ones are fed."""

    def talk(cache):
        history, answers = random_ids(2, 40), []
        for turn in range(3):
            past = cache.get_seq_length()
            ids = history if give == "full-ids" else history[:, past:]
            out = generate(model, ids, cache, torch.ones_like(history))
            new = out[:, -NEW:]
            answers.append(new)
            history = torch.cat([history, new, random_ids(2, 7, seed=turn + 1)], dim=1)
        return torch.cat(answers, dim=1), cache.get_seq_length()

    expected, length = talk(dynamic_cache(model))
    actual, own_length = talk(quant_cache(model, lossless))
    assert torch.equal(actual, expected)
    assert own_length == length


def test_quantized_conversation_with_crop(model):
    """Answers are cropped away between questions; the cache equals one that never saw them as far as it is coded."""
    context = random_ids(1, PROMPT)
    cache = _after(model, context)
    for turn in range(3):
        prompt = torch.cat([context, random_ids(1, 6, seed=turn)], dim=1)
        out = generate(model, prompt, cache)
        assert out.shape[1] == PROMPT + 6 + NEW
        cache.crop(PROMPT - cache.get_seq_length())
        assert cache.get_seq_length() == PROMPT
    untouched = _after(model, context)
    for index in range(2):
        for mine, true in zip(cache.dequantize(index), untouched.dequantize(index), strict=True):
            assert_close(mine, true, 0.2 * true.abs().max().item(), "context")


# ---------------------------------------------------------------- other inputs


@each_lossless
def test_inputs_embeds(model, lossless):
    ids = random_ids(2, PROMPT)
    embeds = model.get_input_embeddings()(ids).detach()
    mask = torch.ones_like(ids)
    expected = generate(model, None, mask=mask, inputs_embeds=embeds)
    cache = quant_cache(model, lossless)
    assert torch.equal(generate(model, None, cache, mask, inputs_embeds=embeds), expected)
    assert cache.get_seq_length() == PROMPT + NEW - 1


@each_lossless
def test_inputs_embeds_on_a_reused_prefix(model, lossless):
    ids = random_ids(2, PROMPT)
    embeds = model.get_input_embeddings()(ids).detach()
    expected = generate(model, None, mask=torch.ones_like(ids), inputs_embeds=embeds)
    cache = _after(model, ids[:, :40], lossless)
    assert torch.equal(generate(model, None, cache, torch.ones_like(ids), inputs_embeds=embeds), expected)


class Collector(BaseStreamer):
    """Keeps every token it is given."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("quant", [Q, LOSSLESS["long-residual"]], ids=["K4V4", "lossless"])
def test_streamer(model, quant):
    ids = random_ids(1, PROMPT)
    streamer = Collector()
    out = generate(model, ids, quant_cache(model, quant), streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == out[0].tolist()


@each_lossless
def test_eos_stops_rows_at_different_steps(model, lossless):
    ids = random_ids(4, PROMPT)
    plain = generate(model, ids)
    eos = int(plain[1, PROMPT + 5])
    expected = generate(model, ids, eos_token_id=eos)
    assert torch.equal(generate(model, ids, quant_cache(model, lossless), eos_token_id=eos), expected)


def test_logits_processor_sees_the_same_scores(model):
    ids = random_ids(2, PROMPT)
    options = {"return_dict_in_generate": True, "output_scores": True, "do_sample": True, "top_p": 0.9}
    expected = generate(model, ids, **options)
    actual = generate(model, ids, quant_cache(model, LOSSLESS["16-bit"]), **options)
    for mine, true in zip(actual.scores, expected.scores, strict=True):
        finite = torch.isfinite(true)
        assert torch.equal(finite, torch.isfinite(mine))
        assert_close(mine[finite], true[finite])


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("quant", [Q, LOSSLESS["long-residual"]], ids=["K4V4", "lossless"])
def test_use_cache_false_is_refused(model, quant):
    """Transformers would append the whole sequence to the cache at every step."""
    ids = random_ids(1, PROMPT)
    cache = quant_cache(model, quant)
    with pytest.raises(ValueError, match="use_cache"):
        generate(model, ids, cache, use_cache=False)


@pytest.mark.parametrize("how", ["filled-by-generate", "exactly-the-prompt", "one-longer", "other-prompt"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left-padded"])
@pytest.mark.parametrize("quant", [Q, LOSSLESS["long-residual"]], ids=["K4V4", "lossless"])
def test_a_stale_cache_is_refused(model, how, padded, quant):
    """A cache at least as long as the prompt leaves nothing to feed; Transformers would append the prompt to it."""
    ids, mask = random_ids(2, PROMPT), None
    if padded:
        ids, mask = left_pad(ids, (9, 0))
    cache = quant_cache(model, quant)
    if how == "filled-by-generate":
        generate(model, ids, cache, mask)
    else:
        length = PROMPT + (how == "one-longer")
        forward(model, random_ids(2, length, seed=int(how == "other-prompt")), cache)
    held = cache.get_seq_length()
    with pytest.raises(ValueError, match=rf"(?i)(?=.*\b{held}\b)(?=.*(reset|new|fresh|empty|crop))"):
        generate(model, ids, cache, mask)
    assert cache.get_seq_length() == held


def test_a_refusal_does_not_poison_the_cache(model):
    """After a refused call, a reset makes the cache usable."""
    ids = random_ids(2, PROMPT)
    cache = quant_cache(model)
    first = generate(model, ids, cache)
    with pytest.raises(ValueError):
        generate(model, ids, cache)
    with pytest.raises(ValueError):
        generate(model, ids, cache, use_cache=False)
    cache.reset()
    assert torch.equal(generate(model, ids, cache), first)


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left-padded"])
def test_new_ids_on_a_longer_cache_are_not_refused(model, padded):
    """Only new ids with the full mask: shorter than the cache, and right."""
    ids, mask = random_ids(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    if padded:
        ids, mask = left_pad(ids, (9, 0))
    cache = quant_cache(model, LOSSLESS["16-bit"])
    forward(model, ids[:, :50], cache, mask[:, :50])
    out = generate(model, ids[:, 50:], cache, mask)
    assert torch.equal(out[:, -NEW:], generate(model, ids, mask=mask)[:, -NEW:])


def test_dynamic_cache_would_be_silently_wrong(model):
    """Why the refusals exist: Transformers' own cache appends the prompt to the old sequence without an error."""
    ids = random_ids(1, PROMPT)
    stale = dynamic_cache(model)
    generate(model, ids, stale)
    generate(model, ids, stale)
    assert stale.get_seq_length() > PROMPT + NEW - 1


# ---------------------------------------------------------------- the fused path and the strict attention


@pytest.fixture(scope="module")
def registered():
    import kvquant_hf

    kvquant_hf.register_attention()
    kvquant_hf.register_attention()  # twice is harmless


STRICT = {"K4V4": Q, "K4V4-no-window": settings(residual=0, sinks=0), **LOSSLESS}
each_strict = pytest.mark.parametrize("quant", list(STRICT.values()), ids=list(STRICT))


@each_strict
@pytest.mark.parametrize("pads", [None, (9, 0), (25, 40)], ids=["unpadded", "left-padded", "both-padded"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_strict_attention_equals_sdpa(registered, quant, pads, kv_heads):
    ids, mask = random_ids(2, PROMPT), None
    if pads:
        ids, mask = left_pad(ids, pads)
    logits = []
    for attention in ("sdpa", "kvquant"):
        model = steady_model(attn_implementation=attention, num_key_value_heads=kv_heads)
        cache = quant_cache(model, quant)
        parts, full = [forward(model, ids, cache, mask)[:, -1:]], mask
        for seed, length in enumerate((1, 1, 3, 1, 20, 1)):
            if full is not None:
                full = torch.cat([full, full.new_ones(2, length)], dim=1)
            parts.append(forward(model, random_ids(2, length, seed + 3), cache, full))
        logits.append(torch.cat(parts, dim=1))
    assert_close(*logits)


@each_mode
def test_strict_attention_generates_the_same(registered, options):
    ids, mask = left_pad(random_ids(2, PROMPT), (25, 0))
    out = []
    for attention in ("sdpa", "kvquant"):
        model = tiny_model("llama", attn_implementation=attention)
        out.append(sequences(generate(model, ids, quant_cache(model, LOSSLESS["16-bit"]), mask, **options)))
    assert torch.equal(*out)


@pytest.mark.parametrize("family", ["gemma3", "qwen3", "smollm3"])
def test_strict_attention_serves_hybrid_models(registered, family):
    logits = []
    for attention in ("sdpa", "kvquant"):
        model = tiny_model(family, attn_implementation=attention)
        cache = quant_cache(model, settings(8, 8))
        parts = [forward(model, random_ids(2, 50), cache)[:, -1:]]
        parts += [forward(model, random_ids(2, length, 4), cache) for length in (1, 1, 5, 1)]
        logits.append(torch.cat(parts, dim=1))
    # Several layers: rounding may tip single codes of the later ones.
    assert_close(*logits, 0.01)


def test_strict_attention_without_a_quantized_cache(registered):
    """A plain prefill and `DynamicCache` work as well: the attention is complete, or it raises."""
    ids = random_ids(2, PROMPT)
    logits = []
    for attention in ("sdpa", "kvquant"):
        model = tiny_model("llama", attn_implementation=attention)
        try:
            logits.append(forward(model, ids, None))
        except ValueError as error:
            assert attention == "kvquant" and "QuantCache" in str(error)
            return
    assert_close(*logits)


def test_strict_attention_refuses_softcap(registered):
    """Gemma 2 caps its scores; the fused op does not, and must say so instead of leaving it out."""
    model = tiny_model("gemma2", attn_implementation="kvquant")
    assert model.config.attn_logit_softcapping
    with pytest.raises((ValueError, NotImplementedError), match="softcap"):
        cache = quant_cache(model)
        forward(model, random_ids(1, PROMPT), cache)
        forward(model, random_ids(1, 1), cache)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("softcap", 30.0), ("dropout", 0.1), ("position_bias", "bias"), ("s_aux", "sink")],
)
def test_strict_attention_refuses_unknown_arguments(registered, argument, value):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = tiny_model("llama", attn_implementation="kvquant")
    cache = _after(model, random_ids(1, PROMPT))
    module = model.model.layers[0].self_attn
    query = torch.randn(1, 4, 1, 16)
    keys, values = cache.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), 0)
    if value == "bias":
        value = torch.zeros(1, 4, 1, PROMPT + 1)
    elif value == "sink":
        value = torch.zeros(4)
    attend = ALL_ATTENTION_FUNCTIONS["kvquant"]
    out, weights = attend(module, query, keys, values, None, scaling=0.25)
    assert out.shape == (1, 1, 4, 16) and weights is None
    with pytest.raises((ValueError, NotImplementedError, TypeError), match=argument):
        attend(module, query, keys, values, None, scaling=0.25, **{argument: value})


def test_strict_attention_refuses_output_attentions(registered):
    model = tiny_model("llama", attn_implementation="kvquant")
    cache = quant_cache(model)
    forward(model, random_ids(1, PROMPT), cache)
    with pytest.raises((ValueError, NotImplementedError), match="output_attentions"):
        forward(model, random_ids(1, 1), cache, output_attentions=True)


class TestFusedPath:
    """Decode steps reach the fused op and never build the dense history."""

    @pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left-padded"])
    @pytest.mark.parametrize("attention", ["sdpa", "kvquant"])
    def test_decode_never_materializes(self, registered, attention, padded):
        if attention == "sdpa" and padded and not PASSES_POSITIONS:
            pytest.skip("before 5.24 the sdpa wrapper repeats masked keys itself: the strict attention serves this")
        model = tiny_model("llama", attn_implementation=attention)
        ids, mask = left_pad(random_ids(2, PROMPT), (9, 0) if padded else (0, 0))
        mask = mask if padded else None
        cache = quant_cache(model)
        forward(model, ids, cache, mask)
        peak = self.peak(model, cache, mask)
        assert peak == 0, f"{peak} dense tensors of the whole history were made in a decode step"

    def peak(self, model, cache, mask):
        """How many calls of `dequantize`-sized work a step makes: tensors as long as the history."""
        length = cache.get_seq_length()
        made = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                is_states = isinstance(out, torch.Tensor) and out.is_floating_point() and out.ndim >= 3
                if is_states and out.numel() >= 2 * 2 * length * 16:
                    made.append((str(func), tuple(out.shape)))
                return out

        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        with Watch():
            forward(model, random_ids(2, 1), cache, mask)
        return len(made)

    def test_the_watch_sees_dense_history(self):
        """The measure above can fail: `DynamicCache` makes dense tensors in every step."""
        model = tiny_model("llama")
        cache = dynamic_cache(model)
        forward(model, random_ids(2, PROMPT), cache)
        assert self.peak(model, cache, None) >= 4


def test_dense_backend_and_torch_backend_agree():
    """`backend` chooses who computes, never what."""
    model = steady_model()
    ids = random_ids(2, PROMPT)
    logits = []
    for backend in ("dense", "torch", "auto"):
        cache = quant_cache(model, {**Q, "backend": backend})
        parts = [forward(model, ids, cache)[:, -1:]]
        parts += [forward(model, random_ids(2, length, 4), cache) for length in (1, 3, 1, 30, 1)]
        logits.append(torch.cat(parts, dim=1))
    assert_close(logits[0], logits[1])
    assert_close(logits[0], logits[2])
