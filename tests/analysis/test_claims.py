"""Claims: what counts as reproduced, and what run files may say."""

import math

import pytest
import yaml
from models import ROOT

from kvquant_hf.analysis import Claim, judge, load_ablation, verdict_lines

SETTINGS = ("a", "b", "c")
PLAIN = {
    "name": "one",
    "text": "a is worse than b.",
    "metric": "kl",
    "effect": "ratio",
    "worse": "a",
    "better": "b",
    "published": 9.0,
    "figures": "9 against 1",
    "source": "a paper",
}
OTHERS = {
    "difference": {"effect": "difference", "published": 0.5},
    "share": {"effect": "share", "none": "a", "some": "b", "full": "c", "published": 0.9},
    "lost": {"effect": "lost", "setting": "a", "published": 0.8},
}


def claim(kind="ratio", **changes):
    plain = PLAIN | OTHERS.get(kind, {})
    if kind in ("share", "lost"):
        plain = {name: value for name, value in plain.items() if name not in ("worse", "better")}
    return Claim.from_dict(plain | changes, SETTINGS)


@pytest.mark.parametrize(
    ("kind", "values", "effect", "word"),
    [
        ("ratio", (3.0, 1.0), 3.0, "reproduced"),
        ("ratio", (2.9, 1.0), 2.9, "not reproduced (same direction, smaller)"),
        ("ratio", (0.5, 1.0), 0.5, "not reproduced"),
        ("ratio", (1.0, 0.0), math.inf, "reproduced"),
        ("difference", (1.25, 1.0), 0.25, "reproduced"),
        ("difference", (1.125, 1.0), 0.125, "not reproduced (same direction, smaller)"),
        ("difference", (0.5, 1.0), -0.5, "not reproduced"),
        ("share", (5.0, 3.0, 1.0), 0.5, "reproduced"),
        ("share", (5.0, 4.0, 1.0), 0.25, "not reproduced (same direction, smaller)"),
        ("share", (5.0, 6.0, 1.0), -0.25, "not reproduced"),
        ("share", (5.0, 6.0, 5.0), math.nan, "not reproduced"),
        ("lost", (0.5,), 0.5, "reproduced"),
        ("lost", (0.75,), 0.25, "not reproduced (same direction, smaller)"),
        ("lost", (1.0,), 0.0, "not reproduced"),
    ],
)
def test_verdicts(kind, values, effect, word):
    by_name = dict(zip(SETTINGS, values, strict=False))
    verdict = judge(claim(kind), lambda name, window: by_name[name], 1)
    assert verdict.effect == pytest.approx(effect, nan_ok=True)
    assert verdict.word == word and verdict.is_reproduced == (word == "reproduced")
    assert verdict.to_dict()["verdict"] == word


def test_a_direction_needs_any_effect_and_no_more():
    direction = claim(published=None)
    assert judge(direction, lambda name, window: {"a": 1.01, "b": 1.0}[name], 1).is_reproduced
    assert not judge(direction, lambda name, window: 1.0, 1).is_reproduced
    assert claim("difference", published=None).needed == 0


def test_windows_are_judged_alone_and_both_numbers_printed():
    values = {None: {"a": 4.0, "b": 1.0}, 0: {"a": 6.0, "b": 1.0}, 1: {"a": 2.0, "b": 1.0}}
    verdict = judge(claim(), lambda name, window: values[window][name], 2)
    assert verdict.windows == (6.0, 2.0) and verdict.agreeing == 1
    first, published, measured = verdict_lines([verdict])
    assert first == "[reproduced] a is worse than b."
    assert "ratio 9 (9 against 1; a paper)" in published
    assert "ratio 4, needed 3, alone in 1 of 2 windows (kl; a: 4, b: 1)" in measured


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"effect": "more"}, "`effect` must be one of"),
        ({"metric": "bleu"}, "`metric` must be one of"),
        ({"worse": "d"}, "`worse` must be one of"),
        ({"published": 0}, "`published` must be a number > 0"),
        ({"publishd": 1}, "Did you mean 'published'"),
    ],
)
def test_wrong_claims_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        claim(**changes)


def test_incomplete_claims_are_refused():
    with pytest.raises(ValueError, match=r"lacks \['source'\]"):
        Claim.from_dict({name: value for name, value in PLAIN.items() if name != "source"}, SETTINGS)


FILES = sorted((ROOT / "configs" / "ablations").glob("*.yaml"))


def test_there_are_the_four_ablations():
    assert [path.stem for path in FILES] == ["axis", "residual", "rope", "sink"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_ablations_can_be_run(path):
    ablation = load_ablation(path)
    assert ablation.text.is_file() and ablation.name == path.stem and ablation.claims
    assert len(set(ablation.settings.values())) == len(ablation.settings)
    assert all(model.startswith("prepared:") for model in ablation.models)
    assert yaml.safe_load(yaml.safe_dump(ablation.to_dict()))["text"] == ablation.text.name


def test_axis_crosses_both_axes_and_quantizes_every_token():
    ablation = load_ablation(ROOT / "configs" / "ablations" / "axis.yaml")
    axes = [(c.key.granularity, c.value.granularity) for c in list(ablation.settings.values())[:4]]
    assert len(set(axes)) == 4
    for config in list(ablation.settings.values())[:4]:
        assert (config.sink_length, config.residual_length, config.block_length) == (0, 0, 32)
        assert {config.key.nbits, config.value.nbits} == {2} and config.key.rope == "post"
    protocol = ablation.protocol
    assert not any(length % 32 for length in (protocol.context, protocol.prefill, protocol.step))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": 0}, "`windows` must be an integer >= 1"),
        ({"setings": {}}, "Did you mean 'settings'"),
        ({"settings": {"x": {"residual": 3}}}, "residual_length"),
        ({"settings": {}}, "`settings` must name at least one"),
        ({"protocol": {"context": 10, "prefil": 1}}, "Did you mean 'prefill'"),
        ({"claims": [PLAIN]}, "`worse` must be one of"),
        ({"claims": [PLAIN | {"worse": "x", "better": "x"}], "scores": False}, "`scores` must be true"),
        ({"text": None}, "no ablation"),
    ],
)
def test_wrong_files_are_refused(changes, message, tmp_path):
    path = tmp_path / "mine.yaml"
    plain = {"text": "t.txt", "models": ["m"], "settings": {"x": {"residual_length": 3}, "y": "k4v4"}} | changes
    if plain["text"] is None:
        path.write_text("settings: [", encoding="utf-8")
    else:
        path.write_text(yaml.safe_dump(plain), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        load_ablation(path)
    assert "mine.yaml" in str(error.value)
