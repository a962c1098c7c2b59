"""Running a run file: one model, each cache in turn, lm-eval's results with what the cache held beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from kvquant_hf.eval.artifacts import CONFIG, RESULTS, replaced, write_json, write_json_lines
from kvquant_hf.eval.environment import run_environment
from kvquant_hf.eval.lm import KVQuantLM
from kvquant_hf.eval.models import model_name
from kvquant_hf.eval.report import write_report
from kvquant_hf.eval.runfile import RunFile
from kvquant_hf.eval.tasks import tasks_dir

# Left out of the results: machine-specific or long, and of no use to a reader who has the rest.
_UNWANTED = ("pretty_env_info", "git_hash")
_BOOTSTRAP = 100_000  # resamples for standard errors, lm-eval's number


def task_manager(run: RunFile) -> TaskManager:
    """The tasks that a run can name: those of this package, of `include_path`, and lm-eval's own where needed.

    Reading lm-eval's own takes many seconds and is left out where the others hold everything.

    Raises:
        ValueError: A task is unknown.
    """
    include = [tasks_dir(), *([Path(run.settings.include_path)] if run.settings.include_path else [])]
    names = run.settings.tasks
    for defaults in (False, True):
        manager = TaskManager(include_path=include, include_defaults=defaults, metadata=run.settings.metadata)
        unknown = [name for name in names if not manager.match_tasks([name]) and not name.endswith(".yaml")]
        if not unknown:
            return manager
    local = TaskManager(include_path=include, include_defaults=False).all_subtasks
    raise ValueError(
        f"`tasks` must be names that lm-eval knows (`lm-eval ls tasks`), YAML paths or among {local}, got {unknown}."
    )


def run_all(run: RunFile) -> list[Path]:
    """Evaluate every cache of a run.

    What an interrupted run answered is kept; the same call goes on from there.

    Returns:
        The output directories, in the order of the caches. Beside them lies the report. Of several processes the
        first writes everything but the answers kept for an interrupted run.

    Raises:
        ValueError: A task is unknown.
    """
    manager = task_manager(run)
    names = [match for name in run.settings.tasks for match in _matches(manager, name)]
    settings = run.settings
    lm = KVQuantLM.create_from_arg_obj(
        dict(settings.model_args),
        {"batch_size": settings.batch_size, "max_batch_size": settings.max_batch_size, "device": settings.device},
    )
    directories = []
    for number, cache in enumerate(run.caches, start=1):
        directory = run.directory(cache)
        if lm.ranks.first:
            print(f"[{number}/{len(run.caches)}] {cache}: {directory}", flush=True)
        lm.use(run.caches[cache], journal=directory)
        if lm.calls and lm.ranks.first:
            print(f"  going on after {len(lm.calls)} batches of an earlier run", flush=True)
        results = _evaluate(run, lm, manager, names)
        if results is not None and lm.ranks.first:
            _write(run, cache, directory, results)
        directories.append(directory)
    if lm.ranks.first:
        write_report(run.output, directories, run.name, run.description)
    return directories


def _matches(manager: TaskManager, name: str) -> list[str]:
    return [name] if name.endswith(".yaml") else list(manager.match_tasks([name]))


def _evaluate(run: RunFile, lm: KVQuantLM, manager: TaskManager, names: list[str]) -> dict[str, Any] | None:
    settings = run.settings
    seeds = settings.seed or [None] * 4
    requests = settings.cache_requests or {}
    results: dict[str, Any] | None = simple_evaluate(
        model=lm,
        model_args={**run.model_args, "pretrained": model_name(run.resolved_model)},
        tasks=list(names),
        num_fewshot=settings.num_fewshot,
        batch_size=settings.batch_size,
        max_batch_size=settings.max_batch_size,
        device=settings.device,
        cache_requests=requests.get("cache_requests", False),
        rewrite_requests_cache=requests.get("rewrite_requests_cache", False),
        delete_requests_cache=requests.get("delete_requests_cache", False),
        limit=settings.limit,
        samples=settings.samples,
        bootstrap_iters=_BOOTSTRAP if lm.ranks.first else 0,  # the others' scores are thrown away
        check_integrity=settings.check_integrity,
        write_out=settings.write_out,
        log_samples=True,
        system_instruction=settings.system_instruction,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=bool(settings.fewshot_as_multiturn),
        gen_kwargs=settings.gen_kwargs or None,
        task_manager=manager,
        predict_only=settings.predict_only,
        random_seed=seeds[0],
        numpy_random_seed=seeds[1],
        torch_random_seed=seeds[2],
        fewshot_random_seed=seeds[3],
        confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
        metadata=settings.metadata,
    )
    return results


def _write(run: RunFile, cache: str, directory: Path, results: dict[str, Any]) -> None:
    """Write results, samples and resolved configuration of one cache, naming the model instead of its directory."""
    name = model_name(run.resolved_model)

    def public(value: Any) -> Any:
        return replaced(value, run.resolved_model, name)

    for task, samples in results.pop("samples").items():
        write_json_lines(directory / f"samples_{task}.jsonl", (public(_sample(sample)) for sample in samples))
    kept = {key: value for key, value in results.items() if key not in _UNWANTED}
    for task in kept["configs"].values():
        task.pop("config_source", None)
    kept["cache"] = cache
    kept["environment"] = run_environment(run.settings.device or "cpu")
    write_json(directory / CONFIG, public({"name": cache, **run.resolved(cache)}))
    write_json(directory / RESULTS, public(kept))


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample in the form in which lm-eval's own command line writes it."""
    arguments = {
        f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(request)}
        for i, request in enumerate(sample["arguments"])
    }
    return {**sample, "arguments": arguments, "target": str(sample["target"])}
