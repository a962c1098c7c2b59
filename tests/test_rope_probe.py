"""Rotations found by the probe, against the keys that real tiny models hand to their caches."""

import copy
import logging
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import CACHE_KW
from tiny_models import FAMILIES, VOCAB_SIZE, tiny_model
from torch import nn
from transformers import (
    AutoConfig,
    DynamicCache,
    Gemma3Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvquant_hf import rope_probe
from kvquant_hf.model_shell import ModelShell
from kvquant_hf.rope import KeyRotation, Pairing
from kvquant_hf.rope_probe import LayerRope, find_rotations

NO_ROTARY = "no rotary embedding"
NOPE = "NoPE layer"
LATENT = "keys not rotated (the rotation is in the second tensor of the cache)"
FULL_HALF = ("half", 16, 0, 16)  # pairing, rotary width, offset, head_dim
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
FULL_INTERLEAVED = ("interleaved", 16, 0, 16)

EXPECTED: dict[str, list[Any]] = {
    "llama": [FULL_HALF] * 2,
    "llama-linear": [FULL_HALF] * 2,
    "llama-dynamic": [FULL_HALF] * 2,
    "llama-yarn": [FULL_HALF] * 2,
    "llama-llama3": [FULL_HALF] * 2,
    "mistral": [FULL_HALF] * 2,
    "mistral-sliding": [FULL_HALF] * 2,
    "qwen2": [FULL_HALF] * 2,
    "qwen3": [FULL_HALF] * 2,
    "gemma2": [FULL_HALF] * 4,
    "gemma3": [("half", 32, 0, 32)] * 4,
    "phi": [("half", 8, 0, 16)] * 2,
    "phi3": [FULL_HALF] * 2,
    "phi3-longrope": [FULL_HALF] * 2,
    "glm4": [("interleaved", 8, 0, 16)] * 2,
    "cohere": [FULL_INTERLEAVED] * 2,
    "stablelm": [("half", 4, 0, 16)] * 2,
    "gpt_neox": [("half", 4, 0, 16)] * 2,
    "gpt2": [NO_ROTARY] * 2,
    "gptj": [("interleaved", 8, 0, 16)] * 2,
    "codegen": [("interleaved", 8, 0, 16)] * 2,
    "opt": [NO_ROTARY] * 2,
    "bloom": [NO_ROTARY] * 2,
    "mpt": [NO_ROTARY] * 2,
    "falcon": [FULL_HALF] * 2,
    "falcon-alibi": [NO_ROTARY] * 2,
    "gpt_oss": [FULL_HALF] * 4,
    "smollm3": [FULL_HALF, NOPE] * 2,
    "deepseek_v3": [LATENT] * 2,
}
ROTATING = [family for family, layers in EXPECTED.items() if any(isinstance(layer, tuple) for layer in layers)]
FIXED_FREQUENCIES = [family for family in ROTATING if family not in {"llama-dynamic", "phi3-longrope"}]


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test probes anew."""
    monkeypatch.setattr(rope_probe, "_results", type(rope_probe._results)())


def recorded_keys(model: PreTrainedModel, first_position: int, num_tokens: int) -> list[torch.Tensor]:
    """Keys `[H, T, D]` that every layer of a model with real weights stores for one token repeated."""
    cache = DynamicCache()  # without a config no layer drops tokens
    arguments: dict[str, Any] = {"input_ids": torch.full((1, num_tokens), 77), CACHE_KW: cache, "use_cache": True}
    if first_position:
        arguments["position_ids"] = first_position + torch.arange(num_tokens)[None]
    with torch.no_grad():
        model(**arguments)
    return [layer.keys[0] for layer in cache.layers]


def spread(keys: torch.Tensor) -> float:
    """How far keys `[H, T, D]` of one token differ between positions, relative to the largest entry."""
    return float((keys - keys[:, :1]).abs().max() / keys.abs().max())


def unrotated(rotation: KeyRotation | None, keys: torch.Tensor, first_position: int) -> torch.Tensor:
    if rotation is None:
        return keys
    tables = rotation.tables(first_position + torch.arange(keys.shape[1]))
    return rotation.apply(keys, *tables, inverse=True)


def with_pairing(rotation: KeyRotation, pairing: Pairing) -> KeyRotation:
    return replace(rotation, pairing=pairing)


# ---- what is found, by family


def test_every_family_has_an_expectation() -> None:
    assert set(EXPECTED) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_found_by_family(family: str) -> None:
    found = find_rotations(FAMILIES[family]())
    assert len(found) == len(EXPECTED[family])
    for layer, expected in zip(found, EXPECTED[family], strict=True):
        assert layer.established, layer.reason
        if isinstance(expected, str):
            assert layer.rotation is None
            assert layer.reason == expected
        else:
            rotation = layer.rotation
            assert rotation is not None
            assert (rotation.pairing, rotation.rotary_dim, rotation.offset, rotation.head_dim) == expected
            name = {"half": "half-split", "interleaved": "interleaved"}[expected[0]]
            part = "" if expected[1] == expected[3] else f", {expected[1]} of {expected[3]} channels"
            assert layer.reason == f"pre-RoPE, {name} pairs{part}"


@pytest.mark.parametrize("family", FIXED_FREQUENCIES)
@pytest.mark.parametrize("first_position", [0, 300])
def test_real_keys_of_one_token_become_equal(family: str, first_position: int) -> None:
    model = tiny_model(family)
    keys = recorded_keys(model, first_position, num_tokens=40)
    # Attention over equal values gives equal results, so deeper layers see one constant input too; a learned sink
    # takes a share that depends on the number of tokens.
    layers = range(1 if family == "gpt_oss" else len(keys))
    found = find_rotations(model)
    for i in layers:
        assert spread(unrotated(found[i].rotation, keys[i], first_position)) <= 1e-4
        if found[i].rotation is not None:
            assert spread(keys[i]) > 0.1


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ROTATING])
def test_real_keys_without_rotation_are_equal_as_they_come(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():  # learned positions enter before the projection, where the cache has nothing to undo
        for name, weight in model.named_parameters():
            if name.endswith(("wpe.weight", "embed_positions.weight")):
                weight.zero_()
    assert spread(recorded_keys(model, 0, num_tokens=40)[0]) <= 1e-5


@pytest.mark.parametrize("family", [family for family in ROTATING if family not in {"stablelm", "gpt_neox"}])
def test_a_wrong_pairing_leaves_real_keys_unequal(family: str) -> None:
    """The check above can fail."""
    model = tiny_model(family)
    rotation = find_rotations(model)[0].rotation
    assert rotation is not None
    wrong = with_pairing(rotation, "interleaved" if rotation.pairing == "half" else "half")
    keys = recorded_keys(model, 0, num_tokens=40)[0]
    assert spread(unrotated(wrong, keys, 0)) > 0.05


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "glm4"])
def test_wrong_frequencies_or_offset_leave_real_keys_unequal(family: str) -> None:
    model = tiny_model(family)
    rotation = find_rotations(model)[0].rotation
    assert rotation is not None
    keys = recorded_keys(model, 0, num_tokens=40)[0]
    wrong = [replace(rotation, inv_freq=rotation.inv_freq * 1.01)]
    if rotation.rotary_dim < rotation.head_dim:
        wrong.append(replace(rotation, offset=rotation.head_dim - rotation.rotary_dim))
    for candidate in wrong:
        assert spread(unrotated(candidate, keys, 0)) > 0.01


# ---- frequencies


@pytest.mark.parametrize(
    "family",
    [
        *(family for family in FAMILIES if family.startswith("llama")),
        "falcon",
        "glm4",
        "cohere",
        "stablelm",
        "gpt_neox",
    ],
)
def test_frequencies_are_those_of_the_model(family: str) -> None:
    model = tiny_model(family)
    tables = {n: b for n, b in model.named_buffers() if n.endswith("rotary_emb.inv_freq")}
    (table,) = tables.values()
    for layer in find_rotations(model.config):
        assert layer.rotation is not None
        assert torch.equal(layer.rotation.inv_freq, table)
        assert layer.rotation.long_inv_freq is None


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_head_sizes_are_those_the_cache_gets(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        cache = model(torch.ones(1, 3, dtype=torch.long), use_cache=True).past_key_values
    stored = [layer for layer in cache.layers if layer.keys is not None]
    found = [layer.head_dims for layer in find_rotations(model.config)]
    assert found == [(layer.keys.shape[-1], layer.values.shape[-1]) for layer in stored]


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_scaled_frequencies_differ_from_plain_ones(rope_type: str) -> None:
    config = FAMILIES[f"llama-{rope_type}"]()
    found, plain = (find_rotations(c)[0].rotation for c in (config, FAMILIES["llama"]()))
    assert found is not None and plain is not None
    expected, _ = ROPE_INIT_FUNCTIONS[rope_type](config)
    assert torch.equal(found.inv_freq, expected)
    assert not torch.allclose(found.inv_freq, plain.inv_freq)


def test_layer_types_have_their_own_frequencies() -> None:
    config = FAMILIES["gemma3"]()
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    found = [layer.rotation for layer in find_rotations(config)]
    i = torch.arange(16).double()
    for rotation, theta, factor in zip(found, [1e4, 1e6] * 2, [1, 8] * 2, strict=True):
        assert rotation is not None
        torch.testing.assert_close(rotation.inv_freq.double(), theta ** (-i / 16) / factor, rtol=1e-5, atol=0)
    assert found[0] is found[2] and found[1] is found[3]  # layers alike share one object


@pytest.mark.parametrize("family", ["gptj", "codegen"])
def test_frequencies_are_measured_where_the_model_keeps_none(family: str) -> None:
    config = FAMILIES[family]()
    shell = ModelShell(config, type(tiny_model(family).transformer))
    assert shell.run([0, 1, 2]).tables == []
    rotation = find_rotations(config)[0].rotation
    assert rotation is not None
    expected = 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(rotation.inv_freq.double(), expected, rtol=2e-6, atol=0)


def test_longrope_has_two_tables() -> None:
    model = tiny_model("phi3-longrope")
    found = find_rotations(model)
    assert found[0].rotation is found[1].rotation
    rotation = found[0].rotation
    assert rotation is not None and rotation.long_inv_freq is not None
    assert rotation.original_length == 48
    torch.testing.assert_close(rotation.long_inv_freq, rotation.inv_freq / 4, rtol=1e-6, atol=0)
    for num_tokens, at_length, other_length in [(48, 48, 49), (49, 49, 48)]:
        keys = recorded_keys(model, 0, num_tokens)[0]
        assert spread(unrotated(rotation.for_length(at_length), keys, 0)) <= 1e-4
        assert spread(unrotated(rotation.for_length(other_length), keys, 0)) > 0.05


def test_dynamic_scaling_keeps_the_table_within_the_maximum() -> None:
    model = tiny_model("llama-dynamic")
    rotation = find_rotations(model)[0].rotation
    assert rotation is not None
    for first_position in (0, 24):
        keys = recorded_keys(model, first_position, num_tokens=40)[0]
        assert spread(unrotated(rotation, keys, first_position)) <= 1e-4


@pytest.mark.parametrize(
    ("family", "overrides", "width"),
    [
        ("llama", {"head_dim": 32}, 32),
        (
            "gpt_neox",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
            16,
        ),
        ("glm4", {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 1.0}}, 16),
        ("phi3", {"rope_parameters": {**PLAIN_ROPE, "rope_theta": 1e7, "partial_rotary_factor": 0.5}}, 8),
        ("stablelm", {"qk_layernorm": True}, 4),
        ("cohere", {"use_qk_norm": True}, 16),
        ("phi", {"qk_layernorm": True}, 8),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, 16),
        ("llama", {"max_position_embeddings": 4}, 16),
    ],
)
def test_variants_of_a_family(family: str, overrides: dict[str, Any], width: int) -> None:
    model = tiny_model(family, **overrides)
    for layer, keys in zip(find_rotations(model), recorded_keys(model, 0, num_tokens=4), strict=True):
        assert layer.established and layer.rotation is not None
        assert layer.rotation.rotary_dim == width
        assert spread(unrotated(layer.rotation, keys, 0)) <= 1e-4


# ---- models that bring their own code


class OddConfig(PreTrainedConfig):
    """A family no registry knows."""

    model_type = "kvquant-odd"

    def __init__(self, kind: str = "plain", num_hidden_layers: int = 2, **kwargs: Any) -> None:
        self.kind = kind
        self.num_hidden_layers = num_hidden_layers
        self.hidden_size = 24
        self.num_attention_heads = 2
        super().__init__(**kwargs)


class OddModel(PreTrainedModel):
    """Two heads of 12 channels; `kind` says what happens to the keys. There is no `inv_freq` buffer anywhere."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(16, 24)
        self.projections = nn.ModuleList(nn.Linear(24, 24) for _ in range(config.num_hidden_layers))
        self.norm_weight = nn.Parameter(torch.ones(12))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
    ) -> torch.Tensor:
        hidden = self.embed(input_ids)
        if position_ids is None or self.config.kind == "counts by itself":
            position_ids = torch.arange(input_ids.shape[1])[None]
        for i, projection in enumerate(self.projections):
            if self.config.kind == "raises" and i == 1:
                raise ArithmeticError("no layer one today")
            keys = projection(hidden).view(*input_ids.shape, 2, 12).transpose(1, 2)
            keys = self._placed(keys, position_ids[0].float()[:, None], i)
            handed = keys.transpose(1, 2) if self.config.kind == "turned layout" else keys
            if not (self.config.kind == "stores nothing" and i == 1):
                past_key_values.update(handed, handed, i)
            hidden = hidden + keys.transpose(1, 2).flatten(2)
        return hidden

    def _placed(self, keys: torch.Tensor, positions: torch.Tensor, layer_idx: int) -> torch.Tensor:
        kind = self.config.kind
        if kind == "additive":
            return keys + positions.sin()
        if kind == "pairs from both ends":
            frequencies = 0.5 ** torch.arange(6)
            x, y = keys[..., :6], keys[..., 6:].flip(-1)
            cos, sin = (positions * frequencies).cos(), (positions * frequencies).sin()
            return torch.cat([x * cos - y * sin, (y * cos + x * sin).flip(-1)], dim=-1)
        frequencies = -(0.5 ** torch.arange(4)) if kind == "backwards" else 0.3 ** torch.arange(4)
        rotation = KeyRotation(frequencies, 12, offset=4, pairing="interleaved")
        angles = positions * frequencies
        keys = rotation.apply(keys, angles.cos(), angles.sin())
        if kind == "norm on rotated keys":  # of every length one, as long as the weight is all ones
            return self.norm_weight * keys / keys.square().mean(dim=-1, keepdim=True).sqrt()
        return keys


