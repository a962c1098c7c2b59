"""`scripts/query_moments.py` on a tiny model."""

from pathlib import Path

import pytest
from models import load_script
from transformers import AutoModelForCausalLM

from kvquant_hf import QuantCache, QueryMoments

script = load_script("query_moments")


def test_the_file_serves_caches_of_the_model(tiny_model_dir: Path, text_file: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "new" / "m.safetensors"
    arguments = ["--model", str(tiny_model_dir), "--text", str(text_file), "--text", str(text_file)]
    assert script.main([*arguments, "--windows", "2", "1", "--context", "60", "--output", str(out)]) == 0
    moments = QueryMoments.load(out)
    assert moments.num_tokens == 3 * 56 and moments.fingerprint in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert QuantCache(model.config, "k2v2", query_moments=out).query_moments.fingerprint == moments.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--windows", "1", "2"], "2 numbers of --windows for 1 --text"),
        (["--windows", "0"], "`chunks` must be"),
        (["--model", "prepared:none"], "not prepared"),
        (["--text", "gone.txt"], "gone.txt"),
    ],
)
def test_bad_arguments_are_named(
    changes, message, tiny_model_dir: Path, text_file: Path, tmp_path: Path, capsys
) -> None:
    arguments = ["--model", str(tiny_model_dir), "--text", str(text_file), "--context", "60", *changes]
    try:
        status = script.main([*arguments, "--output", str(tmp_path / "m")])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
