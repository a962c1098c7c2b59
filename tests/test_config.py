"""Settings: validation, overrides, round trips, presets."""

import copy
import pickle
import types

import pytest
import yaml

from kvquant_hf import KVQuantConfig, QuantSpec, list_presets
from kvquant_hf.config import BACKENDS
from kvquant_hf.quantizers import QUANTIZERS
from kvquant_hf.spec import GROUP_SIZES, LEVELS, METHODS, NBITS, ROTATIONS, SHARED_GROUPS, SHARED_PARAMETERS

PRESETS = [
    "dense",
    "fp8",
    "innerq3",
    "k2v2",
    "k2v3",
    "k3v2",
    "k3v3",
    "k3v4",
    "k4v2",
    "k4v3",
    "k4v4",
    "k8v8",
    "kivi-int2",
    "kivi-int4",
    "kvarn2",
    "kvquant2",
    "kvquant3",
    "nvfp4",
    "rotatekv2",
    "turboquant2",
    "turboquant3",
    "turboquant4",
]


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("nbits", 5, NBITS),
        ("nbits", 0, NBITS),
        ("nbits", 4.0, NBITS),
        ("nbits", "4", NBITS),
        ("group_size", 0, GROUP_SIZES),
        ("group_size", 48, GROUP_SIZES),
        ("granularity", "per_chanel", ("per_channel", "per_token")),
        ("rope", "none", ("pre", "post")),
        ("rotation", "haar", ROTATIONS),
        ("method", "afine", METHODS),
        ("symmetric", 1, (False, True)),
        ("clip", "max", ("minmax", "mse")),
        ("levels", "gausian", LEVELS),
        ("shared_groups", 8, SHARED_GROUPS),
        ("shared_parameter", "scales", SHARED_PARAMETERS),
    ],
)
def test_bad_spec_names_argument_allowed_and_received(setting, value, allowed):
    with pytest.raises(ValueError) as error:
        QuantSpec(**{setting: value})
    text = str(error.value)
    assert f"`{setting}` must be one of {allowed}, got {value!r}." in text


def test_a_typo_in_a_value_is_answered_with_the_nearest_word():
    with pytest.raises(ValueError, match="Did you mean 'per_channel'"):
        QuantSpec(granularity="per_chanel")


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "128"])
@pytest.mark.parametrize("setting", ["residual_length", "sink_length"])
def test_lengths_are_checked(setting, value):
    with pytest.raises(ValueError, match=rf"`{setting}` must be an integer >= 0, got"):
        KVQuantConfig(**{setting: value})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"residual_lenght": 3}, r"no setting 'residual_lenght'.*Did you mean 'residual_length'"),
        ({"key": {"nbit": 3}}, r"`key` has no setting 'nbit'.*Did you mean 'nbits'"),
        ({"key": 4}, r"`key` must be a QuantSpec, got 4"),
        ({"backend": "cuda"}, r"`backend` must be one of"),
        ({"layers": {"0-x": {}}}, r"`layers` keys must be a layer index"),
        ({"layers": {True: {}}}, r"`layers` keys must be a layer index"),
        ({"layers": {0: {"nbits": 4}}}, r"layers\[0\].*no setting 'nbits'"),
        ({"layers": {0: {"key": {"nbits": 5}}}}, r"`nbits` must be one of"),
        ({"layers": [1]}, r"`layers` must map"),
        ([], r"`config` must be a mapping"),
        (None, r"`config` must be a mapping"),
    ],
)
def test_bad_mappings_are_refused(mapping, message):
    with pytest.raises(ValueError, match=message):
        KVQuantConfig.from_dict(mapping)


def test_defaults_follow_the_idea():
    config = KVQuantConfig()
    assert (config.key.granularity, config.key.rope) == ("per_channel", "pre")
    assert config.value.granularity == "per_token"
    assert (config.residual_length, config.sink_length) == (128, 4)


