"""What a scoring run is told: settings as one word, texts, places in them, windows."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch
import yaml

from kvquant_hf import KVQuantConfig
from kvquant_hf.eval import load_text, locate, parse_quant, run_environment, token_windows
from kvquant_hf.eval.arguments import new_directory, positive, usable_device
from kvquant_hf.eval.score_store import FileStore


def test_preset_with_settings():
    config = parse_quant("k2v2,residual_length=64,key.nbits=3,layers={0: {key: {nbits: 8}}, -1: {value: {nbits: 4}}}")
    preset = KVQuantConfig.from_preset("k2v2")
    layers = {0: {"key": {"nbits": 8}}, -1: {"value": {"nbits": 4}}}
    assert config == preset.replace(residual_length=64, key={"nbits": 3}, layers=layers)
    assert parse_quant("k2v2") == preset


def test_yaml_file_with_settings(tmp_path):
    path = tmp_path / "mine, at home.yaml"
    path.write_text(yaml.safe_dump({"key": {"nbits": 8}, "sink_length": 7}))
    assert parse_quant(f"{path},sink_length=0") == KVQuantConfig().replace(key={"nbits": 8}, sink_length=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k4v5", "preset name"),
        ("k4v4,residual=3", "residual_length"),
        ("k4v4,key.nbit=3", "nbits"),
        ("k4v4,layers={0: ", "must have a YAML value"),
    ],
)
def test_wrong_settings(text, message):
    with pytest.raises(ValueError, match=message):
        parse_quant(text)


def test_raw_wikitext_becomes_the_published_string(tmp_path):
    path = tmp_path / "wiki.test.raw"
    path.write_bytes(b" \n = Title = \n \n Body one . \n Body two . \n")
    assert load_text(path) == "\n\n = Title = \n\n\n\n\n Body one . \n\n\n Body two . \n"


def test_other_text_is_left_alone(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("Ünïcode\r\n\r\n = no title = \n".encode())
    assert load_text(path) == "Ünïcode\n\n = no title = \n"


def test_text_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt is no UTF-8 text"):
        load_text(path)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_counts_are_at_least_one(text):
    assert positive("12") == 12
    with pytest.raises(ArgumentTypeError, match="must be an integer >= 1"):
        positive(text)


@pytest.mark.parametrize("text", ["nowhere", "cuda:97", "xla"])
def test_devices_that_are_not_there_are_named(text):
    assert usable_device("cpu") == "cpu"
    with pytest.raises(ArgumentTypeError, match=f"must be a device that can be used here, got '{text}': "):
        usable_device(text)


def test_results_go_to_no_file(tmp_path):
    assert new_directory(str(tmp_path)) == tmp_path and new_directory("not/there") == Path("not/there")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ArgumentTypeError, match="must be a directory or a path where nothing is yet, got the file"):
        new_directory(str(file))


@pytest.mark.parametrize("line", ["garbage", "[]", '{"key": "a"}'])
def test_records_that_are_none_are_named(tmp_path, line):
    path = tmp_path / "chunks.jsonl"
    path.write_text(f'{{"key": "b", "value": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"chunks\.jsonl, line 2 is no record of a score"):
        FileStore(path, {}, {})
    path.write_text('{"key": "b", "value": 1}\n{"key": "a", "val')  # cut off
    FileStore(path, {}, {})


def test_places():
    text = "Chapter 1\n\nof Chapter 2\n\nChapter 2\nend"
    assert locate(text, "Chapter 2") == text.rindex("Chapter 2")
    assert locate(text, "Chapter 1") == locate(text, "0") == 0
    assert locate(text, "12") == 12
    for wrong in ("Chapter 3", "", str(len(text))):
        with pytest.raises(ValueError, match="`start` must be"):
            locate(text, wrong)


class Letters:
    """A tokenizer of one token a letter, as far as windows need one."""

    def __init__(self, bos_token_id=None, adds_it=False):
        self.bos_token_id = bos_token_id
        self.adds_it = adds_it

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [ord(letter) for letter in text]
        return type("Encoding", (), {"input_ids": [self.bos_token_id] * (self.adds_it and add_special_tokens) + ids})


@pytest.mark.parametrize("tokenizer", [Letters(), Letters(1, adds_it=False)])
def test_windows_follow_each_other(tokenizer):
    expected = torch.tensor([[97, 98, 99], [100, 101, 102]])
    assert torch.equal(token_windows(tokenizer, "abcdefgh", 3, 2), expected)


def test_windows_begin_as_the_tokenizer_begins_texts():
    expected = torch.tensor([[1, 97, 98], [1, 99, 100]])
    assert torch.equal(token_windows(Letters(1, adds_it=True), "abcdefgh", 3, 2), expected)


@pytest.mark.parametrize("count", [0, 3])
def test_windows_refuse_a_short_text(count):
    with pytest.raises(ValueError, match=f"between 1 and 2 .* 8 tokens .* got {count}"):
        token_windows(Letters(), "abcdefgh", 3, count)


def test_environment_names_versions_and_threads():
    report = run_environment()
    assert report["versions"]["torch"] == torch.__version__ and report["threads"] == torch.get_num_threads()
    assert report["device"] and (report["commit"] is None or len(report["commit"].split("+")[0]) == 40)
