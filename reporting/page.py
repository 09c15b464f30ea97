"""The page of a run or an evaluation, report.html: summary, curves, completions, what changed.

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

from errors import counted
from reporting.files import (
    changes_of,
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
MAX_ANSWERS, MAX_CHARACTERS = 200_000, 20_000_000  # of an evaluation in one page: it opens in a second
TEMPLATE = Path(__file__).with_name("page_template.html")

OF_A_PATH = (
    "generation reward rewards advantage right extracted length stop_condition think_end mix mix_dtype alone "
    "alone_completion alone_extracted alone_right"
).split()
SETTINGS = (
    "model warm_start dataset answer_format grading reward_set reward batch_size num_generations "
    "max_completion_length learning_rate ema_decay beta "
    "m3po_lambda m3po_temperature m3po_similarity m3po_control seed"
).split()
OF_AN_EVALUATION = (
    "model api dataset split limit answer_format grading num_samples temperature top_p top_k "
    "max_completion_length m3po_lambda m3po_temperature m3po_similarity m3po_control seed"
).split()
TRENDS = {"reward": "reward", "correct": "right", "completion_length": "length", "truncated": "cut off",
          "kl": "KL", "perplexity": "perplexity", "frac_reward_zero_std": "groups without a signal",
          "thinking_paths": "paths that think", "input_change": "inputs moved by listening",
          "gate_entropy": "entropy of the weights over its maximum"}  # fmt: skip


@dataclass
class GroupLines:
    """The lines of rollouts.jsonl that hold a group: where they begin, how many, and their size in bytes."""

    offset: int
    paths: int = 0
    size: int = 0


def read_groups(path, size=0, max_rollouts=MAX_ROLLOUTS, max_bytes=MAX_BYTES):
    """Groups of completions in the order of steps: those with tokens first, evenly over the run.

    `size`: paths of a whole group; one that has fewer, since it is being written or has damaged lines, is
    left out. Only what is shown is kept: the file may be larger than the memory. Returns the groups, and the
    file's number of them.
    """
    detailed, plain, group = [], [], None
    for offset, length, record in located_records(path, broken="skip"):
        generation = record.get("generation")
        if generation == 0:
            group = GroupLines(offset)
            (detailed if "tokens" in record else plain).append(group)
        elif group and (generation != group.paths or offset != group.offset + group.size):
            group = None  # a damaged line stood before this one
        if group:
            group.paths += 1
            group.size += length
    detailed, plain = ([group for group in groups if group.paths >= size] for groups in (detailed, plain))
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
    steps = evenly(sorted({row["step"] for row in read_records(path, broken="skip")}), MAX_EVALUATIONS)
    questions, seen = {}, Counter()
    for row in read_records(path, broken="skip"):
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
    if "epoch" in last:
        pairs.append(("passes over the problems", _passes(lines)))
    pairs += _accuracy_pairs(lines) + _paired_change(evaluations["questions"])
    for name, label in TRENDS.items():
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            pairs.append((label, f"{fmean(values[:tenth]):.3g} → {fmean(values[-tenth:]):.3g}"))
    pairs += _listening_pairs(lines)
    skipped = sum("skipped" in line for line in lines)
    return pairs + ([("steps skipped", str(skipped))] if skipped else [])


def _passes(lines):
    """How many, and from where on what is right in training says little of new problems."""
    text = f"{lines[-1]['epoch']:.2g}"
    again = next((line["step"] for line in lines if line.get("epoch", 0) > 1), None)
    is_sampled = "correct" in lines[-1]
    return text + (f"; from step {again} on, they were trained on before" if again and is_sampled else "")


def _listening_pairs(lines):
    """What listening changed in the groups that were read again without it, over the run."""
    read = [line for line in lines if line.get("listening_tokens")]
    if not read:
        return []
    tokens, changed, right, wrong = (
        sum(line[f"listening_{name}"] for line in read)
        for name in ("tokens", "changed_tokens", "became_right", "became_wrong")
    )
    groups = sum(line["listening_changed_tokens"] > 0 for line in read)
    return [
        ("groups changed by listening", f"{groups} of {len(read)} that were read again"),
        ("tokens changed by listening", f"{changed:,} of {tokens:,} ({changed / tokens:.2%})"),
        ("answers changed by listening", f"{right} became right, {wrong} became wrong"),
    ]


def _accuracy_pairs(lines):
    """The last held-out accuracy, and the best where that was another."""
    evaluated = [line for line in lines if "eval_accuracy" in line]
    if not evaluated:
        return []
    last, before = evaluated[-1], lines[0].get("eval_accuracy_before")
    start = [] if before is None else [(before, 0)]  # the best of equals is the first, as with keep_best
    measured = start + [(line["eval_accuracy"], line["step"]) for line in evaluated]
    best, best_step = max(measured, key=lambda pair: pair[0])
    accuracy, questions = last["eval_accuracy"], last["eval_questions"]
    low, high = clopper_pearson(round(accuracy * questions), questions)
    text = f"{before:.3f} → " if start else ""
    text += f"{accuracy:.3f} ({low:.3f}–{high:.3f}) of {questions}, after step {last['step']}"
    pairs = [("held-out accuracy", text)]
    if best_step != last["step"]:
        pairs.append(("best", f"{best:.3f} after step {best_step}"))
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
    text = f"{counted(gained, 'question')} gained, {lost} lost: p = {p:#.2g}, {verdict}"
    return [("first → last evaluation, paired", text)]


def page(folder):
    """The page of a run as text."""
    folder = Path(folder)
    settings = read_run_config(folder)
    evaluations = read_evaluations(folder / "evaluations.jsonl")
    groups, total = read_groups(folder / "rollouts.jsonl", settings.get("num_generations", 0))
    shown = {key: settings[key] for key in SETTINGS if settings.get(key) is not None}
    if not shown.get("ema_decay"):  # then what is evaluated is as everybody expects
        shown.pop("ema_decay", None)
    if "reward" in shown:  # which takes the place of a set
        shown.pop("reward_set", None)
    if changes := changes_of(settings):
        shown["changes"] = " ".join(changes).replace("`", "")
    data = {
        "kind": "run",
        "summary": summary(read_metrics(folder), evaluations),
        "settings": shown,
        "groups": groups,
        "total": total,
        "evaluations": evaluations,
    }
    picture = _picture(folder / "curves.svg", otherwise="Curves come with the tenth step.")
    return filled(TEMPLATE, folder.resolve().name, data, CURVES=picture)


def evaluation_page(folder):
    """The page of an evaluation as text, with its interacting paths as another side where it has them."""
    folder = Path(folder)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    sides = {"single paths": [list(read_records(folder / "samples.jsonl", broken="raise"))]}
    if "m3po" in report:
        sides["interacting"] = [list(read_records(folder / "samples_m3po.jsonl", broken="raise"))]
    settings = read_run_config(folder)
    data = {
        "summary": evaluation_summary(report),
        "settings": {key: settings[key] for key in OF_AN_EVALUATION if settings.get(key) is not None},
    }
    data |= questions_of(sides if len(sides) > 1 else {folder.resolve().name: sides["single paths"]})
    return filled(TEMPLATE, folder.resolve().name, data, CURVES=_picture(folder / "curves.svg"))


def comparison_page(sides, folders, results, picture):
    """The page of a comparison as text: sides {name: evaluations}, each the records of the same questions in
    the same order; folders {name: those of its evaluations}; results as compare.json has them; picture: a
    path.
    """
    pairs = []
    for result in results:
        low, high = result["difference_ci95"]
        name = f"{result['b']} against {result['a']}"
        text = f"{result['accuracy_a']:.3f} → {result['accuracy_b']:.3f}: {result['difference']:+.3f} "
        text += f"({low:+.3f} to {high:+.3f}), {result['test']} p = {result['p']:#.2g}"
        pairs += [(name, text), (f"{name}, questions", f"{result['gained']} gained, {result['lost']} lost")]
    data = {"summary": pairs, "settings": folders} | questions_of(sides)
    return filled(TEMPLATE, " | ".join(sides), data, CURVES=_picture(picture))


def evaluation_summary(report):
    """Pairs (label, text) of what one wants to know first of an evaluation's report."""
    shares = {"accuracy": "accuracy", "accuracy_last_number": "by the last number in the text"}
    pairs = []
    for side, of in {"": report, "interacting: ": report.get("m3po") or {}}.items():
        intervals = {label: (of[key], *of[f"{key}_ci95"]) for key, label in shares.items() if key in of}
        votes = [name for name in of if re.fullmatch(r"(pass|maj)@\d+", name) and name != "pass@1"]
        intervals |= {name: of[name] for name in votes}  # pass@1 and mean@k are the accuracy
        for label, (value, low, high) in intervals.items():
            pairs.append((f"{side}{label}", f"{value:.3f} ({low:.3f}–{high:.3f})"))
        plain = {"mean_length": "tokens an answer", "truncated": "cut off", "undecided": "undecided answers"}
        pairs += [(f"{side}{label}", f"{of[key]:g}") for key, label in plain.items() if key in of]
    counts = {"questions": "questions", "samples_per_question": "samples of each", "skipped": "too long"}
    return [(label, str(report[key])) for key, label in counts.items() if key in report] + pairs


