"""An evaluation as grpo_eval.py leaves it in a folder: written and read, summarised, told in words."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from errors import counted, one_line
from reporting.files import read_records, read_yaml, write_records, write_whole
from reporting.page import write_report
from reporting.plots import draw_evaluation, or_warn
from reporting.statistics import over_questions, sampled_statistics, scores_of

MOST_VALUES = 12  # of a column, for which a table has rows; report.json and the page have all
GRADES = ("strict-match", "flexible-extract")  # lm-evaluation-harness's names


@dataclass
class Evaluation:
    """A record a question, and the settings with the report."""

    records: list
    settings: dict


def read_evaluation(folder):
    """The evaluation in a folder; OSError or ValueError where it is none.

    Earlier versions kept no records of skipped questions: they get some, so that they count here, too.
    """
    folder = Path(folder)
    records = list(read_records(folder / "samples.jsonl", broken="raise"))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    missing = report.get("skipped", 0) - sum(record.get("skipped", False) for record in records)
    if records:
        samples = len(records[0]["exact_match"]["strict-match"])
        records += [{**skipped_record(samples), "doc_id": "skipped"}] * missing
    return Evaluation(records, report | read_yaml(folder / "run_config.yaml"))


def skipped_record(samples):
    """What the record of a question that was too long to ask says of its answers: there are none."""
    grades, answers = ({key: [value] * samples for key in GRADES} for value in (0.0, None))
    return {
        "prompt_hash": "",
        "target": "",
        "skipped": True,
        "resps": [""] * samples,
        "filtered_resps": answers,
        "exact_match": grades,
        "reward": [0.0] * samples,
        "length": [0] * samples,
        "stop_condition": ["skipped"] * samples,
    }


def write_evaluation(folder, report, records):
    """Write the records, {name of a file: records}, the report, the picture and the page."""
    for name, rows in records.items():
        write_records(folder / f"{name}.jsonl", rows)
    write_whole(folder / "report.json", json.dumps(report, indent=2) + "\n")
    or_warn(draw_evaluation, report, records["samples"], folder)
    or_warn(write_report, folder)


def forget_answers(folder):
    """Delete the kept answers of an evaluation: all of them are in samples.jsonl now."""
    for path in folder.glob("answers*-*.jsonl"):
        path.unlink(missing_ok=True)  # another machine may share the disk


def question_scores(records):
    """For each question the mean score of its samples."""
    return [fmean(scores_of(record)) for record in records]


def undecided_answers(records):
    """How many answers the grader did not decide on."""
    return sum(grade is None for record in records for grade in record["exact_match"]["strict-match"])


def summarise(records, skipped=0, equal=None):
    """The numbers of a report.

    A question whose prompt was too long to ask and an answer that the grader did not decide on count as not
    right in every one of them, and are counted. `skipped` such questions come to those that have a record.
    `equal`: see `statistics.votes`.
    """
    asked = [record for record in records if not record.get("skipped")]
    samples = len(records[0]["resps"])
    records = records + [skipped_record(samples)] * skipped
    report = {
        "questions": len(records),
        "skipped": len(records) - len(asked),
        "samples_per_question": samples,
        "undecided": undecided_answers(records),
    }
    for name, key in zip(("accuracy", "accuracy_last_number"), GRADES, strict=True):
        scores = [fmean(scores_of(record, key)) for record in records]
        report |= {name: round(fmean(scores), 4), f"{name}_ci95": over_questions(scores)[1:]}
    for column in ("subject", "level", *records[0].get("by", ())):
        if groups := _accuracy_by(column, records):
            report[f"accuracy_by_{column}"] = groups
    if samples > 1:
        report |= sampled_statistics(records, equal)
    answers = [answer for r in asked for answer in r["filtered_resps"]["strict-match"]]
    stops = [stop for r in asked for stop in r["stop_condition"]]
    return report | {
        "parsable": round(fmean(answer not in (None, "") for answer in answers), 4),
        "truncated": round(fmean(stop == "length" for stop in stops), 4),
        "mean_length": round(fmean(length for r in asked for length in r["length"]), 2),
        "mean_reward": round(fmean(reward for r in asked for reward in r["reward"]), 4),
    }


def _accuracy_by(column, records):
    """Accuracy for each value of a column; nothing where no record has one."""
    groups = {}
    for record, score in zip(records, question_scores(records), strict=True):
        columns = record.get("by", {})
        value = columns[column] if column in columns else record.get(column)
        groups.setdefault("" if value is None else str(value), []).append(score)
    if not any(groups):
        return {}
    return {value or "none": _group_accuracy(scores) for value, scores in sorted(groups.items())}


def _group_accuracy(scores):
    interval = over_questions(scores)[1:]
    return {"accuracy": round(fmean(scores), 4), "ci95": interval, "questions": len(scores)}


def told(report, folder):
    """The lines for people: a table of what was found, and what to know beside it."""
    sides = {"": report} | ({"interacting": report["m3po"]} if "m3po" in report else {})
    lines = [
        f"{counted(report['questions'], 'question')} in {report['seconds']} s; "
        f"completions in {folder / 'samples.jsonl'}",
        f"to look at them: {folder / 'report.html'}",
        *_table(sides),
    ]
    for label, side in sides.items():
        words = [f"parsable {side['parsable']:.3f}", f"cut off {side['truncated']:.3f}"]
        advice = "; --max_completion_length is short, or the model does not end" * (side["truncated"] > 0.2)
        lines.append(f"{label or 'answers'}: {', '.join(words)}, mean length {side['mean_length']}{advice}")
    if "m3po" in report:
        pair = report["m3po"]["against_single_paths"]
        low, high = pair["difference_ci95"]
        lines.append(
            f"interacting paths {pair['accuracy_b']:.3f}, single paths {pair['accuracy_a']:.3f}: "
            f"difference {pair['difference']:+.3f} (95% interval {low:+.3f} to {high:+.3f}), "
            f"mean of {report['samples_per_question']} samples"
        )
    return lines


def _rows_by_column(sides):
    """Rows of `_table`: the accuracy of each value of a column, where it has few enough to be read."""
    report, rows = next(iter(sides.values())), []
    for key in (key for key in report if key.startswith("accuracy_by_") and len(report[key]) <= MOST_VALUES):
        for value, group in report[key].items():
            row = [f"{key.removeprefix('accuracy_by_')} {one_line(value, 40)} ({group['questions']})"]
            for found in (side[key][value] for side in sides.values()):
                low, high = found["ci95"]
                row += [f"{found['accuracy']:.3f}", f"{low:.3f} to {high:.3f}"]
            rows.append(row)
    return rows


def _table(sides):
    """Lines of a table: each measure with its 95% interval for each side, {label: report}, and the counts."""
    report = next(iter(sides.values()))
    names = {"accuracy": "accuracy", "accuracy_last_number": "by the last number in the text"}
    names |= {name: name for name in report if name.partition("@")[0] in ("pass", "maj", "mean")}
    rows = [["", *(word for label in sides for word in (label or "value", "95% interval"))]]
    for key, name in names.items():
        row = [name]
        for side in sides.values():
            value, low, high = side[key] if "@" in key else (side[key], *side[f"{key}_ci95"])
            row += [f"{value:.3f}", f"{low:.3f} to {high:.3f}"]
        rows.append(row)
    rows += _rows_by_column(sides)
    answers = report["questions"] * report["samples_per_question"]
    for key, whole in (
        ("skipped", f"of {counted(report['questions'], 'question')}"),
        ("undecided", f"of {counted(answers, 'answer')}"),
    ):
        counts = [word for side in sides.values() for word in (str(side[key]), whole)]
        rows.append([key, *counts])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    note = "Skipped questions (prompt too long) and undecided answers count as not right in every row."
    return [line.rstrip() for line in lines] + [note]
