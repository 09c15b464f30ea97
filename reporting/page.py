"""The page of a run, report.html: summary, curves, rollouts side by side with who listened to whom, and what changed between evaluations.

python -m reporting RUN [RUN ...]

One file that loads nothing from elsewhere. Its template, page_template.html, holds the layout and the script; here are the numbers.
"""

import base64
import contextlib
import hashlib
import html
import json
import re
from pathlib import Path
from statistics import fmean

from scipy import stats

from reporting.files import read_metrics, read_yaml, write_whole
from reporting.statistics import mid_p

MOST_ROLLOUTS, MOST_BYTES = 2000, 10**8  # of rollouts.jsonl in one page: it opens in a second or two


TEMPLATE = Path(__file__).with_name("page_template.html")


KEPT = (
    "generation",
    "reward",
    "rewards",
    "advantage",
    "right",
    "extracted",
    "length",
    "stop_condition",
    "think_end",
    "mix",
    "alone",
)  # of a completion


SHOWN = ("model", "dataset", "answer_format", "batch_size", "num_generations", "max_completion_length", "learning_rate", "beta", "m3po_lambda",
         "m3po_temperature", "m3po_similarity", "seed")  # fmt: skip


def parsed(line):
    """What a line of JSON says; NaN and infinities, for which JSON has no word and a browser no patience, are None."""
    return json.loads(line, parse_constant=lambda _: None)


def read_lines(path):
    """(place in the file, bytes, object) of each line of a JSON Lines file; none where there is no file, and half a line at the end is left out."""
    place = 0
    with open(path, "rb") if Path(path).exists() else contextlib.nullcontext(()) as file:
        for line in file:
            try:
                yield place, len(line), parsed(line)
            except ValueError:
                return
            place += len(line)