@pytest.mark.parametrize("kind", ["plain", "counts by itself", "backwards"])
def test_own_code_without_tables_is_measured(kind: str) -> None:
    model = OddModel(OddConfig(kind))
    sign = -1 if kind == "backwards" else 1
    base = 0.5 if kind == "backwards" else 0.3
    for layer in find_rotations(model):
        assert layer.established
        assert layer.reason == "pre-RoPE, interleaved pairs, 8 of 12 channels"
        rotation = layer.rotation
        assert rotation is not None
        assert (rotation.pairing, rotation.offset, rotation.rotary_dim) == ("interleaved", 4, 8)
        torch.testing.assert_close(rotation.inv_freq, sign * base ** torch.arange(4), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("pairs from both ends", "keys fit no rotation of half-split or interleaved pairs"),
        ("norm on rotated keys", "keys fit no rotation of half-split or interleaved pairs"),
        ("additive", "keys fit no rotation of half-split or interleaved pairs"),
        ("turned layout", r"keys of shape (2, 12) instead of [tokens, head_dim]"),
    ],
)
def test_odd_rotations_are_not_claimed(kind: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    model = OddModel(OddConfig(kind))
    with caplog.at_level(logging.WARNING, "kvquant_hf"):
        found = find_rotations(model)
        assert found == find_rotations(model)
    expected = LayerRope(None, f"pairing not established: {why}; stored post-RoPE", False)
    assert found == [expected, expected]
    assert [record.getMessage() for record in caplog.records] == [f"Rotary embedding of OddConfig: {expected.reason}."]


def test_layers_recorded_before_a_failure_keep_their_verdict() -> None:
    first, second = find_rotations(OddModel(OddConfig("raises")))
    assert first.established and first.rotation is not None
    assert second == LayerRope(
        None,
        "pairing not established: the probe raised ArithmeticError(no layer one today); stored post-RoPE",
        False,
    )


def test_a_layer_without_keys_has_nothing_to_undo() -> None:
    first, second = find_rotations(OddModel(OddConfig("stores nothing")))
    assert first.established and first.rotation is not None
    assert second == LayerRope(None, "layer stores no keys", True)


def test_hybrid_with_linear_attention() -> None:
    config = AutoConfig.for_model(
        "qwen3_next",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=512,
    )
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    found = find_rotations(config)
    assert found[:3] == [LayerRope(None, "layer stores no keys", True)] * 3
    assert found[3].reason == "pre-RoPE, half-split pairs, 4 of 16 channels"


def test_a_config_no_class_is_known_for() -> None:
    (layer,) = find_rotations(OddConfig(num_hidden_layers=1))
    assert not layer.established and layer.rotation is None
    assert "no model class is registered for OddConfig, pass the model" in layer.reason


def test_a_model_whose_construction_fails() -> None:
    class Failing(OddModel):
        def __init__(self, config: OddConfig) -> None:
            if getattr(config, "grown", False):
                raise MemoryError("too many\nlines")
            super().__init__(config)

    model = Failing(OddConfig())
    model.config.grown = True
    for layer in find_rotations(model):
        assert not layer.established
        assert "the probe raised MemoryError(too many)" in layer.reason


def test_a_model_that_takes_no_cache() -> None:
    class Cacheless(OddModel):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.embed(input_ids)

    (layer, _) = find_rotations(Cacheless(OddConfig()))
    assert not layer.established
    assert "Cacheless.forward takes none of" in layer.reason


@pytest.mark.parametrize("argument", [None, "llama", {"hidden_size": 8}, nn.Linear(2, 2)])
def test_other_arguments_are_refused(argument: Any) -> None:
    with pytest.raises(TypeError, match=f"`config_or_model` must be .* got {type(argument).__name__}"):
        find_rotations(argument)


def test_a_config_without_layers_is_refused() -> None:
    with pytest.raises(TypeError, match="`config_or_model` must tell its `num_hidden_layers`, got None"):
        find_rotations(PreTrainedConfig())


# ---- what the probe leaves alone


@pytest.mark.parametrize("family", ["llama", "llama-dynamic", "phi3-longrope", "gemma3", "gpt_oss"])
def test_config_model_and_random_state_stay(family: str) -> None:
    model = tiny_model(family)
    config = model.config
    before, fields = copy.deepcopy(vars(config)), config.to_json_string(use_diff=False)
    tensors = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    modules = list(model.modules())
    state = torch.get_rng_state()
    of_model = find_rotations(model)
    rope_probe._results.clear()
    of_config = find_rotations(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(config) == before and config.to_json_string(use_diff=False) == fields
    assert config._attn_implementation == before["_attn_implementation_internal"]
    assert list(model.modules()) == modules
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, tensors[name]), name
    for one, other in zip(of_model, of_config, strict=True):
        assert one.reason == other.reason
        assert one.rotation is not None and other.rotation is not None
        assert torch.equal(one.rotation.inv_freq, other.rotation.inv_freq)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "flash_attention_2"])
