"""The page of a run, report.html: summary, curves, rollouts side by side, what changed between evaluations.

    python -m reporting RUN [RUN ...]

One file that loads nothing from elsewhere. The layout and the script are in page_template.html; here is what
they show.
"""

import base64
import hashlib
import html
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from reporting.files import (
    located_records,
    read_metrics,
    read_records,
    read_run_config,
    record_of,
    write_whole,
)
from reporting.statistics import clopper_pearson, mid_p

MAX_ROLLOUTS, MAX_BYTES = 2000, 10**8  # of rollouts.jsonl in one page: it opens in a second or two
MAX_EVALUATIONS = 12
TEMPLATE = Path(__file__).with_name("page_template.html")

OF_A_PATH = (
    "generation reward rewards advantage right extracted length stop_condition think_end mix mix_dtype alone"
).split()
SETTINGS = (
    "model dataset answer_format batch_size num_generations max_completion_length learning_rate beta "
    "m3po_lambda m3po_temperature m3po_similarity m3po_control seed"
).split()
TRENDS = {"reward": "reward", "correct": "right", "completion_length": "length", "truncated": "cut off",
          "kl": "KL", "perplexity": "perplexity", "frac_reward_zero_std": "groups without a signal",
          "input_change": "inputs moved by listening"}  # fmt: skip


@dataclass
class GroupLines:
    """The lines of rollouts.jsonl that hold a group: where they begin, how many, and their size in bytes."""

    offset: int
    paths: int = 0
    size: int = 0


