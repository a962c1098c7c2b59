"""Budgets on tiny random models: each kind met, refused where it cannot be, predictions corrected, sizes exact."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import yaml
from models import ROOT
from tiny_models import VOCAB_SIZE, tiny_model

from kvquant_hf import KVQuantConfig, QuantCache
from kvquant_hf.analysis import Budget, Candidates, Meter, calibrate, default_candidates, load_candidates
from kvquant_hf.analysis import calibration as calibration_module
from kvquant_hf.analysis.allocation import Factors, Problem
from kvquant_hf.analysis.budget import amount
from kvquant_hf.analysis.layer_settings import allocation_config
from kvquant_hf.analysis.sizes import SizeTable
from kvquant_hf.eval import Protocol, replayed_bits
from kvquant_hf.eval.bits import model_shapes
from kvquant_hf.eval.score_store import FileStore
from kvquant_hf.spec import QuantSpec

PROTOCOL = Protocol(128, 64, 64)
FRAME = KVQuantConfig(residual_length=32, sink_length=4)
KEY, VALUE = FRAME.key, FRAME.value
FEW = Candidates(
    {"k2": replace(KEY, nbits=2), "k4": KEY, "k2g16": replace(KEY, nbits=2, group_size=16)},
    {"v2": replace(VALUE, nbits=2), "v4": VALUE, "exact": replace(VALUE, nbits=16)},
)


@pytest.fixture(scope="module")
def make_meter(tmp_path_factory):
    """`make_meter(model, **changes of Meter)`: two windows to calibrate on, one held out; measured once for all."""
    path = tmp_path_factory.mktemp("budgets") / "store.jsonl"

    def make(model, frame=FRAME, **changes):
        windows = torch.randint(3, VOCAB_SIZE, (3, PROTOCOL.context), generator=torch.Generator().manual_seed(1))

        def store(settings):
            configs = {name: config.to_dict() for name, config in settings.items()}
            return FileStore(path, {"model": str(model.config)}, configs)

        return replace(Meter(model, windows[:2], windows[2:], PROTOCOL, 32, frame, store), **changes)

    return make


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def gemma():
    return tiny_model("gemma3", num_hidden_layers=4)


# ---- budgets ---------------------------------------------------------------------------------------------------


each_kind = pytest.mark.parametrize(
    "budget",
    [
        Budget(kl=0.05),
        Budget(key_kl=0.05, value_error=0.2),
        Budget(bits=4.5),
        Budget(bytes=36_000, context_length=200),
    ],
    ids=lambda budget: budget.kind,
)


@each_kind
def test_every_kind_of_budget_is_met(budget, llama, make_meter):
    found = calibrate(make_meter(llama), budget, FEW)
    answer = found.answer
    assert answer.is_met and set(answer.pairs) == {0, 1, 2}
    measured = {**answer.measured, **answer.measured_size}
    for name, limit in budget.limits.items():
        assert 0 < measured[name] <= limit
    assert answer.miss <= 0.2 or len(found.rounds) > 1 or "already" in found.outcome
    assert answer.measured_size == pytest.approx(answer.predicted_size, rel=1e-12)
    assert set(answer.measured) == set(budget.error_names)
    # The settings that were found are those that were measured, and a cache takes them.
    QuantCache(llama, found.config)
    assert found.scores["allocation"].kl > 0 and found.held_out["allocation"].kl > 0
    if budget.kind == "attention":  # each layer is looked at on exact inputs, alone or not
        assert found.rounds[0].miss < 0.05
    else:
        assert found.scores["allocation"].kl == pytest.approx(answer.measured["kl"])
    # No pair shared by all layers is better by the same prediction.
    if found.uniform is not None:
        uniform = found.uniform
        if budget.is_error:
            assert answer.measured_size["bits"] <= uniform.predicted_size["bits"] + 1e-9
        else:
            predicted = found.problem.predicted(answer.pairs, uniform.factors)["kl"]
            assert predicted <= uniform.predicted["kl"] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(bits=2.9), r"`bits` must be at least 3.5 bits per value, the smallest size.*; got 2.9 bits per value"),
        (
            Budget(bytes=9_000, context_length=200),
            r"`bytes` must be at least [\d,]+ bytes, the smallest size.*; got 9,000",
        ),
        (Budget(kl=1e-9), r"`kl` must be at least .* nats, the least predicted error.*; got 1e-09 nats"),
        (Budget(key_kl=1e-9, value_error=1.0), "`key_kl` must be at least .* nats, the least predicted"),
        (Budget(key_kl=9.0, value_error=1e-9), "`value_error` must be at least"),
    ],
    ids=lambda value: value.kind if isinstance(value, Budget) else "",
)
def test_a_budget_that_cannot_be_met_names_the_best(budget, message, llama, make_meter):
    candidates = Candidates(FEW.key, {name: FEW.value[name] for name in ("v2", "v4")})
    with pytest.raises(ValueError, match=message):
        calibrate(make_meter(llama), budget, candidates)


def test_the_best_that_is_named_can_be_reached(llama, make_meter):
    sizes = SizeTable(llama, FRAME, FEW, 200)
    # Shorter blocks leave fewer tokens exact, so that the fewest bits are not the fewest bytes.
    uniform = [dict.fromkeys(sizes.layers, (key, "v2")) for key in ("k2", "k2g16")]
    smallest = min(uniform, key=sizes.memory_bytes)
    least = sizes.memory_bytes(smallest)
    assert smallest is not min(uniform, key=sizes.bits_per_value)
    with pytest.raises(ValueError, match=f"at least {least:,} bytes"):
        calibrate(make_meter(llama), Budget(bytes=least - 1, context_length=200), FEW)
    found = calibrate(make_meter(llama), Budget(bytes=least, context_length=200), FEW)
    assert found.answer.pairs == smallest and found.answer.measured_size["bytes"] == least


def test_a_size_out_of_reach_is_refused_before_anything_is_measured(llama, make_meter, monkeypatch):
    monkeypatch.setattr(Meter, "sensitivities", None)
    with pytest.raises(ValueError, match="`bits` must be at least"):
        calibrate(make_meter(llama), Budget(bits=2.0), FEW)


@each_kind
def test_no_allocation_is_better_by_the_prediction(budget, llama, make_meter):
    sensitivities = make_meter(llama).sensitivities(FEW, of_attention=budget.kind == "attention")
    problem = Problem(budget, FEW, SizeTable(llama, FRAME, FEW, 200), sensitivities, FRAME)
    factors = Factors(0.5, 1.5)
    found = problem.solve(factors)

    def rank(pairs):
        """Size, then error, of an error budget; error alone of a size. `None` outside the budget."""
        errors, size = problem.predicted(pairs, factors), problem.predicted_size(pairs)
        if any({**errors, **size}[name] > limit for name, limit in budget.limits.items()):
            return None
        if not budget.is_error:
            return (errors["kl"],)
        return round(size["bits"], 9), sum(errors[name] / limit for name, limit in budget.limits.items())

    options = list(product(FEW.key, FEW.value))
    ranks = [rank(dict(enumerate(pairs))) for pairs in product(options, repeat=3)]
    assert rank(found) == pytest.approx(min(one for one in ranks if one is not None), rel=1e-9)
    assert None in ranks


def test_only_full_attention_layers_get_settings(gemma, make_meter):
    assert QuantCache(gemma).quantized_layers == (1, 3)
    for budget in (Budget(key_kl=0.05, value_error=0.5), Budget(bytes=60_000, context_length=150)):
        found = calibrate(make_meter(gemma), budget, FEW)
        assert found.answer.is_met and set(found.answer.pairs) == {1, 3}
        assert set(found.config.layers) <= {1, 3}


def test_windows_that_hide_all_codes_are_refused(llama, make_meter):
    for budget in (Budget(bits=5.0), Budget(kl=0.1), Budget(key_kl=0.1, value_error=0.1)):
        with pytest.raises(ValueError, match="No token of a window of 128 would be read from codes"):
            calibrate(make_meter(llama, frame=FRAME.replace(residual_length=128)), budget, FEW)


def test_exact_candidates_count_sixteen_bits(llama, make_meter):
    exact = Candidates({"exact": replace(KEY, nbits=16)}, {"exact": replace(VALUE, nbits=16)})
    for budget in (Budget(kl=0.1), Budget(key_kl=0.1, value_error=0.1)):
        found = calibrate(make_meter(llama), budget, exact)
        assert found.answer.measured_size["bits"] == found.answer.predicted_size["bits"] == 16
        assert max(found.answer.measured.values()) < 1e-6
    mixed = Candidates({"k4": KEY} | dict(exact.key), exact.value)
    found = calibrate(make_meter(llama), Budget(key_kl=1e-4, value_error=1e-4), mixed)
    assert found.answer.measured == pytest.approx(found.answer.predicted, abs=1e-9)


# ---- corrected predictions -------------------------------------------------------------------------------------


class Bent(Meter):
    """Errors measured together are other than the sum of those measured alone."""

    factor = 3.0

    def scores(self, settings, held_out=False):
        scores = super().scores(settings, held_out)
        bent = {"the allocation": self.factor, "its keys alone": 2.0, "its values alone": 1.0}
        return {name: replace(score, kl=score.kl * bent.get(name, 1.0)) for name, score in scores.items()}


def bent_meter(make_meter, model):
    return Bent(**vars(make_meter(model)))


def test_a_missed_prediction_is_corrected_and_solved_again(llama, make_meter):
    found = calibrate(bent_meter(make_meter, llama), Budget(kl=0.2), FEW)
    first, second = found.rounds[:2]
    assert first.factors == Factors() and first.miss > 0.2
    # The factors make the first prediction right, and tell keys from values.
    corrected = found.problem.predicted(first.pairs, second.factors)["kl"]
    assert corrected == pytest.approx(first.measured["kl"])
    key, value = found.problem.sensitivities.sums(first.pairs)
    together = first.measured["kl"] / sum(first.sides)
    assert second.factors.key == pytest.approx(together * first.sides[0] / key)
    assert second.factors.value == pytest.approx(together * first.sides[1] / value)
    assert not first.is_met and found.answer.is_met and found.answer.measured["kl"] <= 0.2
    assert found.answer.predicted_size["bits"] > first.predicted_size["bits"]


def test_rounds_are_bounded_and_a_missed_budget_is_told(llama, make_meter):
    found = calibrate(bent_meter(make_meter, llama), Budget(kl=0.2), FEW, most_rounds=1)
    assert len(found.rounds) == 1 and not found.answer.is_met
    assert found.outcome == "no more rounds than 1 were allowed"
    with pytest.raises(ValueError, match="`most_rounds` must be an integer >= 1, got 0"):
        calibrate(make_meter(llama), Budget(kl=0.2), FEW, most_rounds=0)


def test_the_first_solution_stands_where_it_was_right(llama, make_meter, monkeypatch):
    monkeypatch.setattr(calibration_module, "TOLERANCE", math.inf)
    found = calibrate(make_meter(llama), Budget(bits=4.5), FEW)
    assert len(found.rounds) == 1 and found.chosen == 0 and "within" in found.outcome


def test_a_correction_that_leaves_nothing_names_what_it_expects(llama, make_meter):
    meter = bent_meter(make_meter, llama)
    errors = meter.sensitivities(FEW, of_attention=False)
    best = dict.fromkeys(QuantCache(llama).quantized_layers, ("k4", "exact"))
    limit = sum(errors.sums(best)) * 1.01
    with pytest.raises(ValueError, match="least predicted error, its prediction corrected by a measured run"):
        calibrate(meter, Budget(kl=limit), FEW)


# ---- sizes -----------------------------------------------------------------------------------------------------

ODD = Candidates(
    {
        "k3g16": replace(KEY, nbits=3, group_size=16),
        "k2g128": replace(KEY, nbits=2, group_size=128),
        "k2p25": replace(KEY, nbits=2, group_size=64, promoted=0.25),
        "k2s4": replace(KEY, nbits=2, group_size=128, shared_groups=4),
    },
    {
        "channels": replace(VALUE, nbits=4, granularity="per_channel", group_size=64),
        "tiles": replace(VALUE, nbits=2, method="variance_normalized"),
        "exact": replace(VALUE, nbits=16),
    },
)


@pytest.mark.parametrize("tokens", [1, 36, 67, 68, 99, 100, 131, 132, 133, 500, 777])
def test_sizes_are_those_of_a_real_cache(tokens, gemma):
    """Blocks of other lengths in each layer, lengths that straddle windows and blocks, unquantized layers."""
    sizes = SizeTable(gemma, FRAME, ODD, tokens)
    problem = Problem(Budget(bits=16.0), ODD, sizes, None, FRAME)
    for pairs in (
        {1: ("k3g16", "channels"), 3: ("k2g128", "tiles")},
        {1: ("k2g128", "exact"), 3: ("k3g16", "tiles")},
        {1: ("k2p25", "tiles"), 3: ("k2p25", "exact")},
        {1: ("k2s4", "tiles"), 3: ("k3g16", "exact")},
    ):
        config = problem.config(pairs)
        held = replayed_bits(lambda c=config: QuantCache(gemma, c), model_shapes(gemma), [(0, tokens)], torch.bfloat16)
        assert sizes.memory_bytes(pairs) == held.memory_bytes == sizes.measured_bytes(config)
        assert sizes.bits_per_value(pairs) == pytest.approx(sizes.measured_bits(config), rel=1e-12)


def test_bits_that_reports_draw_are_those_that_are_held(gemma):
    """The plot of an allocation asks the settings, the budget asks real layers."""
    sizes = SizeTable(gemma, FRAME, ODD, 500)
    heads, key_dim, value_dim = sizes.shapes[1]
    for name, spec in ODD.key.items():
        exact = 16 * heads * value_dim
        drawn = heads * key_dim * spec.bits_per_value(key_dim)
        assert sizes.pair(1, name, "exact").bits - exact == pytest.approx(drawn), name


def test_bits_are_codes_and_metadata(llama):
    sizes = SizeTable(llama, FRAME, FEW, 100)
    # Head size 16: a group of 32 tokens or of one token's 16 channels shares two 16-bit numbers.
    assert sizes.bits_per_value(dict.fromkeys(range(3), ("k2", "v4"))) == ((2 + 1) + (4 + 2)) / 2
    assert sizes.bits_per_value(dict.fromkeys(range(3), ("k2g16", "exact"))) == ((2 + 2) + 16) / 2


# ---- settings by layer -----------------------------------------------------------------------------------------


def test_settings_by_layer_are_ranges_of_exceptions():
    two, four = replace(KEY, nbits=2), KEY
    specs = {0: (two, VALUE), 1: (four, VALUE), 2: (four, VALUE), 5: (four, VALUE)} | dict.fromkeys(
        (6, 7, 8, 9, 10), (two, replace(VALUE, nbits=8))
    )
    config = allocation_config(FRAME, specs)
    assert config.key == two and config.value.nbits == 8
    assert {name: dict(change) for name, change in config.to_dict()["layers"].items()} == {
        0: {"value": {"nbits": 4}},
        "1-2": {"key": {"nbits": 4}, "value": {"nbits": 4}},
        5: {"key": {"nbits": 4}, "value": {"nbits": 4}},
    }
    again = KVQuantConfig.from_dict(config.to_dict())
    for index, (key, value) in specs.items():
        layer = again.for_layer(index, 11, "full_attention")
        assert (layer.key, layer.value, layer.residual_length) == (key, value, 32)


# ---- what may be asked -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of .*; got none"),
        ({"kl": 0.1, "bits": 3.0}, r"exactly one of .*; got \['kl', 'bits'\]"),
        ({"key_kl": 0.1}, r"`key_kl` with `value_error`.*; got \['key_kl'\]"),
        ({"value_error": 0.1}, r"got \['value_error'\]"),
        ({"bytes": 10}, "`bytes` with `context_length`"),
        ({"bits": 3.0, "context_length": 10}, "exactly one"),
        ({"kl": 0.0}, "`kl` must be a number above 0, got 0.0"),
        ({"bits": math.nan}, "`bits` must be a number above 0, got nan"),
        ({"bytes": -1, "context_length": 5}, "`bytes` must be a number above 0, got -1"),
    ],
)
def test_budget_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        Budget(**given)


def test_budgets_say_what_they_are():
    assert str(Budget(kl=0.01)) == "KL of the predictions at most 0.01 nats"
    assert str(Budget(bytes=1_234_567, context_length=4096)).endswith("at most 1,234,567 bytes at 4,096 tokens")
    both = str(Budget(key_kl=0.02, value_error=0.1))
    assert "0.02 nats" in both and both.endswith("values at most 0.1")
    assert amount("bits", 3.25) == "3.25 bits per value"


def test_default_candidates_are_those_of_the_presets():
    candidates = default_candidates()
    assert list(candidates.key) == ["k2", "k2p25", "k2p50", "k3p25", "k4p25", "k8"]
    assert [spec.promoted for spec in candidates.key.values()][:5] == [0.0, 0.25, 0.5, 0.25, 0.25]
    assert list(candidates.value) == ["v2", "v3", "v4", "v8"]
    assert all(spec.granularity == "per_channel" and spec.rope == "pre" for spec in candidates.key.values())
    ways = {spec.nbits: (spec.rotation, spec.clip, spec.granularity) for spec in candidates.value.values()}
    turned, plain = ("hadamard", "mse", "per_token"), ("none", "minmax", "per_token")
    assert ways == {2: turned, 3: turned, 4: turned, 8: plain}


def test_shipped_candidates_can_be_loaded():
    paths = sorted((ROOT / "configs" / "candidates").glob("*.yaml"))
    assert [path.stem for path in paths] == ["plain", "two_three_bits"]
    candidates = load_candidates(paths[0])
    assert list(candidates.key) == [f"k{n}g{g}" for n in (2, 3, 4, 8) for g in (32, 64)]
    assert not any(spec.promoted for spec in candidates.key.values())
    assert {spec.group_size for spec in candidates.value.values()} == {32}
    few, default = load_candidates(paths[1]), default_candidates()
    for side, names in (("key", ("k2", "k2p25", "k2p50", "k3p25")), ("value", ("v2", "v3"))):
        assert dict(few.of(side)) == {name: default.of(side)[name] for name in names}


def test_candidates_of_a_file(tmp_path):
    path = tmp_path / "candidates.yaml"
    path.write_text("key:\n  small: {nbits: 2, group_size: 64}\n  kvarn: {nbits: 2, method: variance_normalized}\n")
    candidates = load_candidates(path)
    assert candidates.key["small"] == QuantSpec(nbits=2, group_size=64)
    assert candidates.key["kvarn"].method == "variance_normalized"
    assert candidates.value == default_candidates().value
    path.write_text(yaml.safe_dump(candidates.to_dict()))
    assert load_candidates(path) == candidates


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: {}", "no setting 'keys'.*Did you mean 'key'"),
        ("key: {}", "at least one setting of `key`"),
        ("key: [2, 3]", "`key` must map names to settings"),
        ("value: {v: {nbit: 2}}", "`value.v` has no setting 'nbit'.*Did you mean 'nbits'"),
        ("value: {v: {nbits: 5}}", "`nbits` must be one of"),
        ("value: {a: {nbits: 2}, b: {nbits: 2}}", "must differ, got 'a' and 'b' of `value` alike"),
        ("key: {", "holds no candidates"),
    ],
)
def test_candidates_refuse(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"mine.yaml {message}" if "holds" in message else message) as error:
        load_candidates(path)
    assert "mine.yaml holds no candidates" in str(error.value)
