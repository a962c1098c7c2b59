"""`scripts/generate.py` on a tiny model: the comparison it stores and prints, its prompt, and what it refuses."""

import json
from pathlib import Path

import pytest
from models import load_script
from transformers import AutoTokenizer

from kvquant_hf import KVQuantConfig, QuantCache

generate = load_script("generate")


@pytest.fixture
def arguments(tiny_model_dir: Path, text_file: Path) -> list[str]:
    prompt = ["--prompt", str(text_file), "--prompt-tokens", "300", "--question", "What is 3 squared?"]
    lengths = ["--new-tokens", "24", "--min-new-tokens", "8", "--threads", "1", "--device", "cpu"]
    return ["--model", str(tiny_model_dir), *prompt, *lengths]


def test_compares_caches(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "demo.json"
    names = ["k4v4,residual_length=1000", "k2v2,key.group_size=32,residual_length=32,sink_length=0"]
    assert generate.main([*arguments, "--quant", *names, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    dense, exact, coarse = report["runs"]
    assert [run["cache"] for run in report["runs"]] == ["DynamicCache", *names]
    assert 280 < report["prompt_tokens"] < 360

    assert exact["first_difference"] is None and exact["token_ids"] == dense["token_ids"]
    differs = [one != other for one, other in zip(coarse["token_ids"], dense["token_ids"], strict=True)]
    assert coarse["first_difference"] == differs.index(True)

    tokens = report["prompt_tokens"] + 24 - 1  # the last token is never fed
    assert dense["total_bytes"] == tokens * 2 * 2 * (2 * 16) * 4  # K and V, layers, heads of 16, float32
    config = KVQuantConfig.from_preset("k2v2").replace(key={"group_size": 32})
    assert coarse["bits_per_value_quantized"] == config.nominal_bits(head_dim=16)
    assert exact["bits_per_value_quantized"] is None
    assert coarse["total_bytes"] < dense["total_bytes"] / 3
    for run in report["runs"]:
        assert sum(run["parts"].values()) == run["total_bytes"]
        assert run["prefill_tokens_per_s"] > 0 and run["decode_tokens_per_s"] > 0

    printed = capsys.readouterr().out
    assert f"{coarse['total_bytes']:,}" in printed and "decode, tokens/s" in printed


def test_every_cache_is_warmed_up_as_far_as_it_is_timed(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles a kernel on first use must not be part of the speed that is printed."""
    seen: list[tuple[str, object]] = []
    real = generate.generate_with

    def watched(name: str, cache: object, *more: object) -> object:
        seen.append((name, cache))
        return real(name, cache, *more)

    monkeypatch.setattr(generate, "generate_with", watched)
    quant = "k4v4,key.group_size=32,residual_length=32"
    assert generate.main([*arguments, "--quant", quant]) == 0
    assert [name for name, _ in seen] == ["warm-up", "warm-up", "DynamicCache", quant]
    warmed, timed = seen[1][1], seen[3][1]
    assert isinstance(warmed, QuantCache) and isinstance(timed, QuantCache) and warmed is not timed
    assert warmed.quant_config == timed.quant_config and warmed.quantized_length(0) > 0


def test_prompt_is_whole_paragraphs_and_the_question(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = "first one\n\nsecond one\n\nthird one"
    ids = generate.encode_prompt(tokenizer, text, "Which?", most_tokens=25)
    assert tokenizer.decode(ids[0]) == "first one\n\nsecond one\n\nQuestion: Which?\nAnswer:"
    tokenizer.chat_template = "{{ '<s>' }}{{ messages[0]['content'] }}{% if add_generation_prompt %} =>{% endif %}"
    ids = generate.encode_prompt(tokenizer, text, "Which?", most_tokens=5)
    assert tokenizer.decode(ids[0]) == "<s>first one\n\nWhich? =>"


@pytest.mark.parametrize(
    ("ids", "expected"), [([1, 2, 3], None), ([1, 5, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)]
)
def test_first_difference(ids: list[int], expected: int | None) -> None:
    assert generate.first_difference(ids, [1, 2, 3]) == expected


def test_shipped_prompt_is_long_enough() -> None:
    """Letters of English prose make at most one token of SmolLM2 each four and a half characters."""
    assert len(generate.DEFAULT_PROMPT.read_text(encoding="utf-8")) > 2500 * 5


@pytest.mark.parametrize("more", [["--quant", "k4v5"], ["--prompt", "absent.txt"], ["--model", "./absent"]])
def test_refuses_with_one_line(arguments: list[str], more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([*arguments, *more]) == 1
    error = capsys.readouterr().err
    assert error.startswith("generate.py: ") and more[1].removeprefix("./") in error


def test_says_how_to_prepare_the_default_model(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVQUANT_HF_MODELS", str(tmp_path))
    assert generate.main([]) == 1
    assert "scripts/get_model.py smollm2-135m" in capsys.readouterr().err