def read_groups(path, size=0, max_rollouts=MAX_ROLLOUTS, max_bytes=MAX_BYTES):
    """Groups of completions in the order of steps: those with tokens first, evenly over the run.

    `size`: paths of a whole group; the last group may still be incomplete, and is then left out. Only what is
    shown is kept: the file may be larger than the memory. Returns the groups, and the file's number of them.
    """
    detailed, plain, group = [], [], None
    for offset, length, record in located_records(path):
        if record["generation"] == 0:
            group = GroupLines(offset)
            (detailed if "tokens" in record else plain).append(group)
        if group:
            group.paths += 1
            group.size += length
    for groups in (detailed, plain):
        if groups and groups[-1] is group and group.paths < size:
            groups.pop()
    most_paths = max((g.paths for g in detailed + plain), default=1)
    most_bytes = max((g.size for g in detailed + plain), default=1)
    room = max(1, min(max_rollouts // most_paths, max_bytes // most_bytes))
    shown = evenly(detailed, room)
    shown = sorted(shown + evenly(plain, room - len(shown)), key=lambda g: g.offset)
    return [group_of(lines_at(path, g.offset, g.paths)) for g in shown], len(detailed) + len(plain)


def lines_at(path, offset, count):
    with open(path, "rb") as file:
        file.seek(offset)
        return [record_of(file.readline()) for _ in range(count)]


def evenly(items, count):
    """`count` of the items, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def group_of(records):
    """One group as the page has it: what its paths share once, and the paths."""
    first = records[0]
    return {
        "step": first["step"],
        "id": first["example_id"],
        "question": first.get("question"),
        "answer": first["answer"],
        "prompt": first["prompt"],
        "paths": [path_of(record) for record in records],
    }


def path_of(record):
    """A completion as the page has it, its log-probs in hundredths of a nat."""
    path = {key: record[key] for key in OF_A_PATH if key in record}
    if "pieces" not in record:
        return path | {"text": record["completion"]}
    logps = [None if logp is None else round(100 * logp) for logp in record["logps"]]
    return path | {"pieces": record["pieces"], "logps": logps}


def read_evaluations(path):
    """The held-out questions and their answers at each evaluation, at most MAX_EVALUATIONS of them.

    {steps, questions: [{id, question, answer, right, extracted, texts}]}; the last three hold a value a step.
    """
    steps = evenly(sorted({row["step"] for row in read_records(path)}), MAX_EVALUATIONS)
    questions, seen = {}, Counter()
    for row in read_records(path):
        if row["step"] not in steps:
            continue
        question = row["step"], row["example_id"], row["question"], row["answer"]
        key = *question[1:], seen[question]  # the n-th of questions that repeat stays the n-th
        seen[question] += 1
        if key not in questions:
            questions[key] = {"id": row["example_id"], "question": row["question"], "answer": row["answer"]}
            questions[key] |= {name: [None] * len(steps) for name in ("right", "extracted", "texts")}
        at = steps.index(row["step"])
        questions[key]["right"][at] = row["right"]
        questions[key]["extracted"][at] = row.get("extracted")
        questions[key]["texts"][at] = row["completion"]
    return {"steps": steps, "questions": list(questions.values())}


def summary(lines, evaluations):
    """Pairs (label, text) of what one wants to know first."""
    if not lines:
        return []
    last, tenth = lines[-1], max(1, len(lines) // 10)
    pairs = [("steps", str(last["step"])), ("training", f"{last['train_seconds'] / 60:.1f} min")]
    pairs += _accuracy_pairs(lines) + _paired_change(evaluations["questions"])
    for name, label in TRENDS.items():
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            pairs.append((label, f"{fmean(values[:tenth]):.3g} → {fmean(values[-tenth:]):.3g}"))
    skipped = sum("skipped" in line for line in lines)
    return pairs + ([("steps skipped", str(skipped))] if skipped else [])


def _accuracy_pairs(lines):
    """The last held-out accuracy, and the best where that was another."""
    evaluated = [line for line in lines if "eval_accuracy" in line]
    if not evaluated:
        return []
    last, best = evaluated[-1], max(evaluated, key=lambda line: line["eval_accuracy"])
    accuracy, questions = last["eval_accuracy"], last["eval_questions"]
    low, high = clopper_pearson(round(accuracy * questions), questions)
    before = f"{lines[0]['eval_accuracy_before']:.3f} → " if "eval_accuracy_before" in lines[0] else ""
    text = f"{before}{accuracy:.3f} ({low:.3f}–{high:.3f}) of {questions}, after step {last['step']}"
    pairs = [("held-out accuracy", text)]
    if best["step"] != last["step"]:
        pairs.append(("best", f"{best['eval_accuracy']:.3f} after step {best['step']}"))
    return pairs


def _paired_change(questions):
    """The questions gained and lost between the first evaluation and the last, where both asked some."""
    changes = [(q["right"][0], q["right"][-1]) for q in questions if len(q["right"]) > 1]
    changes = [change for change in changes if None not in change]
    if not changes:
        return []
    gained, lost = changes.count((False, True)), changes.count((True, False))
    p = mid_p(gained, lost)
    verdict = "no sure change"
    if p <= 0.05:
        verdict = "better" if gained > lost else "worse"
    text = f"{gained} questions gained, {lost} lost: p = {p:.2g}, {verdict}"
    return [("first → last evaluation, paired", text)]


def page(folder):
    """The page as text."""
    folder = Path(folder)
    name, settings = folder.resolve().name, read_run_config(folder)
    evaluations = read_evaluations(folder / "evaluations.jsonl")
    groups, total = read_groups(folder / "rollouts.jsonl", settings.get("num_generations", 0))
    data = {
        "name": name,
        "summary": summary(read_metrics(folder), evaluations),
        "settings": {key: settings[key] for key in SETTINGS if settings.get(key) is not None},
        "groups": groups,
        "total": total,
        "evaluations": evaluations,
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    filled = {
        # the page's policy lets this script run only
        "HASH": _base64(hashlib.sha256(script.encode()).digest()),
        "TITLE": html.escape(name),
        "CURVES": _picture(folder / "curves.svg"),
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # nothing can end the block
    }
    return re.sub(r"\{\{(HASH|TITLE|CURVES|DATA)\}\}", lambda match: filled[match[1]], template)


def _base64(data):
    return base64.b64encode(data).decode()


def _picture(path):
    if not path.exists():
        return "<p>Curves come with the tenth step.</p>"
    source = f"data:image/svg+xml;base64,{_base64(path.read_bytes())}"
    return f'<img alt="Curves of the run over its steps" src="{source}">'


def write_report(folder):
    """Write report.html into the folder of a run; returns its path."""
    path = Path(folder) / "report.html"
    write_whole(path, page(folder))
    return path
