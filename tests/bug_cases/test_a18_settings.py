"""A18: the user's objects are neither consumed nor shared nor misread."""

import copy

import pytest
import torch
from harness import (
    CACHE_KW,
    Q,
    assert_close,
    dynamic_cache,
    forward,
    quant_cache,
    random_ids,
    roll,
    settings,
)
from tiny_models import tiny_model
from transformers import Gemma3Config, LlavaConfig, Qwen2VLConfig

NESTED = {**settings(), "layers": {0: {"key": {"nbits": 8}}, "-1": {"value": {"nbits": 2}, "residual_length": 32}}}


@pytest.mark.parametrize("kind", ["mapping", "config", "preset", "yaml"])
def test_a18_one_settings_object_serves_two_models(kind, tmp_path):
    from kvquant_hf import KVQuantConfig

    quant = {
        "mapping": lambda: copy.deepcopy(NESTED),
        "config": lambda: KVQuantConfig.from_dict(NESTED),
        "preset": lambda: "k4v4",
        "yaml": lambda: _yaml(tmp_path),
    }[kind]()
    before = copy.deepcopy(quant)
    for num_layers in (2, 4):
        model = tiny_model("llama", num_hidden_layers=num_layers)
        config_before = copy.deepcopy(model.config.to_dict())
        cache = quant_cache(model, quant)
        assert len(cache.layers) == len(cache) == num_layers
        roll(model, cache, random_ids(1, 60), random_ids(1, 20, seed=1))
        assert model.config.to_dict() == config_before
        assert quant == before
    if kind == "mapping":
        assert quant == NESTED


def _yaml(tmp_path):
    from kvquant_hf import KVQuantConfig

    path = tmp_path / "mine.yaml"
    KVQuantConfig.from_dict(NESTED).to_yaml(path)
    return path


def test_a18_changing_the_mapping_later_changes_no_cache():
    model = tiny_model("llama", num_hidden_layers=1)
    quant = copy.deepcopy(Q)
    cache, expected = quant_cache(model, quant), quant_cache(model, Q)
    quant["key"]["nbits"] = 2
    quant["residual_length"] = 0
    for each in (cache, expected):
        forward(model, random_ids(1, 100), each)
    assert_close(cache.dequantize(0)[0], expected.dequantize(0)[0], 0.0, "keys")
    assert cache.quantized_length(0) == expected.quantized_length(0)


def test_a18_two_caches_share_no_state():
    model = tiny_model("llama")
    first, second = quant_cache(model), quant_cache(model)
    forward(model, random_ids(1, 100), first)
    assert second.get_seq_length() == 0
    forward(model, random_ids(3, 50, seed=1), second)
    assert first.get_seq_length() == 100 and second.get_seq_length() == 50
    expected = quant_cache(model)
    forward(model, random_ids(1, 100), expected)
    assert_close(first.dequantize(1)[1], expected.dequantize(1)[1], 0.0, "values")


@pytest.mark.parametrize("given", ["config", "model"])
def test_a18_config_or_model(given):
    from kvquant_hf import QuantCache

    model = tiny_model("llama", num_hidden_layers=3)
    cache = QuantCache(model if given == "model" else model.config, Q)
    assert len(cache.layers) == 3
    forward(model, random_ids(1, 60), cache)
    assert cache.quantized_length(2) == 32


def test_a18_per_layer_settings_hit_the_named_layers():
    model = tiny_model("llama", num_hidden_layers=4)
    quant = {**Q, "layers": {"0-1": {"key": {"nbits": 8}, "value": {"nbits": 8}}, "-1": {"residual_length": 4096}}}
    cache, true = quant_cache(model, quant), dynamic_cache(model)
    forward(model, random_ids(1, 100), cache)
    forward(model, random_ids(1, 100), true)
    assert [cache.quantized_length(index) for index in range(4)] == [80, 80, 80, 0]
    errors = [
        ((cache.dequantize(index)[0] - true.layers[index].keys).abs().max() / true.layers[index].keys.abs().max())
        for index in range(4)
    ]
    assert errors[0] < 0.01 and errors[1] < 0.01 and errors[2] > 0.02 and errors[3] < 1e-5


@pytest.mark.parametrize("selector", [4, -5, "2-9", "sliding_attention"])
def test_a18_a_layer_the_model_does_not_have_is_refused(selector):
    with pytest.raises(ValueError, match=str(selector)):
        quant_cache(tiny_model("llama", num_hidden_layers=4), {**Q, "layers": {selector: {"key": {"nbits": 8}}}})


TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "full_attention"]
VISION = {"hidden_size": 32, "num_hidden_layers": 7, "num_attention_heads": 8, "intermediate_size": 64}


@pytest.mark.parametrize(
    "make",
    [
        lambda: LlavaConfig(
            text_config={"model_type": "llama", **TEXT}, vision_config={"model_type": "clip_vision_model", **VISION}
        ),
        lambda: Gemma3Config(text_config={**TEXT, "head_dim": 16, "layer_types": KINDS}, vision_config=VISION),
        lambda: Qwen2VLConfig(text_config=TEXT, vision_config={"depth": 7, "embed_dim": 32, "num_heads": 8}),
    ],
    ids=["llava", "gemma3", "qwen2-vl"],
)
def test_a18_composite_configs_use_their_text_decoder(make):
    config = make()
    before = copy.deepcopy(config.to_dict())
    cache = quant_cache(config)
    assert len(cache.layers) == 3
    assert config.to_dict() == before


def test_a18_cache_implementation_raises_transformers_own_error():
    model = tiny_model("llama")
    ids = random_ids(1, 20)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, cache_implementation="static",
            **{CACHE_KW: quant_cache(model)},
        )  # fmt: skip


@pytest.mark.parametrize("quant", [None, 4, ["k4v4"], "no-such-preset", "no/such/file.yaml"])
def test_a18_other_things_are_refused(quant):
    with pytest.raises((ValueError, OSError), match=r"quant|preset|no"):
        quant_cache(tiny_model("llama"), quant)


@pytest.mark.parametrize("config", [None, "llama", {}, 3])
def test_a18_a_config_that_is_none_is_refused(config):
    from kvquant_hf import QuantCache

    with pytest.raises((ValueError, TypeError), match="config"):
        QuantCache(config, "k4v4")


def test_a18_overrides_win_over_the_preset():
    model = tiny_model("llama", num_hidden_layers=1)
    cache = quant_cache(model, "k4v4", residual_length=0, sink_length=0)
    forward(model, random_ids(1, 64), cache)
    assert cache.quantized_length(0) == 64


def test_a18_round_trips():
    from kvquant_hf import KVQuantConfig, list_presets

    for name in list_presets():
        config = KVQuantConfig.from_preset(name)
        assert KVQuantConfig.from_dict(config.to_dict()) == config
    config = KVQuantConfig.from_dict(NESTED)
    assert KVQuantConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["layers"] == NESTED["layers"]
    required = {"k8v8", "k4v4", "k4v2", "k3v3", "k2v2", "kivi-int4", "kivi-int2", "dense"}
    assert required <= set(list_presets())
    assert all(isinstance(text, str) and any(c.isdigit() for c in text) for text in list_presets().values())
