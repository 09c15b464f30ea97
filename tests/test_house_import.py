"""The pieces are imported from elsewhere, and what is packaged is what the tree has."""

import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_PACKAGED = {"tests", "benchmarks"}

NOTEBOOK = """
import torch
from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from grpo_train import group_advantages
from learning.models import load_model, load_tokenizer
from rewards import correctness_reward

tokenizer = load_tokenizer("tiny")
model = load_model("tiny", tokenizer, torch.float32, torch.device("cpu")).eval()
decoder = GroupDecoder(model, tokenizer, think_end="</reasoning>", interaction=Interaction(lambda_blend=0.1))
prompts = [tokenizer("Ann has 12 pens and gets 5 more . How many pens does Ann have now ?")["input_ids"]]
rollout = decoder.rollout(prompts, Sampling(32, 8, temperature=1.0), rollout_uniforms(0, 0, 0, 8, 32))
texts = [completion.text for completion in decoder.completions(rollout)]
rewards = torch.tensor(correctness_reward(completions=texts, answer=["17"] * 8))
advantages = group_advantages(rewards, num_generations=8)
"""


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
    notebook = {}
    exec(NOTEBOOK, notebook)
    assert notebook["advantages"].shape == (8,)
    assert len(set(notebook["texts"])) > 1
    assert notebook["rollout"].logp.shape[0] == 8
    assert {"grpo_train", "decoding.decoder"} <= set(ours(sys.modules)), "they were imported anew"
    assert not list(tmp_path.iterdir()), "importing the pieces writes nothing"


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
