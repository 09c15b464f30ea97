"""An evaluation as grpo_eval.py leaves it in a folder: written and read, summarised, told in words."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from reporting.files import read_records, read_yaml, write_records, write_whole
from reporting.plots import draw_evaluation, or_warn
from reporting.statistics import over_questions, sampled_statistics


@dataclass
class Evaluation:
    """A record a question, and the settings with the report."""

    records: list
    settings: dict


def read_evaluation(folder):
    """The evaluation in a folder; OSError or ValueError where it is none."""
    folder = Path(folder)
    records = list(read_records(folder / "samples.jsonl", broken="raise"))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return Evaluation(records, report | read_yaml(folder / "run_config.yaml"))


def write_evaluation(folder, report, records):
    """Write the records, {name of a file: records}, the report and the picture."""
    for name, rows in records.items():
        write_records(folder / f"{name}.jsonl", rows)
    write_whole(folder / "report.json", json.dumps(report, indent=2) + "\n")
    or_warn(draw_evaluation, report, records["samples"], folder)


def forget_answers(folder):
    """Delete the kept answers of an evaluation: all of them are in samples.jsonl now."""
    for path in folder.glob("answers*-*.jsonl"):
        path.unlink(missing_ok=True)  # another machine may share the disk


def question_scores(records):
    """For each question the mean score of its samples."""
    return [fmean(r["exact_match"]["strict-match"]) for r in records]


def summarise(records, skipped):
    """The numbers of a report. A question whose prompt was too long to ask counts as wrong."""
    samples = len(records[0]["resps"])
    report = {"questions": len(records) + skipped, "skipped": skipped, "samples_per_question": samples}
    for name, key in (("accuracy", "strict-match"), ("accuracy_last_number", "flexible-extract")):
        scores = [fmean(r["exact_match"][key]) for r in records] + [0.0] * skipped
        report |= {name: round(fmean(scores), 4), f"{name}_ci95": over_questions(scores)[1:]}
    for column in ("subject", "level", *records[0].get("by", ())):
        if groups := _accuracy_by(column, records):
            report[f"accuracy_by_{column}"] = groups
    if samples > 1:
        report |= sampled_statistics(records)
    answers = [answer for r in records for answer in r["filtered_resps"]["strict-match"]]
    stops = [stop for r in records for stop in r["stop_condition"]]
    return report | {
        "parsable": round(fmean(answer not in (None, "") for answer in answers), 4),
        "truncated": round(fmean(stop == "length" for stop in stops), 4),
        "mean_length": round(fmean(length for r in records for length in r["length"]), 2),
        "mean_reward": round(fmean(reward for r in records for reward in r["reward"]), 4),
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
    """The lines to print: the report in words, and in the last line as one JSON object."""
    low, high = report["accuracy_ci95"]
    lines = [
        f"{report['questions']} questions in {report['seconds']} s; "
        f"completions in {folder / 'samples.jsonl'}",
        f"accuracy {report['accuracy']:.3f} (95% interval {low:.3f} to {high:.3f}); "
        f"by the last number in the text {report['accuracy_last_number']:.3f}; "
        f"parsable {report['parsable']:.3f}; cut off {report['truncated']:.3f}; "
        f"mean length {report['mean_length']}",
    ]
    if "m3po" in report:
        pair = report["m3po"]["against_single_paths"]
        low, high = pair["difference_ci95"]
        lines.append(
            f"interacting paths {pair['accuracy_b']:.3f}, single paths {pair['accuracy_a']:.3f}: "
            f"difference {pair['difference']:+.3f} (95% interval {low:+.3f} to {high:+.3f}), "
            f"mean of {report['samples_per_question']} samples"
        )
    return [*lines, json.dumps(report)]
