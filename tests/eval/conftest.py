"""A maker of lm-eval models over a tiny random model."""

import pytest
from eval_tools import SETTINGS, characters_tokenizer
from tiny_models import tiny_model


@pytest.fixture
def evaluator():
    """`evaluator(batch_size=1, quant=SETTINGS, family="llama", **arguments of KVQuantLM)`."""
    from kvquant_hf.eval.lm import KVQuantLM

    def make(batch_size: int = 1, quant=SETTINGS, family="llama", **more) -> KVQuantLM:
        more = {"tokenizer": characters_tokenizer(), "max_length": 256} | more
        return KVQuantLM(tiny_model(family), quant, batch_size=batch_size, **more)

    return make
