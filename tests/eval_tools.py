"""What the tests of the evaluation share: a tokenizer, requests, settings that quantize short prompts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SETTINGS = {
    "key": {"nbits": 4, "group_size": 16},
    "value": {"nbits": 4, "group_size": 16},
    "residual_length": 16,
    "sink_length": 4,
}


TEXT = "".join(chr(97 + (i * i * 7 + i * 3) % 26) for i in range(120))
LENGTHS = (30, 90, 60, 45, 30, 75, 52)


def write_choices_task(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A multiple-choice task `choices` for lm-eval: rows of `question`, `choices` and the number of the `answer`."""
    data = folder / "choices.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }
    (folder / "choices.yaml").write_text(yaml.safe_dump(task))


def characters_tokenizer(**fields: Any) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character; ids below those of `tiny_models`' vocabulary."""
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<unk>", "</s>", *map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fields = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"} | fields
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **fields)


def requests_of(kind: str) -> list[Any]:
    """Instances of lm-eval, with texts of unequal and of equal lengths."""
    from lm_eval.api.instance import Instance

    settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    sampled = settings | {"max_gen_toks": 6}
    arguments = {
        "generate_until": [(TEXT[-n:], dict(sampled if i == 2 else settings)) for i, n in enumerate(LENGTHS)],
        "loglikelihood": [(TEXT[-n:], word) for n in LENGTHS for word in (" a", " b", " of the")],
        "loglikelihood_rolling": [(TEXT[:n],) for n in LENGTHS],
    }[kind]
    return [Instance(kind, {}, request, i) for i, request in enumerate(arguments)]


def assert_same_answers(found: list[Any], expected: list[Any]) -> None:
    """Equal texts, and log-likelihoods equal but for rounding."""
    for mine, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, tuple):
            assert mine == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
        else:
            assert mine == (wanted if isinstance(wanted, str) else pytest.approx(wanted, abs=1e-4))
