"""Saving and loading: equal contents, and clear refusals that change nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kvquant_hf import QuantCache, list_presets
from kvquant_hf._compat import cache_kwargs
from tests.tiny_models import tiny_model

PROD = {"nbits": 3, "method": "turboquant_prod", "granularity": "per_token", "rope": "post", "rotation": "hadamard"}
PROD |= {"symmetric": True, "levels": "gaussian"}

SETTINGS = {
    "k4v4": {"residual_length": 16},
    "k3v3": {"residual_length": 0, "sink_length": 0},
    "kivi-int2": {"residual_length": 16},
    "dense": {},
    "fp8": {"residual_length": 16},
    "turboquant3": {"residual_length": 16},
    "turboquant-prod": {"residual_length": 16} | dict.fromkeys(("key", "value"), PROD),
    "nvfp4": {"residual_length": 16},
    "centered": {"residual_length": 16}
    | {side: {"method": "variance_normalized", "centered": True} for side in ("key", "value")},
    "factors": {"residual_length": 16} | {side: {"method": "variance_normalized"} for side in ("key", "value")},
    "outliers": {"residual_length": 16} | {side: {"outliers": 0.01} for side in ("key", "value")},
    "levels": {
        "residual_length": 16,
        "key": {"nbits": 2, "levels": [-1, -0.25, 0.3, 0.9], "outliers": 0.01},
        "layers": {1: {"key": {"levels": [-0.9, -0.3, 0.2, 1]}, "value": {"nbits": 2, "levels": [-1, -0.5, 0.5, 1]}}},
    },
    "shared": {
        "residual_length": 16,
        "key": {"group_size": 16, "shared_groups": 2},
        "value": {
            "granularity": "per_channel",
            "group_size": 16,
            "shared_groups": 4,
            "shared_parameter": "zero_point",
        },
    },
    "innerq3": {"residual_length": 0, "sink_length": 0},
}


def filled(model, quant, batch_size=2, tokens=90, **settings) -> QuantCache:
    cache = QuantCache(model.config, quant, **settings)
    ids = torch.randint(3, 128, (batch_size, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    cache.set_padding(mask)
    with torch.no_grad():
        model(ids, attention_mask=mask, **cache_kwargs(cache))
    return cache


def next_logits(model, cache):
    token = torch.full((2, 1), 7)
    with torch.no_grad():
        return model(token, **cache_kwargs(cache)).logits


@pytest.mark.parametrize("quant", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_loaded_cache_continues_exactly(family, quant, tmp_path):
    model = tiny_model(family)
    cache = filled(model, quant if quant in list_presets() else {}, **SETTINGS[quant])
    cache.save(tmp_path / "c")
    loaded = QuantCache.load(tmp_path / "c", model.config)
    assert loaded.quant_config == cache.quant_config
    assert loaded.get_seq_length() == 90
    for _ in range(40):  # across flushes
        assert torch.equal(next_logits(model, loaded), next_logits(model, cache))
    assert loaded.memory_report().codes == cache.memory_report().codes


def test_files_hold_factors_only_where_a_method_has_them(tmp_path):
    model = tiny_model("llama")
    for quant in ("k4v4", "factors"):
        filled(model, quant if quant == "k4v4" else {}, **SETTINGS[quant]).save(tmp_path / quant)
        names = set(load_file(tmp_path / quant / "cache.safetensors"))
        found = {name for name in names if name.endswith(".factor")}
        assert found == (
            set() if quant == "k4v4" else {f"layers.{i}.{s}.factor" for i in (0, 1) for s in ("key", "value")}
        )


def test_an_empty_cache_and_overrides_by_layer_survive(tmp_path):
    model = tiny_model("llama")
    cache = QuantCache(model.config, "k4v4", layers={0: {"key": {"nbits": 8}}, "1-1": {"sink_length": 0}})
    cache.save(tmp_path)
    loaded = QuantCache.load(tmp_path, model)
    assert loaded.get_seq_length() == 0
    assert loaded.quant_config == cache.quant_config
    next_logits(model, loaded)


def test_saving_again_replaces_the_files(tmp_path):
    model = tiny_model("llama")
    filled(model, "k4v4").save(tmp_path)
    cache = filled(model, "k4v4", tokens=200)
    cache.save(tmp_path)
    assert QuantCache.load(tmp_path, model.config).get_seq_length() == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.json", "cache.safetensors"]


def damaged(tmp_path, damage):
    model = tiny_model("llama")
    filled(model, "k4v4", residual_length=16).save(tmp_path)
    note = tmp_path / "cache.json"
    description = json.loads(note.read_text())
    damage(tmp_path, description)
    note.write_text(json.dumps(description))
    return model.config


def flip_a_byte(path, _):
    data = bytearray((path / "cache.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "cache.safetensors").write_bytes(data)


def cut_off(path, _):
    data = (path / "cache.safetensors").read_bytes()
    (path / "cache.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, r"damaged or belongs to another"),
        (cut_off, r"damaged or belongs to another"),
        (lambda p, d: d.update(version=99), r"format version 99, this release reads 1"),
        (lambda p, d: d.update(format="other"), r"does not describe a saved cache"),
        (lambda p, d: d.pop("sha256"), r"lacks \['sha256'\]"),
        (lambda p, d: d["layers"].pop(), r"describes 1 layers of 2"),
        (lambda p, d: d["layers"][0].update(length=91), r"at layer 0: it should hold 91 tokens"),
        (lambda p, d: d["layers"][1].pop("dtypes"), r"at layer 1"),
        (lambda p, d: d["quant_config"]["key"].update(nbits=3), r"at layer 0: stored `codes` must have the shape"),
        (lambda p, d: d["quant_config"]["key"].update(nbits=5), r"`nbits` must be one of"),
        (lambda p, d: d["quant_config"].update(surprise=1), r"no setting 'surprise'"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    config = damaged(tmp_path, damage)
    with pytest.raises(ValueError, match=message):
        QuantCache.load(tmp_path, config)


def test_foreign_and_missing_files_are_named(tmp_path):
    config = tiny_model("llama").config
    with pytest.raises(FileNotFoundError, match="holds no saved cache"):
        QuantCache.load(tmp_path / "nowhere", config)
    (tmp_path / "cache.json").write_text("{ not json")
    with pytest.raises(ValueError, match="is damaged"):
        QuantCache.load(tmp_path, config)
    (tmp_path / "cache.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="does not describe a saved cache"):
        QuantCache.load(tmp_path, config)


def test_a_cache_of_another_model_is_refused(tmp_path):
    filled(tiny_model("llama"), "k4v4").save(tmp_path)
    with pytest.raises(ValueError, match=r"holds a cache of a model with the layer types"):
        QuantCache.load(tmp_path, tiny_model("gemma3").config)
    with pytest.raises(ValueError, match=r"heads, layers or shapes differ"):
        QuantCache.load(tmp_path, tiny_model("llama", head_dim=32).config)
