"""The pieces are imported from elsewhere, and what is packaged is what the tree has."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_PACKAGED = {"tests", "benchmarks"}

CELLS = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
NOTEBOOK = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def ours(modules):
    """The names of the project's modules among those that are loaded."""
    rooms = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/*.py")}
    return [name for name in modules if name.partition(".")[0] in rooms]


@pytest.fixture
def nothing_imported(monkeypatch):
    """A Python that has imported none of the project's modules, and finds them at the root alone."""
    of_the_tree = ("", str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks"))
    elsewhere = [folder for folder in sys.path if folder not in of_the_tree]
    monkeypatch.setattr(sys, "path", [str(ROOT), *elsewhere])
    loaded = {name: sys.modules.pop(name) for name in ours(list(sys.modules))}
    yield
    for name in ours(list(sys.modules)):
        del sys.modules[name]
    sys.modules.update(loaded)


@pytest.mark.usefixtures("nothing_imported")
def test_the_pieces_are_imported_from_another_folder(tmp_path, monkeypatch):
    """As in a notebook after `pip install -e .`, which puts the project's root on the path."""
    monkeypatch.chdir(tmp_path)
    exec("\n".join(line for cell in NOTEBOOK for line in cell.split("\n") if line.startswith("from ")), {})
    assert {"grpo_train", "decoding.decoder"} <= set(ours(sys.modules)), "they were imported anew"
    assert not list(tmp_path.iterdir()), "importing the pieces writes nothing"


def test_the_notebook_says_what_is_kept_in_it(tmp_path, monkeypatch, capsys):
    """Every cell but the last, which trains, prints what the file shows below it."""
    monkeypatch.chdir(tmp_path)
    notebook, cells = {}, [cell for cell in CELLS if cell["cell_type"] == "code"]
    for cell in cells[:-1]:
        exec("".join(cell["source"]), notebook)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert capsys.readouterr().out == shown
    for _ in range(2):  # people run a cell again, which was refused: its folder was there
        exec("".join(cells[-1]["source"]), notebook)
    assert notebook["result"].folder == Path("from_notebook")
    assert (tmp_path / "from_notebook" / "config.json").exists()


def test_the_listed_modules_and_packages_are_those_of_the_tree():
    """A package called `configs` was installed, and nothing else."""
    listed = PROJECT["tool"]["setuptools"]
    assert sorted(listed["py-modules"]) == sorted(path.stem for path in ROOT.glob("*.py"))
    packages = {path.parent.name for path in ROOT.glob("*/*.py")} - NOT_PACKAGED
    assert sorted(listed["packages"]) == sorted(packages)
    assert all((ROOT / name / "__init__.py").exists() for name in packages)
    for package, names in listed["package-data"].items():
        assert all((ROOT / package / name).exists() for name in names)
    others = {path.relative_to(ROOT).as_posix() for name in packages for path in (ROOT / name).glob("*.*")}
    shipped = {f"{package}/{name}" for package, names in listed["package-data"].items() for name in names}
    assert {path for path in others if not path.endswith(".py")} == shipped


def test_the_dev_group_is_what_requirements_dev_says():
    groups = PROJECT["project"]["optional-dependencies"]
    packages = {
        package for names in groups.values() for package in names if not package.startswith("grpo-m3po")
    }
    lines = (ROOT / "requirements-dev.txt").read_text().split("\n")
    assert packages == {line for line in lines if line and not line.startswith("-r")}
