"""Write the README's tables from benchmarks/results/*.json, between the markers `<!-- NAME -->` and `<!-- end -->`; --check only compares.

python benchmarks/tables.py [--check]
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def values(name):
    """{case: {metric: value}} of a result file, and the file."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    cases = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], {})[row["metric"]] = row["value"]
    return cases, result


def number(value, interval=None):
    return f"{value:.3f}" if interval is None else f"{value:.3f} ({interval[0]:.3f}–{interval[1]:.3f})"


def table(header, rows):
    return "\n".join(["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(map(str, r)) + " |" for r in rows)])


def where(result):
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if k in ("torch", "transformers"))
    return f"{result['script']}, {result['card'] if result['card'] != 'none' else result['cpu']}, {versions}, {result['date']}"


def both(m, kind):
    """Before -> after of one kind of decoding."""
    return [number(m[f"{kind}_{when}"], m[f"{kind}_{when}_ci95"]) for when in ("before", "after")]


def tiny_job():
    cases, result = values("tiny_job")
    rows = [[case, *both(m, "greedy"), *both(m, "sampled"), f"{m['seconds']:.0f}"] for case, m in cases.items()]
    header = ["case", "greedy before", "greedy after", "sampled before", "sampled after", "seconds"]
    questions = next(iter(cases.values()))["problems"]
    return table(header, rows) + f"\n\n{questions} held-out problems, 95% intervals; `{where(result)}`; {result['parallel']} run(s) at a time, one core each."


def gsm8k_h100():
    cases, result = values("gsm8k_h100")
    m = cases["qwen-coder-0.5b"]
    rows = [
        ["greedy, inside `<answer>`", number(m["exact_zero_shot"]), *both(m, "exact")],
        ["sampled at temperature 1, mean of 4", "", *both(m, "sampled")],
    ]
    text = table(["accuracy", "zero-shot", "after the warm start", "after GRPO with M3PO"], rows)
    return text + (
        f"\n\nQwen2.5-Coder-0.5B-Instruct, {m['questions']} test questions, one seed, 95% intervals. Warm start {m['warm_start_seconds']:.0f} s, "
        f"GRPO {m['train_seconds']:.0f} s = {m['train_steps']} steps of 64 x 8 completions, {m['bad_steps']} refused steps. Reloaded by plain transformers in "
        f"another process, float32: {m['reloaded_same_completions']} greedy completions the same. `{where(result)}`."
    )


def scoring():
    rows = []
    for name in ("scoring_cpu", "scoring_gpu"):
        cases, result = values(name)
        for case, m in cases.items():
            ours, plain = (f"{m[f'largest_difference{end}']:.2g} / {m[f'mean_difference{end}']:.2g}" for end in ("", "_plain_ids"))
            rows.append([case, m["sequences"], m["tokens"], ours, plain, f"`{where(result)}`"])
    return table(["case", "sequences", "tokens", "ours: largest / mean", "plain ids: largest / mean", "made by"], rows)


TABLES = {f.__name__: f for f in (tiny_job, gsm8k_h100, scoring)}


def rendered(readme):
    def fill(match):
        return f"<!-- {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", fill, readme, flags=re.DOTALL)


if __name__ == "__main__":
    readme = (ROOT / "README.md").read_text()
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if rendered(readme) == readme else "README.md differs from benchmarks/results: run  python benchmarks/tables.py")
    (ROOT / "README.md").write_text(rendered(readme))
