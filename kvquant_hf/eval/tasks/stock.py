"""lm-eval's own tasks on local JSON files: loaders of the data, and prompts and scorers taken from lm-eval.

Each loader is the `custom_dataset` of a task in `configs/tasks/`; lm-eval calls it with the arguments of the model and
the task's metadata, of which it reads `data_dir` (see `kvquant_hf.eval.tasks.data_file`).
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from datasets import Dataset
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import apply_template

from kvquant_hf.eval.artifacts import read_json_lines
from kvquant_hf.eval.squad_metrics import provide_squad_metrics
from kvquant_hf.eval.tasks import data_file

Splits = dict[str, Dataset]


@cache
def stock_task(path: str) -> dict[str, Any]:
    """Settings of a task that lm-eval ships, by the path of its YAML file below `lm_eval/tasks`."""
    settings: dict[str, Any] = load_yaml(Path(lm_eval.tasks.__file__).parent / path, resolve_func=True)
    return settings


def _rows(name: str, data_dir: str | None) -> Dataset:
    return Dataset.from_list(read_json_lines(data_file(name, data_dir)))


def gsm8k(data_dir: str | None = None, **_: Any) -> Splits:
    """`gsm8k_train.jsonl` (for few-shot examples) and `gsm8k_test.jsonl`: rows of `question` and `answer`."""
    return {"train": _rows("gsm8k_train.jsonl", data_dir), "test": _rows("gsm8k_test.jsonl", data_dir)}


def gsm8k_cot_examples() -> list[dict[str, str]]:
    """The eight worked examples of lm-eval's `gsm8k_cot` (Wei et al. 2022, arXiv 2201.11903, appendix)."""
    examples: list[dict[str, str]] = stock_task("gsm8k/gsm8k-cot.yaml")["fewshot_config"]["samples"]
    return [dict(example) for example in examples]


def coqa(data_dir: str | None = None, **_: Any) -> Splits:
    """`coqa_validation.jsonl`: dialogues of `story`, `questions`, `answers` and `additional_answers`.

    Turns are lists under `input_text`, as in the hub's `EleutherAI/coqa`; the last question of each is asked.
    """
    provide_squad_metrics()
    return {"validation": _rows("coqa_validation.jsonl", data_dir)}


def coqa_prompt(doc: Mapping[str, Any]) -> str:
    """Story, dialogue and last question, as lm-eval's `coqa` asks it."""
    text: str = _coqa("doc_to_text")(doc)
    return text


def coqa_answers(doc: Mapping[str, Any]) -> list[str]:
    """All reference answers to the last question."""
    answers: list[str] = _coqa("doc_to_target")(doc)
    return answers


def coqa_scores(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """Exact match and F1, each reference left out in turn, as lm-eval's `coqa` scores them."""
    scores: dict[str, float] = _coqa("process_results")(doc, results)
    return scores


def _coqa(name: str) -> Any:
    provide_squad_metrics()  # lm-eval's module imports them
    return stock_task("coqa/default.yaml")[name]


def truthfulqa(data_dir: str | None = None, **_: Any) -> Splits:
    """`truthfulqa_generation.jsonl`: `question`, `best_answer`, lists `correct_answers` and `incorrect_answers`."""
    return {"validation": _rows("truthfulqa_generation.jsonl", data_dir)}


def truthfulqa_prompt(doc: dict[str, Any]) -> str:
    """The question after the examples that lm-eval's `truthfulqa_gen` puts before it."""
    text: str = apply_template(stock_task("truthfulqa/truthfulqa_gen.yaml")["doc_to_text"], doc)
    return text


def longbench(subset: str, data_dir: str | None = None, **_: Any) -> Splits:
    """`longbench/<subset>.jsonl` as LongBench distributes it: `input`, `context`, `answers`, `all_classes`.

    Args:
        subset: Name of the LongBench data set.
        data_dir: See the module.
    """
    rows = read_json_lines(data_file(f"longbench/{subset}.jsonl", data_dir))
    # The hub copy that lm-eval reads calls the field `question`.
    renamed = [{**row, "question": row.get("question", row.get("input")), "dataset": subset} for row in rows]
    return {"test": Dataset.from_list(renamed)}


def longbench_prompt(doc: dict[str, Any]) -> str:
    """The prompt of lm-eval's task of the row's data set."""
    text: str = apply_template(_longbench(doc)["doc_to_text"], doc)
    return text


def longbench_score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """LongBench's metric for the row's data set (Bai et al. 2023, arXiv 2308.14508, table 1), 0 to 1, as `score`."""
    return {"score": _longbench(doc)["process_results"](doc, results)["score"]}


def _longbench(doc: Mapping[str, Any]) -> dict[str, Any]:
    return stock_task(f"longbench/{doc['dataset']}.yaml")
