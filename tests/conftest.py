"""Settings every test runs under: no hub, one thread, poisoned fresh memory, upstream deprecations as errors.

Also a tiny random model in a directory, and a text.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# `harness`, `tiny_models` and `models` are imported by name, whatever import mode pytest runs in.
sys.path.insert(0, str(Path(__file__).parent))


# The same examples in every run, so that only a change makes a test fail; `--hypothesis-profile=explore` seeks others.
settings.register_profile("explore")
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: needs a model of several hundred MB or minutes of CPU time")
    # A deprecated call made by this package fails the test that reaches it.
    for category in ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning"):
        config.addinivalue_line("filterwarnings", rf"error::{category}:kvquant_hf(\..*)?")


@pytest.fixture(scope="session", autouse=True)
def _hostile_torch() -> Iterator[None]:
    """Uninitialized memory holds NaN and 0xFF, so a read of capacity that was never written cannot go unnoticed."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Llama layers and a byte-level tokenizer, no end of text; attention is far from uniform."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1} | {char: i for i, char in enumerate(alphabet, start=2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>").save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def lm_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in a directory, with the end-of-text token that lm-eval cannot do without."""
    directory = tmp_path_factory.mktemp("lm") / tiny_model_dir.name
    shutil.copytree(tiny_model_dir, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.eos_token = "<s>"
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "numbers.txt"
    lines = [f"Section {i}\n\nThe square of {i} is {i * i}, its cube {i**3}.\n" for i in range(40)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
