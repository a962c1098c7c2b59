"""Local tasks: lm-eval's prompts and scorers on shipped data, and the generated retrieval tasks."""

import re
from pathlib import Path

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs the `eval` extra")

from eval_tools import characters_tokenizer
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from models import ROOT

from kvquant_hf.eval.artifacts import read_json_lines
from kvquant_hf.eval.squad_metrics import compute_exact, compute_f1, normalize_answer
from kvquant_hf.eval.tasks import data_file, stock, tasks_dir
from kvquant_hf.eval.tasks.needle import Grid, prompts, retrieval, score


@pytest.fixture(scope="module")
def tasks(lm_model_dir):
    names = ["gsm8k_local", "gsm8k_cot_local", "coqa_local", "truthfulqa_gen_local", "needle", "key_value"]
    metadata = {"pretrained": str(lm_model_dir), "needle_lengths": [512], "needle_trials": 1}
    manager = TaskManager(include_path=str(tasks_dir()), include_defaults=False, metadata=metadata)
    loaded = manager.load(names)["tasks"]
    for task in loaded.values():
        task.set_fewshot_seed(1234)
        task.build_all_requests(limit=5, rank=0, world_size=1)
    return loaded


# ---- lm-eval's own tasks on local data -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stock_path", "also_differ"),
    [
        ("gsm8k_local", "gsm8k/gsm8k.yaml", {"training_split", "repeats"}),
        ("gsm8k_cot_local", "gsm8k/gsm8k-cot.yaml", {"fewshot_config", "fewshot_split", "repeats"}),
        ("truthfulqa_gen_local", "truthfulqa/truthfulqa_gen.yaml", {"doc_to_text", "generation_kwargs"}),
    ],
)
def test_local_tasks_are_those_of_lm_eval(name, stock_path, also_differ):
    """All that decides prompts, answers and scores is the same; the source of the data is not."""
    ours, theirs = load_yaml(tasks_dir() / f"{name}.yaml"), stock.stock_task(stock_path)
    sources = {"task", "tag", "custom_dataset", "dataset_path", "dataset_name", "training_split", "test_split"}
    cosmetic = {"should_decontaminate", "doc_to_decontamination_query"}
    for key in (ours.keys() | theirs.keys()) - sources - cosmetic - also_differ:
        if callable(theirs.get(key)):
            assert ours[key].__code__.co_code == theirs[key].__code__.co_code, key
        else:
            assert ours.get(key) == theirs.get(key), key


def test_longbench_tasks_keep_the_generation_settings_of_lm_eval():
    files = sorted((tasks_dir() / "longbench").glob("*.yaml"))
    assert len(files) >= 10
    for path in files:
        ours = yaml.safe_load(path.read_text())
        subset = ours["dataset_kwargs"]["subset"]
        root = Path(stock.lm_eval.tasks.__file__).parent
        theirs = load_yaml(root / "longbench" / f"{subset}.yaml", resolve_func=False)
        assert ours["generation_kwargs"] == theirs["generation_kwargs"], subset
        assert ours["task"] == f"longbench_{subset}_local"


def test_prompts(tasks):
    first = {name: task.instances[0].args[0] for name, task in tasks.items()}
    question = read_json_lines(data_file("gsm8k_test.jsonl"))[0]["question"]
    assert first["gsm8k_local"].count("Question: ") == 6 and first["gsm8k_local"].endswith(f"{question}\nAnswer:")
    assert first["gsm8k_cot_local"].startswith("Q: There are 15 trees") and first["gsm8k_cot_local"].count("Q:") == 9
    assert first["coqa_local"].endswith("\n\nA:") and "additional" not in first["coqa_local"]
    assert first["truthfulqa_gen_local"].count("Q:") == 7
    assert all(len(task.instances) == 5 for task in tasks.values())


def test_reference_answers_score_full_marks(tasks):
    task = tasks["gsm8k_local"]
    for instance in task.instances:
        instance.resps = [instance.doc["answer"]]
    task.apply_filters()
    for kind in ("strict-match", "flexible-extract"):
        found = [task.process_results(i.doc, [i.filtered_resps[kind]])["exact_match"] for i in task.instances]
        assert found == [1.0] * 5, kind
    dialogue = tasks["coqa_local"].instances[0].doc
    references = stock.coqa_answers(dialogue)
    assert references[0] == dialogue["answers"]["input_text"][-1]
    scores = tasks["coqa_local"].process_results(dialogue, [f" {references[0]}\nQ: more"])
    assert scores["f1"] > 0 and set(scores) == {"em", "f1"}
    assert tasks["coqa_local"].process_results(dialogue, ["zzz"]) == {"em": 0.0, "f1": 0.0}
    truth = tasks["truthfulqa_gen_local"].instances[0].doc
    good = tasks["truthfulqa_gen_local"].process_results(truth, [truth["correct_answers"][0]])
    bad = tasks["truthfulqa_gen_local"].process_results(truth, [truth["incorrect_answers"][0]])
    # Answers of fewer than four words have no BLEU.
    assert good["rouge1_acc"] == 1 and good["rouge1_diff"] > 0 > bad["rouge1_diff"] and bad["rouge1_acc"] == 0