CUSTOM = KVQuantConfig(
    key=QuantSpec(nbits=3, group_size=64, clip="mse"),
    value=QuantSpec(nbits=2, granularity="per_token", rotation="hadamard"),
    residual_length=64,
    layers={0: {"key": {"nbits": 8}}, -1: {"residual_length": 256}, "2-3": {"value": {"nbits": 4}}},
)
LISTED = KVQuantConfig(
    key=QuantSpec(nbits=2, levels=(-1.0, -0.1234567890123, 1e-05, 1)),
    layers={0: {"key": {"levels": [-1, 0, 0.5, 1]}}, 1: {"key": {"nbits": 3, "levels": "gaussian"}}},
)


@pytest.mark.parametrize("config", [*map(KVQuantConfig.from_preset, PRESETS), CUSTOM, LISTED])
def test_round_trips(config, tmp_path):
    assert KVQuantConfig.from_dict(config.to_dict()) == config
    config.to_yaml(tmp_path / "c.yaml")
    assert KVQuantConfig.from_yaml(tmp_path / "c.yaml") == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert hash(copy.copy(config)) == hash(config)


def test_inputs_are_not_changed():
    mapping = {"key": {"nbits": 2}, "layers": {0: {"key": {"nbits": 8}}}}
    before = copy.deepcopy(mapping)
    config = KVQuantConfig.from_dict(types.MappingProxyType(mapping))
    assert mapping == before
    mapping["layers"][0]["key"]["nbits"] = 3
    assert config.for_layer(0, 2, "full_attention").key.nbits == 8
    with pytest.raises(TypeError):
        config.layers[0] = {}


def test_layer_overrides_by_index_range_and_type():
    assert CUSTOM.for_layer(0, 6, "full_attention").key.nbits == 8
    assert CUSTOM.for_layer(1, 6, "full_attention").key.nbits == 3
    assert [CUSTOM.for_layer(i, 6, "full_attention").value.nbits for i in range(6)] == [2, 2, 4, 4, 2, 2]
    assert CUSTOM.for_layer(5, 6, "full_attention").residual_length == 256
    typed = KVQuantConfig(layers={"full_attention": {"sink_length": 0}, 1: {"sink_length": 9}})
    assert [typed.for_layer(i, 2, "full_attention").sink_length for i in range(2)] == [0, 9]
    assert typed.for_layer(0, 2, "chunked_attention").sink_length == 4


@pytest.mark.parametrize("selector", [6, -7, "4-6", "5-4"])
def test_layers_that_do_not_exist_are_named(selector):
    config = KVQuantConfig(layers={selector: {"sink_length": 0}})
    with pytest.raises(ValueError, match=r"this model has layers 0 to 5"):
        config.check_layers(6, ["full_attention"] * 6)


def test_layer_types_that_do_not_exist_are_named():
    config = KVQuantConfig(layers={"ful_attention": {"sink_length": 0}})
    with pytest.raises(ValueError, match=r"'ful_attention'.*Did you mean 'full_attention'"):
        config.check_layers(6, ["full_attention"] * 6)


def test_presets_are_the_announced_ones_and_describe_themselves():
    presets = list_presets()
    assert sorted(presets) == PRESETS
    assert "(4.58008 bits per value)" in presets["k4v4"]
    assert "(3 bits per value)" in presets["kivi-int2"]


def test_kivi_presets_have_the_settings_of_the_paper():
    for nbits in (2, 4):
        config = KVQuantConfig.from_preset(f"kivi-int{nbits}")
        assert config.key == QuantSpec(nbits, "per_channel", 32, rope="post")
        assert config.value == QuantSpec(nbits, "per_token", 32, rope="post")
        assert (config.residual_length, config.sink_length) == (128, 0)


def test_an_unknown_preset_is_answered_with_all_of_them():
    with pytest.raises(ValueError, match=r"dense, fp8, innerq3, .*got 'k4v5'\. Did you mean 'k4v4'"):
        KVQuantConfig.from_preset("k4v5")