def read_groups(path, size=0, most=MOST_ROLLOUTS, most_bytes=MOST_BYTES):
    """The completions as groups, in the order of steps, at most `most` completions: groups with tokens first, evenly over the run.

    `size`: paths of a whole group, which the last may not be yet. Nothing but what is shown is kept: the file may be larger than the memory. Returns the
    groups, and how many there are in the file.
    """
    groups, group = {True: [], False: []}, None  # with tokens, without: [place, paths, bytes]
    for place, length, record in read_lines(path):
        if record["generation"] == 0:
            group = [place, 0, 0]
            groups["tokens" in record].append(group)
        if group:
            group[1:] = group[1] + 1, group[2] + length
    for some in groups.values():
        if some and some[-1] is group and group[1] < size:
            some.pop()
    paths, length = (max((group[n] for some in groups.values() for group in some), default=1) for n in (1, 2))
    room = max(1, min(most // paths, most_bytes // length))
    kept = evenly(groups[True], room)
    kept = sorted(kept + evenly(groups[False], room - len(kept)))
    return [group_of(lines_at(path, place, count)) for place, count, _ in kept], sum(
        map(len, groups.values())
    )


def lines_at(path, place, count):
    with open(path, "rb") as file:
        file.seek(place)
        return [parsed(file.readline()) for _ in range(count)]


def evenly(items, count):
    """`count` of the items, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def group_of(records):
    """One group as the page has it: what its paths share once, and the paths."""
    first, paths = records[0], []
    for record in records:
        path = {key: record[key] for key in KEPT if key in record}
        path |= (
            {
                "pieces": record["pieces"],
                "logps": [v if v is None else round(100 * v) for v in record["logps"]],
            }
            if "pieces" in record
            else {"text": record["completion"]}
        )
        paths.append(path)
    shared = {
        "step": first["step"],
        "id": first["example_id"],
        "question": first.get("question"),
        "answer": first["answer"],
        "prompt": first["prompt"],
    }
    return shared | {"paths": paths}


def read_evaluations(path):
    """The held-out questions with their answers at each evaluation: {steps, questions: [{id, question, answer, right, extracted, texts}]}, a list a step."""
    steps, questions = evenly(sorted({row["step"] for _, _, row in read_lines(path)}), 12), {}
    for _, _, row in read_lines(path):
        if row["step"] in steps:
            shared = {"id": row["example_id"], "question": row["question"], "answer": row["answer"]}
            question = questions.setdefault(
                (row["example_id"], row["question"]),
                shared | {name: [None] * len(steps) for name in ("right", "extracted", "texts")},
            )
            for name, value in (
                ("right", row["right"]),
                ("extracted", row.get("extracted")),
                ("texts", row["completion"]),
            ):
                question[name][steps.index(row["step"])] = value
    return {"steps": steps, "questions": list(questions.values())}


def summary(lines, evaluations):
    """Pairs (label, text) of what one wants to know first."""
    if not lines:
        return []
    last, tenth = lines[-1], max(1, len(lines) // 10)
    pairs = [("steps", str(last["step"])), ("training", f"{last['train_seconds'] / 60:.1f} min")]
    accuracies = [
        (line["step"], line["eval_accuracy"], line["eval_questions"])
        for line in lines
        if "eval_accuracy" in line
    ]
    if accuracies:
        step, accuracy, questions = accuracies[-1]
        interval = stats.binomtest(round(accuracy * questions), questions).proportion_ci(method="wilson")
        before = f"{lines[0]['eval_accuracy_before']:.3f} → " if "eval_accuracy_before" in lines[0] else ""
        pairs.append(
            (
                "held-out accuracy",
                f"{before}{accuracy:.3f} ({interval.low:.3f}–{interval.high:.3f}) of {questions}, after step {step}",
            )
        )
        best = max(accuracies, key=lambda found: found[1])
        if best[0] != step:
            pairs.append(("best", f"{best[1]:.3f} after step {best[0]}"))
    both = [
        (q["right"][0], q["right"][-1])
        for q in evaluations["questions"]
        if len(q["right"]) > 1 and None not in (q["right"][0], q["right"][-1])
    ]
    if both:
        gained, lost = both.count((False, True)), both.count((True, False))
        p = mid_p(gained, lost)
        verdict = "no sure change" if p > 0.05 else "better" if gained > lost else "worse"
        pairs.append(
            (
                "first → last evaluation, paired",
                f"{gained} questions gained, {lost} lost: p = {p:.2g}, {verdict}",
            )
        )
    for name, label in (("reward", "reward"), ("correct", "right"), ("completion_length", "length"), ("truncated", "cut off"), ("kl", "KL"),
                        ("perplexity", "perplexity"), ("frac_reward_zero_std", "groups without a signal"),
                        ("input_change", "inputs moved by listening")):  # fmt: skip
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            pairs.append((label, f"{fmean(values[:tenth]):.3g} → {fmean(values[-tenth:]):.3g}"))
    skipped = sum("skipped" in line for line in lines)
    return pairs + ([("steps skipped", str(skipped))] if skipped else [])


def page(folder):
    """The page as text."""
    folder = Path(folder)
    lines, settings = (
        read_metrics(folder),
        read_yaml(folder / "run_config.yaml") if (folder / "run_config.yaml").exists() else {},
    )
    curves, name = folder / "curves.svg", folder.resolve().name
    evaluations = read_evaluations(folder / "evaluations.jsonl")
    groups, total = read_groups(folder / "rollouts.jsonl", settings.get("num_generations", 0))
    data = {
        "name": name, "summary": summary(lines, evaluations), "settings": {k: settings[k] for k in SHOWN if settings.get(k) is not None},
        "groups": groups, "total": total, "evaluations": evaluations,
    }  # fmt: skip
    picture = (
        curves.exists()
        and f'<img alt="Curves of the run over its steps" src="data:image/svg+xml;base64,{base64.b64encode(curves.read_bytes()).decode()}">'
    )
    text = TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    filled = {
        "HASH": base64.b64encode(
            hashlib.sha256(script.encode()).digest()
        ).decode(),  # the only script that the page's own policy lets run
        "TITLE": html.escape(name),
        "CURVES": picture or "<p>Curves come with the tenth step.</p>",
        "DATA": json.dumps(data, separators=(",", ":")).replace(
            "<", "\\u003c"
        ),  # no text of a model can end the block
    }
    return re.sub(r"\{\{(HASH|TITLE|CURVES|DATA)\}\}", lambda match: filled[match[1]], text)


def write_report(folder):
    """Write report.html into the folder of a run; returns its path."""
    path = Path(folder) / "report.html"
    write_whole(path, page(folder))
    return path