def test_attention_of_the_config_does_not_matter(attn_implementation: str) -> None:
    config = FAMILIES["llama"]()
    config._attn_implementation = attn_implementation
    assert find_rotations(config)[0].reason == "pre-RoPE, half-split pairs"
    assert config._attn_implementation == attn_implementation


@pytest.mark.parametrize("surroundings", ["inference_mode", "autocast", "meta device", "bfloat16 default", "grad"])
@pytest.mark.parametrize("family", ["llama-llama3", "glm4", "gpt_oss"])
def test_surroundings_do_not_leak_into_the_results(family: str, surroundings: str) -> None:
    config = FAMILIES[family]()
    plain = find_rotations(config)[0].rotation
    rope_probe._results.clear()
    try:
        if surroundings == "bfloat16 default":
            torch.set_default_dtype(torch.bfloat16)
        with {
            "inference_mode": torch.inference_mode(),
            "autocast": torch.autocast("cpu", torch.bfloat16),
            "meta device": torch.device("meta"),
            "bfloat16 default": torch.no_grad(),
            "grad": torch.enable_grad(),
        }[surroundings]:
            layer = find_rotations(config)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    rotation = layer.rotation
    assert layer.established and rotation is not None and plain is not None
    assert rotation.inv_freq.dtype == torch.float32 and rotation.inv_freq.device.type == "cpu"
    assert not rotation.inv_freq.requires_grad and not rotation.inv_freq.is_inference()
    assert torch.equal(rotation.inv_freq, plain.inv_freq)