def test_files_that_are_no_configuration_are_named(tmp_path):
    path = tmp_path / "bad.yaml"
    for text in ("key: [", "residual: 3", "- 1"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"bad\.yaml is no cache configuration"):
            KVQuantConfig.from_yaml(path)
    with pytest.raises(FileNotFoundError):
        KVQuantConfig.from_yaml(tmp_path / "none.yaml")


def test_everything_a_cache_takes_resolves(tmp_path):
    path = tmp_path / "mine.yaml"
    CUSTOM.to_yaml(path)
    for quant in (path, str(path), CUSTOM, CUSTOM.to_dict(), yaml.safe_load(CUSTOM.to_yaml())):
        assert KVQuantConfig.resolve(quant) == CUSTOM
    assert KVQuantConfig.resolve("k4v4", key={"nbits": 8}).key.nbits == 8
    with pytest.raises(ValueError, match="`quant` must be a preset name"):
        KVQuantConfig.resolve(4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_name_is_accepted_in_settings(backend):
    assert KVQuantConfig(backend=backend).backend == backend


def test_every_method_is_registered():
    assert set(METHODS) == set(QUANTIZERS)


def test_tiles_have_as_many_tokens_as_a_group_and_their_factors_count():
    side = {"nbits": 2, "group_size": 128, "method": "variance_normalized"}
    config = KVQuantConfig().replace(key=side, value=side)
    assert config.block_length == 128
    assert config.key.metadata_bits(64) == 32 / 128 + 16 / 64
    assert config.value.metadata_bits(64, 128) == 32 / 64 + 16 / 128
    assert config.nominal_bits(64) == 2.5625
    assert config.nominal_bits(128) == 2.375
    values_only = KVQuantConfig().replace(value=side)
    assert (values_only.block_length, values_only.key.has_factor, values_only.value.has_factor) == (128, False, True)
    assert KVQuantConfig().replace(key=side | {"group_size": 64}, value=side).block_length == 128
    assert not QuantSpec(16, method="variance_normalized").has_factor


def test_metadata_bits_count_short_groups():
    assert QuantSpec(4, "per_channel", 32).metadata_bits(80) == 1.0
    assert QuantSpec(4, "per_token", 32).metadata_bits(80) == pytest.approx(32 * 3 / 80)
    assert QuantSpec(4, "per_token", 32, symmetric=True).metadata_bits(64) == 0.5
    assert QuantSpec(16, "per_token", 32).metadata_bits(64) == 0.0


def test_an_override_may_rest_on_an_earlier_one():
    order = list(range(16))[::-1]
    turned, ordered = {"key": {"rotation": "hadamard"}}, {"key": {"channel_order": order}}
    config = KVQuantConfig(layers={"0-1": turned, 0: ordered})
    keys = [config.for_layer(layer, 2, "full_attention").key for layer in (0, 1)]
    assert [spec.channel_order for spec in keys] == [tuple(order), ()]
    assert {spec.rotation for spec in keys} == {"hadamard"}
    assert KVQuantConfig.from_dict(config.to_dict()) == config
    # Where it comes first, or for a layer that the other one does not select, it has nothing to rest on.
    with pytest.raises(ValueError, match="`channel_order` must be"):
        KVQuantConfig(layers={0: ordered, "0-1": turned})
    apart = KVQuantConfig(layers={1: turned, 0: ordered})
    with pytest.raises(ValueError, match="`channel_order` must be"):
        apart.for_layer(0, 2, "full_attention")


def test_configs_are_equal_where_they_mean_the_same():
    first, second = {0: {"key": {"nbits": 8}}}, {"0-1": {"key": {"nbits": 2, "group_size": 16}}}
    config = KVQuantConfig(layers=first | second)
    same = KVQuantConfig(layers={0: {"key": {"nbits": 8}}, "0-1": {"key": {"group_size": 16, "nbits": 2}}})
    assert config == same and hash(config) == hash(same)
    other = KVQuantConfig(layers=second | first)
    assert config != other
    assert config.for_layer(0, 2, "full_attention").key.nbits == 2
    assert other.for_layer(0, 2, "full_attention").key.nbits == 8
    assert config != config.replace(outlier_guard=8.0) and config != "k4v4"
