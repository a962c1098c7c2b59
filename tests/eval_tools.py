"""What the tests of the evaluation share: a tokenizer of characters, and settings that quantize short prompts."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SETTINGS = {
    "key": {"nbits": 4, "group_size": 16},
    "value": {"nbits": 4, "group_size": 16},
    "residual_length": 16,
    "sink_length": 4,
}


def characters_tokenizer(**fields: Any) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character; ids below those of `tiny_models`' vocabulary."""
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<unk>", "</s>", *map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fields = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"} | fields
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **fields)