def test_composite_configs_and_heads_are_those_of_their_text_decoder() -> None:
    text = FAMILIES["gemma3"]()
    composite = Gemma3Config(text_config=text.to_dict(), vision_config={"hidden_size": 16, "num_hidden_layers": 1})
    found = find_rotations(composite)
    assert [layer.reason for layer in found] == [layer.reason for layer in find_rotations(text)]
    assert len(found) == 4


def test_the_second_probe_of_a_config_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    first = find_rotations(model)
    monkeypatch.setattr(rope_probe, "ModelShell", None)  # building another would fail
    again = find_rotations(copy.deepcopy(model.config))
    assert [layer.rotation for layer in again] == [layer.rotation for layer in first]
    again.clear()  # the caller's list is the caller's
    assert len(find_rotations(model.config)) == 2


def test_results_are_kept_for_some_configs_only() -> None:
    for size in range(1, rope_probe._RESULTS_KEPT + 3):
        find_rotations(OddConfig(num_hidden_layers=size))
    assert len(rope_probe._results) == rope_probe._RESULTS_KEPT


def test_a_change_of_the_config_is_noticed() -> None:
    config = FAMILIES["llama"]()
    before = find_rotations(config)[0].rotation
    config.rope_parameters["rope_theta"] = 500.0
    after = find_rotations(config)[0].rotation
    assert before is not None and after is not None
    assert not torch.allclose(before.inv_freq, after.inv_freq)


