"""A maker of lm-eval models over a tiny random model."""

import shutil
from pathlib import Path

import pytest
from eval_tools import SETTINGS, characters_tokenizer
from tiny_models import tiny_model
from transformers import AutoTokenizer


@pytest.fixture
def evaluator():
    """`evaluator(batch_size=1, quant=SETTINGS, family="llama", **arguments of KVQuantLM)`."""
    from kvquant_hf.eval.lm import KVQuantLM

    def make(batch_size: int = 1, quant=SETTINGS, family="llama", **more) -> KVQuantLM:
        more = {"tokenizer": characters_tokenizer(), "max_length": 256} | more
        return KVQuantLM(tiny_model(family), quant, batch_size=batch_size, **more)

    return make


@pytest.fixture(scope="session")
def lm_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in a directory, with the end-of-text token that lm-eval cannot do without."""
    directory = tmp_path_factory.mktemp("lm") / tiny_model_dir.name
    shutil.copytree(tiny_model_dir, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.eos_token = "<s>"
    tokenizer.save_pretrained(directory)
    return directory