def questions_of(sides):
    """What the page shows of evaluations: sides {name: evaluations}, each a list of records; all have the
    same questions in the same order. Of very many questions some are left out, and of very long answers the
    middle.
    """
    runs = [(side, run) for side, evaluations in enumerate(sides.values()) for run in evaluations]
    first = runs[0][1]
    answers = max(1, sum(len(run[0]["resps"]) for _, run in runs if run))
    shown, frames = evenly(range(len(first)), max(1, MAX_ANSWERS // answers)), {}
    groups = [question_of(first[i], [(side, run[i]) for side, run in runs], frames) for i in shown]
    paths = [path for group in groups for path in group["paths"]]
    longest = longest_text([len(path["text"]) for path in paths], MAX_CHARACTERS)
    for path in paths:
        path["text"] = without_middle(path["text"], longest)
    return {
        "kind": "evaluation",
        "sides": list(sides),
        "frames": list(frames),
        "groups": groups,
        "total": len(first),
    }


def question_of(record, answered, frames):
    """One question as the page has it: what its answers share once, and the answers of each (side, record).

    frames {(text before a question, text after it): number}: what prompts are made of; may get one more.
    """
    prompt, question = record.get("prompt", ""), record.get("question") or record.get("prompt", "")
    before, found, after = prompt.partition(question) if question else (prompt, "", "")
    frame = (before, after) if found or not question else (prompt,)
    by = {"subject": record.get("subject"), "level": record.get("level"), **(record.get("by") or {})}
    return {
        "id": str(record["doc_id"]),
        "hash": record["prompt_hash"][:12],
        "question": question,
        "answer": record["target"],
        "frame": frames.setdefault(frame, len(frames)),
        "by": {name: str(value) for name, value in by.items() if value not in (None, "")},
        "skipped": record.get("skipped", False),
        "paths": [path for side, other in answered for path in answers_of(other, side)],
    }


def answers_of(record, side):
    """The answers of a record as the page has them."""
    grades, found = record["exact_match"], record["filtered_resps"]
    for i, text in enumerate(record["resps"]):
        grade = grades["strict-match"][i]
        path = {
            "side": side,
            "right": None if grade is None else grade > 0,
            "extracted": found["strict-match"][i],
            "length": record["length"][i],
            "stop_condition": record["stop_condition"][i],
            "reward": record["reward"][i],
            "text": text,
        }
        if not grade and grades["flexible-extract"][i]:
            path["last"] = found["flexible-extract"][i]
        yield path


def longest_text(lengths, budget):
    """How many characters each text may have, so that together they have at most `budget`."""
    rest = budget
    for i, length in enumerate(sorted(lengths)):
        share = rest // (len(lengths) - i)
        if length > share:
            return share
        rest -= length
    return max(lengths, default=0)


def without_middle(text, longest):
    """A text of at most so many characters, and a note where the middle of a longer one was."""
    if len(text) <= longest:
        return text
    note = f"\n[... {len(text) - longest:,} characters are left out here; samples.jsonl has them ...]\n"
    return text[: longest // 2] + note + text[len(text) - (longest - longest // 2) :]


def style_of_a_page():
    """The look of report.html, for other pages."""
    return re.search(r"<style>\n(.*?)</style>", TEMPLATE.read_text(encoding="utf-8"), re.DOTALL)[1]


def filled(template, title, data, **parts):
    """A template with its title, its data, and `parts`, which are markup."""
    text = Path(template).read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    parts |= {
        # the page's policy lets this script run only
        "HASH": _base64(hashlib.sha256(script.encode()).digest()),
        "TITLE": html.escape(title.encode(errors="replace").decode()),
        # nothing in the data can end its block
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(HASH|TITLE|CURVES|STYLE|DATA)\}\}", lambda match: parts[match[1]], text)


def _base64(data):
    return base64.b64encode(data).decode()


def _picture(path, otherwise="No picture was drawn."):
    """An image with the curves as markup, or a paragraph where there is none."""
    if not Path(path).exists():
        return f"<p>{otherwise}</p>"
    return image(f"data:image/svg+xml;base64,{_base64(Path(path).read_bytes())}", "Curves")


def image(source, alt):
    """Markup of a picture as wide as a page, with a line that narrow windows show: they cut it off."""
    hint = '<p class="quiet sideways">The picture is wider than the window: scroll it sideways.</p>'
    return f'{hint}<img alt="{html.escape(alt)}" src="{source}">'


def write_report(folder):
    """Write report.html into the folder of a run, or of an evaluation; returns its path."""
    path = Path(folder) / "report.html"
    write_whole(path, (page if (Path(folder) / "metrics.jsonl").exists() else evaluation_page)(folder))
    return path
