"""Notebooks run from top to bottom on a tiny model, and are stored without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Words that each notebook must print.
EXPECTED = {
    "01_quickstart": ("tokens, ", "as codes"),
    "02_where_error_enters": ("256 tokens, 2 quantized layers", "output, values alone", "negligible tokens"),
    "03_choose_a_preset": ("bits at 512", "kivi-int2", "bits per value, KL"),
}
FIGURES = {"01_quickstart": 0, "02_where_error_enters": 2, "03_choose_a_preset": 1}
NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture
def tiny_directory(tmp_path):
    """A random Llama with a tokenizer of single characters."""
    characters = ["<unk>", *map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == list(EXPECTED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tiny_directory, monkeypatch):
    monkeypatch.setenv("KVQUANT_HF_MODEL", str(tiny_directory))
    monkeypatch.setenv("KVQUANT_HF_TOKENS", "300")
    monkeypatch.setenv("KVQUANT_HF_WINDOWS", "2")
    monkeypatch.setenv("KVQUANT_HF_LENGTH", "512")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert [word for word in EXPECTED[path.stem] if word not in printed] == []
    figures = [out for cell in notebook.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    assert len(figures) == FIGURES[path.stem]
