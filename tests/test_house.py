"""How the project is built: which room imports which, what loads torch, and names that nobody else has."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("answers", "problems", "decoding", "learning", "reporting", "running")
FILES = [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).glob("*.py"))]

# What each room and each file of the root may import of the others, beside errors.
ARROWS = {
    "errors": set(),
    "m3po_module": set(),
    "answers": set(),
    "problems": {"answers"},
    "rewards": {"answers"},
    "reporting": {"answers"},
    "decoding": {"m3po_module"},
    "learning": {"decoding", "m3po_module"},
    "running": {"learning", "reporting", "decoding", "problems", "rewards", "answers"},
    "solver": {*ROOMS, "m3po_module", "rewards"},
    "sft_train": {*ROOMS, "m3po_module", "rewards"},
    "grpo_train": {*ROOMS, "m3po_module", "rewards", "sft_train"},
    "grpo_eval": {*ROOMS, "m3po_module", "rewards", "solver"},
    "grpo_study": {*ROOMS, "m3po_module", "rewards", "sft_train", "grpo_train"},
}


def room_of(file):
    return file.stem if file.parent == ROOT else file.parent.name


def imported(file):
    """The top-level names that a file imports, at its top or within its functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield room_of(file) if node.level else node.module.partition(".")[0]


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_only_the_rooms_that_the_plan_allows(room):
    refused = ARROWS.keys() - ARROWS[room] - {room, "errors"}
    files = [file for file in FILES if room_of(file) == room]
    assert files
    assert [(file.name, name) for file in files for name in imported(file) if name in refused] == []


def test_every_room_and_every_file_of_the_root_is_in_the_plan():
    folders = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert {room_of(file) for file in FILES} | folders == set(ARROWS)


@pytest.mark.parametrize("room", ["answers", "problems", "reporting", "rewards"])
def test_what_needs_no_torch_loads_none(room):
    """Importing torch takes seconds and half a gigabyte, which grading and drawing have no use for."""
    files = [file.relative_to(ROOT) for file in FILES if room_of(file) == room and file.stem != "__main__"]
    modules = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    program = f"import sys, {', '.join(modules)}\nprint(*{{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_nothing_needs_what_only_linux_has(file):
    """On Windows `import fcntl` ended every run in a traceback, on a Mac /proc/meminfo ended --check."""
    assert not {"fcntl", "resource", "termios", "pwd", "grp", "msvcrt"} & set(imported(file))
    assert '"/proc' not in file.read_text(encoding="utf-8")


def test_no_module_is_named_like_a_package_that_others_import():
    """`triton_kernels` of the project hid the package of that name, for which transformers and vLLM look."""
    taken = {*importlib.metadata.packages_distributions(), *sys.stdlib_module_names, "triton_kernels"}
    benchmarks = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    assert (set(map(room_of, FILES)) | benchmarks) & taken == set()


@pytest.mark.parametrize("name", ["grpo_train", "sft_train", "grpo_eval", "grpo_study"])
def test_what_a_script_has_read_early_keeps_its_name(name):
    """An import below had the same name, and main() got the name of a data set for its settings."""
    tree, bound = ast.parse((ROOT / f"{name}.py").read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append(node.id)
    assert bound.count("SETTINGS") == 1
