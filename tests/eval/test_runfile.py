"""Run files: what they may say, what the command line changes, and which changes get a directory of their own."""

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs the `eval` extra")

from kvquant_hf import KVQuantConfig
from kvquant_hf.eval.runfile import load_run_file


@pytest.fixture
def base(tiny_model_dir):
    return {
        "model": "kvquant",
        "model_args": {"pretrained": str(tiny_model_dir), "dtype": "float32"},
        "tasks": ["gsm8k_local"],
        "limit": 3,
        "gen_kwargs": {"max_gen_toks": 8},
        "caches": ["dense", "k4v4"],
    }


@pytest.fixture
def load(base, tmp_path):
    def make(overrides=None, **changes):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({**base, **changes}))
        return load_run_file(path, overrides or {})

    return make


def test_file_and_command_line_are_merged(load):
    run = load({"model_args": {"dtype": "bfloat16"}, "gen_kwargs": {"do_sample": False}, "limit": 0.5})
    assert run.model_args == {"dtype": "bfloat16"} and run.resolved_model.endswith("tiny-llama")
    assert run.settings.gen_kwargs == {"max_gen_toks": 8, "do_sample": False}
    assert run.settings.limit == 0.5 and run.settings.tasks == ["gsm8k_local"]
    assert list(run.caches) == ["dense", "k4v4"] and str(run.output) == "out/mine"


def test_the_command_line_can_do_without_a_file(tiny_model_dir):
    run = load_run_file(
        None, {"model_args": {"pretrained": str(tiny_model_dir), "quant": "k2v2"}, "tasks": ["a,b", "b"]}
    )
    assert list(run.caches) == ["k2v2"] and run.settings.tasks == ["a", "b"] and run.settings.device == "cpu"


def test_forms_of_caches(load, tmp_path):
    mine = tmp_path / "fine.yaml"
    mine.write_text("{key: {nbits: 8}, value: {nbits: 8}}")
    settings = {"key": {"nbits": 3}}
    listed = [
        "k2v2,residual_length=64",
        str(mine),
        {"name": "three", "quant": settings},
        {"name": "x", "quant": "k8v8"},
    ]
    caches = load(caches=listed).caches
    assert list(caches) == ["k2v2,residual_length=64", "fine", "three", "x"]
    assert caches["k2v2,residual_length=64"].residual_length == 64
    assert caches["fine"].value.nbits == 8 and caches["three"] == KVQuantConfig.from_dict(settings)
    assert caches["x"] == KVQuantConfig.from_preset("k8v8")


def test_a_cache_of_the_command_line_replaces_those_of_the_file(load):
    assert list(load({"model_args": {"quant": "k8v8"}}).caches) == ["k8v8"]
    assert list(load({"caches": ["k2v2"]}).caches) == ["k2v2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_cache": "answers"}, "`use_cache` is refused.*one cache configuration to the next"),
        ({"cache": ["k4v4"]}, "no setting 'cache'.*Did you mean 'caches'"),
        ({"model": "hf"}, "`model` must be one of .*kvquant.*got 'hf'"),
        ({"wandb_args": {"project": "p"}}, "`wandb_args` is not supported"),
        ({"tasks": []}, "`tasks` must name at least one task"),
        ({"caches": []}, "`caches` must be a list"),
        ({"caches": ["k4v4", "k4v4"]}, "names 'k4v4' twice"),
        ({"caches": ["k4v5"]}, "preset name"),
        ({"caches": [{"quant": "k4v4", "nam": "x"}]}, "no setting 'nam'"),
        ({"model_args": {"dtype": "float32"}}, "`model_args` must name the model"),
        ({"model_args": {"pretrained": "x", "quant": "k4v4"}}, "either `caches` or `quant`"),
    ],
)
def test_refusals(load, changes, message):
    with pytest.raises(ValueError, match=message):
        load(**changes)


def test_a_missing_model_or_file_is_named(load, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"get_model.py nothing"):
        load(model_args={"pretrained": "prepared:nothing"})
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        load_run_file(tmp_path / "none.yaml", {})
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a mapping"):
        load_run_file(tmp_path / "list.yaml", {})


def test_directories_change_with_what_decides_the_answers(load):
    def directory(*args, **changes):
        return load(*args, **changes).directory("k4v4").name

    same = directory()
    assert same.startswith("k4v4-") and directory() == same
    assert directory({"output_path": "elsewhere", "verbosity": "INFO"}, description="other words") == same
    assert directory(caches=[{"name": "k4v4", "quant": KVQuantConfig.from_preset("k4v4").to_dict()}]) == same
    assert directory({"batch_size": "2"}) == directory(batch_size=2)
    others = [
        directory(caches=[{"name": "k4v4", "quant": "k4v4,residual_length=64"}]),
        directory({"limit": 4}),
        directory({"batch_size": 2}),
        directory({"model_args": {"dtype": "bfloat16"}}),
        directory({"model_args": {"loglikelihood_mode": "chunked"}}),
        directory({"gen_kwargs": {"max_gen_toks": 9}}),
        directory({"metadata": {"needle_seed": 1}}),
        directory({"seed": [1, 1, 1, 1]}),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_other_weights_get_another_directory(load, tiny_model_dir, tmp_path):
    import shutil

    copy = tmp_path / "copies" / tiny_model_dir.name
    shutil.copytree(tiny_model_dir, copy)
    arguments = {"model_args": {"pretrained": str(copy)}}
    assert load(arguments).directory("k4v4") == load().directory("k4v4")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    assert load(arguments).directory("k4v4") != load().directory("k4v4")
