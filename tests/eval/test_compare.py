"""Comparing runs: the statistics by hand, pairing by hashes, refusals with reasons."""

import json
import math

import pytest
from models import load_script

pytest.importorskip("scipy", reason="needs the `eval` extra")

from kvquant_hf.eval.artifacts import read_json_lines, replaced, write_json, write_json_lines
from kvquant_hf.eval.compare import compare, comparison_table, stats_table
from kvquant_hf.eval.runs import find_runs, read_run
from kvquant_hf.eval.statistics import bootstrap, mcnemar, mean_interval

script = load_script("compare")
STATS = {"bits_per_value": 5.5, "kv_bytes_largest_call": 1000, "new_tokens_per_s": 2.0, "quantized_tokens": 9}


def sample(number, right, text, **changes):
    row = {
        "doc_id": number,
        "filter": "none",
        "metrics": ["exact_match"],
        "exact_match": float(right),
        "resps": [[text]],
        "doc_hash": f"d{number}",
        "prompt_hash": f"p{number}",
        "target_hash": f"t{number}",
    }
    return row | changes


@pytest.fixture
def make(tmp_path):
    def write(name, samples, quant=None, task="gsm8k", **config):
        directory = tmp_path / name
        base = {"name": name, "model": "m", "model_args": {}, "batch_size": 1, "limit": None, "device": "cpu"}
        write_json(directory / "config.json", base | {"versions": {"torch": "2"}, "quant": quant or {}} | config)
        results = {"results": {}, "config": {"kvquant_stats": STATS, "kvquant_cautions": []}}
        write_json(directory / "results.json", results)
        write_json_lines(directory / f"samples_{task}.jsonl", samples)
        return directory

    return write


DENSE = {"key": {"nbits": 16}, "value": {"nbits": 16}}


@pytest.mark.parametrize(("worse", "better"), [(0, 0), (1, 0), (5, 5), (9, 1), (3, 12), (0, 6)])
def test_mcnemar_is_the_binomial_tail(worse, better):
    n, k = worse + better, min(worse, better)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    assert mcnemar(worse, better) == pytest.approx(min(1.0, 2 * tail)) and mcnemar(better, worse) == mcnemar(
        worse, better
    )


def test_bootstrap_intervals():
    values = [0.0, 1.0] * 50
    low, high = mean_interval(values)
    # The mean of 100 fair coins has a standard deviation of 0.05.
    assert low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.015) and high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.015)
    assert mean_interval(values) == (low, high)
    assert mean_interval([3.0]) is None and mean_interval([2.0, 2.0]) == (2.0, 2.0)
    assert bootstrap(lambda rows: rows.max(-1), [1.0, 5.0, 9.0])[1] == 9.0


def test_flips_differences_and_outputs(make):
    before = [
        sample(i, right, text) for i, (right, text) in enumerate([(1, "same"), (1, "abcd"), (0, "x"), (1, "y1")])
    ]
    after = [sample(i, right, text) for i, (right, text) in enumerate([(1, "same"), (0, "abXd"), (1, "z"), (0, "y2")])]
    a, b = make("a", before), make("b", list(reversed(after)))
    (found,) = compare(read_run(a), read_run(b))
    assert (found.task, found.metric, found.filter, found.samples) == ("gsm8k", "exact_match", "none", 4)
    assert (found.baseline, found.value, found.difference) == (0.75, 0.5, -0.25)
    assert (found.better, found.worse, found.p_value) == (1, 2, 1.0) and not found.is_significant
    assert found.same_output == 0.25 and found.first_divergence == 1.0  # of 2, 0 and 1 equal characters
    assert found.interval[0] < -0.25 < found.interval[1]
    other = compare(read_run(b), read_run(a))[0]
    assert (other.better, other.worse, other.difference) == (2, 1, 0.25)


def test_a_consistent_loss_is_significant(make):
    a = make("a", [sample(i, 1, "t") for i in range(20)])
    b = make("b", [sample(i, i >= 8, "t") for i in range(20)])
    (found,) = compare(read_run(a), read_run(b))
    assert found.p_value == pytest.approx(2 / 2**8) and found.is_significant
    assert found.same_output == 1 and found.first_divergence is None
    table = comparison_table(read_run(a), [(read_run(b), [found])])
    assert "| b | gsm8k, exact_match | 1.000 | 0.600 | -0.400 [" in table and "| 0 / 8 | 0.008 * | 100% | - |" in table
    assert "1 of 1 differences are significant" in table
    assert "| b | 5.50 | 1,000 | 2.00 |" in stats_table([read_run(b)])


