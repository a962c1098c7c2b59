"""Real models, scored through the cache: lossless equals `DynamicCache`, 8 and 4 bits stay within their gates.

A window of 1,024 tokens is fed as a prefill of 256 and then in pieces of 64, each of which attends to the stored
history; 768 tokens are scored in fp32. The gates are those of the project's own presets.
"""

from pathlib import Path

import pytest
import torch
from harness import (
    CACHE_KW,
    PASSES_POSITIONS,
    assert_reported_bytes,
    dynamic_cache,
    forward,
    kl,
    left_pad,
    quant_cache,
    scored_chunk,
    settings,
)
from models import prepared_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = Path(__file__).parents[2] / "data" / "pride_and_prejudice_excerpt.txt"
CONTEXT, PREFILL, STEP = 1024, 256, 64
K8V8_GATE, K4V4_GATE, K4V4_QWEN_GATE = 0.002, 0.008, 0.01
PER_TOKEN_K4 = settings(group=32, residual=128, key={"granularity": "per_token", "rope": "post"})


class Scored:
    """A real model, a window of text and the logits of `DynamicCache` on it."""

    def __init__(self, name):
        directory = prepared_model(name)
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.all_ids = self.tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids
        self.ids = self.all_ids[:, :CONTEXT]
        assert self.ids.shape[1] == CONTEXT
        self.reference = scored_chunk(self.model, dynamic_cache(self.model), self.ids, PREFILL, STEP)

    def score(self, quant):
        """KL to the reference, and the filled cache."""
        cache = quant_cache(self.model, quant)
        value = kl(self.reference, scored_chunk(self.model, cache, self.ids, PREFILL, STEP))
        assert cache.get_seq_length() == CONTEXT
        assert_reported_bytes(cache)
        return value, cache


@pytest.fixture(scope="module")
def smollm():
    return Scored("smollm2-135m")


@pytest.fixture(scope="module")
def qwen():
    return Scored("qwen2.5-coder-0.5b")


class TestSmolLM2:
    @pytest.mark.parametrize("quant", [settings(residual=4096), settings(16, 16)], ids=["long-residual", "16-bit"])
    def test_lossless_equals_dynamic_cache(self, smollm, quant):
        ids = smollm.ids[:, :320]
        cache = quant_cache(smollm.model, quant)
        actual = scored_chunk(smollm.model, cache, ids, PREFILL, 16)
        expected = smollm.reference[:, : 320 - PREFILL]
        assert kl(expected, actual) < 1e-8
        assert (actual - expected).abs().max() < 2e-3

    def test_lossless_generates_the_same_text(self, smollm):
        ids = smollm.ids[:, :200]
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
        expected = smollm.model.generate(ids, **options)
        cache = quant_cache(smollm.model, settings(16, 16))
        assert torch.equal(smollm.model.generate(ids, **options, **{CACHE_KW: cache}), expected)

    def test_k8v8_stays_within_its_gate(self, smollm):
        value, cache = smollm.score("k8v8")
        assert cache.quantized_length(0) >= CONTEXT - 4 - 128 - 63
        assert 0 < value < K8V8_GATE

    def test_k4v4_stays_within_its_gate(self, smollm):
        value, cache = smollm.score("k4v4")
        assert cache.quantized_length(0) >= CONTEXT - 4 - 128 - 63
        assert 0 < value < K4V4_GATE
        assert cache.memory_report().bits_per_value_quantized <= 4.6

    def test_the_gate_can_fail(self, smollm):
        """Two bits without sinks, as KIVI has them, are far outside of the 4-bit gate."""
        value, _ = smollm.score("kivi-int2")
        assert value > 5 * K4V4_GATE

    def test_a_padded_batch_scores_like_single_prompts(self, smollm):
        """A1 on real weights: rows padded by 120 and by no tokens against the same prompts alone."""
        length, scored = 300, 40
        starts, pads = (0, 1000), (120, 0)
        rows = torch.cat([smollm.all_ids[:, start : start + length + scored] for start in starts])
        ids, mask = left_pad(rows, pads)
        together = alone = 0.0
        reference, padded = dynamic_cache(smollm.model), quant_cache(smollm.model, settings(3, 3, group=32))
        if not PASSES_POSITIONS:
            padded.set_padding(mask[:, :length])
        logits = []
        for cache in (reference, padded):
            forward(smollm.model, ids[:, :length], cache, mask[:, :length], logits_to_keep=1)
            logits.append(forward(smollm.model, ids[:, length:], cache, mask))
        for row, pad in enumerate(pads):
            single = quant_cache(smollm.model, settings(3, 3, group=32))
            forward(smollm.model, rows[row : row + 1, pad:length], single, logits_to_keep=1)
            alone += kl(logits[0][row], forward(smollm.model, rows[row : row + 1, length:], single)[0])
            together += kl(logits[0][row], logits[1][row])
        assert together <= 1.5 * alone, (together, alone)

    def test_the_scoring_core_agrees(self, smollm):
        """`kvquant_hf.eval` measures what is measured here."""
        from kvquant_hf import QuantCache
        from kvquant_hf.eval import Protocol, score_windows

        window = smollm.ids[:, :384]
        quant = settings(group=32, residual=32)
        protocol = Protocol(context=384, prefill=PREFILL, step=STEP)
        scores = score_windows(smollm.model, window, {"ours": lambda: QuantCache(smollm.model, quant)}, protocol)
        cache = quant_cache(smollm.model, quant)
        logits = scored_chunk(smollm.model, cache, window, PREFILL, STEP)[:, :-1]
        expected = kl(smollm.reference[:, : 384 - PREFILL - 1], logits)
        scored = scores["ours"]
        # The core also scores the first token after the prefill, which is exact with any cache, and drops the last.
        assert scored.tokens == 384 - PREFILL
        assert abs(scored.kl - expected * (scored.tokens - 1) / scored.tokens) < 0.02 * expected
        assert scores["DynamicCache"].kl == 0


@pytest.mark.slow
class TestQwen:
    def test_k8v8_stays_within_its_gate(self, qwen):
        assert 0 < qwen.score("k8v8")[0] < K8V8_GATE

    def test_k4v4_stays_within_its_gate(self, qwen):
        assert 0 < qwen.score("k4v4")[0] < K4V4_QWEN_GATE

    def test_per_token_keys_fail_the_same_gate(self, qwen):
        """The fault that users report on Qwen2.5 (A2): the gate must see it."""
        assert qwen.score(PER_TOKEN_K4)[0] > K4V4_QWEN_GATE
