"""The README and its pages: short, with links and commands that exist, and the tree as it is."""

import re
import shlex
from pathlib import Path

import pytest

import grpo_eval
import grpo_train
import sft_train
from answers.formats import answer_format_named
from running.parsing import parse_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = {"grpo_train.py": grpo_train, "grpo_eval.py": grpo_eval, "sft_train.py": sft_train}
LEFT_BY_A_RUN = {"report.html", "runs.html", "compare.html", "study.html", "run_config.yaml", "README.md"}
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def blocks(page, language):
    """The fenced blocks of a page in one language; "" for those without."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands():
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return [part.strip() for line in lines for part in line.split("&&")]


def scripts_of(command):
    """(script, its flags) where a command runs one of the scripts."""
    words = shlex.split(command)
    return [(word, words[i + 1 :]) for i, word in enumerate(words) if word in SCRIPTS]


CALLS = [call for command in commands() for call in scripts_of(command)]


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_read_in_one_sitting():
    """It had grown to 5,200 words. Those of tables, commands and code are counted; bars are not."""
    assert sum(any(c.isalnum() for c in word) for word in README.split()) <= 1800


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.is_file(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors(linked), f"{target}: there is no such heading"


def test_every_page_can_be_reached_from_the_readme():
    linked = {(ROOT / name).resolve() for name in re.findall(r"\]\(([^)#\s]+)", README)}
    assert set(PAGES[1:]) <= linked


@pytest.mark.parametrize(("script", "flags"), CALLS, ids=lambda value: str(value)[:60])
def test_the_flags_of_every_command_exist(script, flags, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse_config(SCRIPTS[script].Config, flags)


def test_all_three_scripts_are_among_the_commands():
    assert {script for script, _ in CALLS} == set(SCRIPTS)


def test_every_script_that_a_command_runs_exists():
    for command in commands():
        for word in shlex.split(command):
            assert not word.endswith(".py") or (ROOT / word).is_file(), f"{command}: there is no {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_of_the_project_that_a_page_names_exists(page):
    for name in re.findall(r"`(?:python )?([\w/.-]+\.(?:py|yaml|html|md))[` ]", page.read_text()):
        exists = (ROOT / name).is_file() or (page.parent / name).is_file() or name in LEFT_BY_A_RUN
        assert exists, f"{name} is not in the tree"


def test_the_tree_of_the_readme_is_the_tree():
    [tree] = blocks(ROOT / "README.md", "")
    shown, room = set(), None
    for line in tree.splitlines():
        name, *words = line.split()
        if line.startswith(" "):
            shown |= {f"{room}{word}" for word in (name, *words)}
        else:
            room = name
            shown.add(name)
            assert words, f"{name} has no sentence"
    paths = [*ROOT.glob("*.py"), *(path for name in ROOMS for path in (ROOT / name).glob("[!_]*.*"))]
    real = {path.relative_to(ROOT).as_posix() for path in paths}
    real = {name.removesuffix(".py") if "/" in name else name for name in real}
    folders = {f"{name}/" for name in (*ROOMS, "configs", "benchmarks", "docs", "tests")}
    assert shown == real | folders
    assert all((ROOT / name).is_dir() for name in folders)


def test_the_five_steps_have_the_words_of_the_loop():
    source = (ROOT / "grpo_train.py").read_text()
    comments = re.findall(r"^ +# (\d)\. (.+(?:\n +# .+)*)", source, re.MULTILINE)
    steps = [f"{number}. " + re.sub(r"\s+# ", " ", text) for number, text in comments]
    assert [step[0] for step in steps] == ["1", "2", "3", "4", "5"]
    section = README.split("## The algorithm")[1].split("\n## ")[0]
    assert re.findall(r"^\d\. .+$", section, re.MULTILINE) == steps


def test_what_is_shown_in_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [block] = blocks(ROOT / "README.md", "python")
    shown = {}
    exec(block, shown)
    assert shown["result"].metrics["step"] == 2
    assert "reward/names_it" in shown["result"].metrics


def test_the_answer_format_of_the_docs_can_be_used(tmp_path):
    [block] = [text for text in blocks(ROOT / "docs" / "recipes.md", "python") if "AnswerFormat" in text]
    (tmp_path / "my_format.py").write_text(block)
    assert answer_format_named(f"{tmp_path}/my_format.py:mine").extract("so RESULT[7]") == "7"


def test_the_two_commands_of_a_fresh_machine_are_single_lines():
    for words in ("requirements.txt && python grpo_train.py", "requirements-dev.txt && pytest"):
        [line] = [line for line in README.splitlines() if f"pip install -r {words}" in line]
        assert line.startswith("python3 -m venv .venv && . .venv/bin/activate && ")


def test_every_recipe_is_described():
    recipes = (ROOT / "docs" / "recipes.md").read_text()
    for path in (ROOT / "configs").glob("*.yaml"):
        assert f"`configs/{path.name}`" in recipes