def test_likelihoods_are_outputs_too(make):
    a = make("a", [sample(0, 1, ["-1.0", "True"]), sample(1, 1, ["-2.0", "True"])])
    b = make("b", [sample(0, 1, ["-1.5", "True"]), sample(1, 1, ["-2.0", "True"])])
    (found,) = compare(read_run(a), read_run(b))
    assert found.same_output == 0.5 and found.first_divergence is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "other"}, "`model`: 'm' against 'other'"),
        ({"model_args": {"dtype": "bfloat16"}}, "`model_args`"),
        ({"batch_size": 8}, "`batch_size`: 1 against 8"),
        ({"system_instruction": "Be brief."}, "`system_instruction`: None against 'Be brief.'"),
    ],
)
def test_runs_of_other_settings_are_refused(make, capsys, changes, reason):
    a, b = make("a", [sample(0, 1, "t")]), make("b", [sample(0, 1, "t")], **changes)
    assert script.main([str(a), str(b)]) == 1
    assert f"b cannot be compared with a: {reason}" in capsys.readouterr().err


def test_other_samples_are_refused_with_every_reason(make, capsys):
    a = make("a", [sample(0, 1, "t"), sample(1, 1, "t"), sample(2, 1, "t")])
    b = make("b", [sample(0, 1, "t"), sample(1, 1, "t", prompt_hash="other")], limit=2)
    assert script.main([str(a), str(b)]) == 1
    error = capsys.readouterr().err
    assert "`limit`: None against 2" in error
    assert "1 samples are in one run only, such as document 2 of gsm8k" in error
    assert "`prompt_hash` differs in 1 samples, such as document 1" in error
    assert script.main([str(a)]) == 1 and "must be at least two" in capsys.readouterr().err
    assert script.main([str(a), str(a.parent / "none")]) == 1 and "holds no results" in capsys.readouterr().err


def test_versions_may_differ_but_are_told(make, capsys, tmp_path):
    a = make("a", [sample(0, 1, "t")], quant=DENSE)
    b = make("b", [sample(0, 1, "t")], versions={"torch": "3"}, device="cuda")
    out = tmp_path / "c.json"
    assert script.main([str(a), str(b), "--json", str(out)]) == 0
    error = capsys.readouterr().err
    assert "b also differs in `versions`" in error and "`device`: 'cpu' against 'cuda'" in error
    assert len(json.loads(out.read_text())["runs"][0]["also_differs"]) == 2


def test_an_output_directory_stands_for_its_runs_baseline_first(make):
    a = make("a", [sample(0, 1, "t")])
    make("z", [sample(0, 1, "t")], quant=DENSE)
    assert [run.name for run in find_runs([a.parent])] == ["z", "a"]
    assert [run.name for run in find_runs([a, a.parent / "z"])] == ["a", "z"]


def test_files_survive_odd_separators_and_hide_paths(tmp_path):
    rows = [{"text": "line\u2028separator\x85next"}, {"text": "plain"}]
    write_json_lines(tmp_path / "x.jsonl", rows)
    assert read_json_lines(tmp_path / "x.jsonl") == rows and len(list(tmp_path.iterdir())) == 1
    assert replaced({"/a/b": ["/a/b/c", 1, ("/a/b",)]}, "/a/b", "m") == {"m": ["m/c", 1, ["m"]]}


def test_lengths_that_a_sample_lacks_are_left_out(make):
    """RULER gives every sample a metric for each length, -1 where it has another one."""
    names = ["4096", "512"]
    rows = [sample(i, 1, "t", **{"metrics": names, "512": [1.0, -1][i], "4096": [-1, 0.0][i]}) for i in range(2)]
    found = {item.metric: item for item in compare(read_run(make("a", rows)), read_run(make("b", rows)))}
    assert {name: (item.samples, item.baseline) for name, item in found.items()} == {"512": (1, 1.0), "4096": (1, 0.0)}