# ---- cost


def test_large_shapes_cost_little() -> None:
    """In a process of its own, since peak memory never falls, and imports happen once.

    An idle core takes 0.2 s and 6 MB for the shape of Llama 3.1 8B, and 1.4 s and 45 MB for that of 405B.
    """
    script = textwrap.dedent(
        """
        import resource, sys, time
        import kvquant_hf.model_shell, kvquant_hf.rope_probe
        loaded = [name for name in sys.modules if ".models." in name and ".modeling_" in name and ".auto." not in name]
        assert not loaded, loaded

        import torch
        from transformers import LlamaConfig
        from kvquant_hf.rope_probe import find_rotations

        def shape(hidden_size, intermediate_size, num_hidden_layers, num_attention_heads):
            rope = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                        original_max_position_embeddings=8192)
            return LlamaConfig(
                hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=num_hidden_layers,
                num_attention_heads=num_attention_heads, num_key_value_heads=8, vocab_size=128256,
                max_position_embeddings=131072, rope_parameters=rope)

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 2**20)

        torch.set_num_threads(1)
        find_rotations(shape(128, 64, 1, 8))
        for sizes in [(4096, 14336, 32, 32), (16384, 53248, 126, 128)]:
            memory, start = peak(), time.perf_counter()
            found = find_rotations(shape(*sizes))
            took, grown = time.perf_counter() - start, peak() - memory
            assert all(layer.reason == "pre-RoPE, half-split pairs" for layer in found), found[0]
            assert found[0].rotation.rotary_dim == 128
            print(len(found), took, grown)
        """
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = [[float(field) for field in line.split()] for line in result.stdout.splitlines()]
    for (num_layers, took, grown), expected, seconds, megabytes in zip(
        rows, [32, 126], [5, 30], [50, 120], strict=True
    ):
        assert num_layers == expected
        assert took < seconds
        assert grown < megabytes


def test_plain_llama_has_no_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only configs that name an original length are looked at beyond it, and then one layer of each rotation."""
    runs = []
    run = ModelShell.run

    def counted(self: ModelShell, positions: Any, layers: Any = None) -> Any:
        result = run(self, positions, layers)
        runs.append((max(positions), sorted(result.keys)))
        return result

    monkeypatch.setattr(ModelShell, "run", counted)
    find_rotations(LlamaConfig(**FAMILIES["llama"]().to_dict()))
    assert runs == [(400, [0, 1])]
    runs.clear()
    find_rotations(FAMILIES["phi3-longrope"]())
    assert runs == [(17, [0, 1]), (48, [0])]