def test_longbench_reads_the_distributed_form(tmp_path):
    (tmp_path / "longbench").mkdir()
    row = '{"input": "Who?", "context": "Ada wrote it.", "answers": ["Ada"], "all_classes": null, "length": 4}\n'
    (tmp_path / "longbench" / "hotpotqa.jsonl").write_text(row)
    doc = stock.longbench("hotpotqa", data_dir=str(tmp_path))["test"][0]
    assert doc["question"] == "Who?" and doc["dataset"] == "hotpotqa"
    pytest.importorskip("jieba", reason="needs the `eval-long` extra")
    pytest.importorskip("rouge", reason="needs the `eval-long` extra")
    assert "Ada wrote it." in stock.longbench_prompt(doc) and "Who?" in stock.longbench_prompt(doc)
    assert stock.longbench_score(doc, ["Ada"]) == {"score": 1.0}
    assert stock.longbench_score(doc, ["Bob"]) == {"score": 0.0}


def test_missing_data_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"longbench/qasper\.jsonl.*KVQUANT_HF_DATA"):
        stock.longbench("qasper")
    monkeypatch.setenv("KVQUANT_HF_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        stock.gsm8k()
    (tmp_path / "coqa_validation.jsonl").write_text('{"story": "mine"}\n')
    assert stock.coqa()["validation"][0] == {"story": "mine"}
    assert stock.coqa(data_dir=str(ROOT / "data"))["validation"].num_rows == 100


@pytest.mark.parametrize(
    ("gold", "predicted", "exact", "f1"),
    [
        ("The Cat!", "cat", 1, 1.0),
        ("a big black cat", "the black dog", 0, 0.4),
        ("cat cat", "cat", 0, 2 / 3),
        ("", "", 1, 1.0),
        ("", "cat", 0, 0.0),
        ("the", "a", 1, 1.0),
        ("U.S.A.", "usa", 1, 1.0),
        ("theatre", "atre", 0, 0.0),
    ],
)
def test_squad_metrics(gold, predicted, exact, f1):
    assert compute_exact(gold, predicted) == exact and compute_f1(gold, predicted) == pytest.approx(f1)
    assert normalize_answer(f"  {gold} ") == normalize_answer(gold)


# ---- retrieval -------------------------------------------------------------------------------------------------

TEXT = " ".join(f"Sentence number {'x' * (i % 7)} stands here." for i in range(600))
GRID = Grid(lengths=(500, 900), depths=(0.0, 0.5, 1.0), trials=2, seed=3, distractors=2)


@pytest.mark.parametrize("kind", ["needle", "key_value"])
def test_the_asked_fact_stands_once_and_at_its_depth(kind):
    rows = prompts(kind, GRID, characters_tokenizer(), TEXT)
    assert [(row["length"], row["depth"], row["trial"]) for row in rows] == [
        (length, depth, trial) for length in GRID.lengths for depth in GRID.depths for trial in range(2)
    ]
    for row in rows:
        assert row["length"] - 60 < row["tokens"] <= row["length"]
        context, _, asked = row["prompt"].partition("\n\nQuestion: ")
        assert row["prompt"].count(row["answer"]) == 1 and len(row["answer"]) == 7
        assert asked.endswith(f"The access number of the {row['key']} is")
        place = context.index(row["answer"]) / len(context)
        assert place == pytest.approx(row["depth"], abs=0.2)
        facts = re.findall(r"\d{7}", context)
        assert len(set(facts)) == len(facts) and (len(facts) == 3 if kind == "needle" else len(facts) > 10)


def test_prompts_depend_on_seed_and_cell_only():
    tokenizer = characters_tokenizer()
    rows = prompts("needle", GRID, tokenizer, TEXT)
    assert rows == prompts("needle", GRID, tokenizer, TEXT)
    assert len({row["answer"] for row in rows}) == len(rows)
    smaller = Grid(lengths=(900,), depths=(0.5,), trials=1, seed=3, distractors=2)
    assert prompts("needle", smaller, tokenizer, TEXT)[0] in rows
    other = Grid(lengths=(900,), depths=(0.5,), trials=1, seed=4, distractors=2)
    assert prompts("needle", other, tokenizer, TEXT)[0] not in rows


@pytest.mark.parametrize(
    ("answer", "retrieved"),
    [(" 1234567.", 1), ("The number is 1,234,567", 1), ("1234568", 0), ("12345678", 0), ("none", 0), ("7 1234567", 0)],
)
def test_retrieval_scores_the_first_number(answer, retrieved):
    assert score({"answer": "1234567"}, [answer]) == {"retrieved": retrieved}


def test_retrieval_refusals(lm_model_dir):
    with pytest.raises(ValueError, match="`kind` must be one of"):
        retrieval(kind="hay", pretrained="x")
    with pytest.raises(ValueError, match="`tokenizer` must be named"):
        retrieval()
    with pytest.raises(ValueError, match=r"`needle_depths` must be numbers from 0 to 1, got \[2\]"):
        Grid(depths=(2,))
    with pytest.raises(ValueError, match=r"not exceed the \d+ tokens of the text, got 500000"):
        retrieval(pretrained=str(lm_model_dir), needle_lengths=[500_000])
    with pytest.raises(ValueError, match="lines of keys, got 500000"):
        retrieval("key_value", pretrained=str(lm_model_dir), needle_lengths=[500_000])
    with pytest.raises(ValueError, match="must leave room"):
        prompts("needle", Grid(lengths=(120,)), characters_tokenizer(), TEXT)
