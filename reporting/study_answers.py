"""The answers of a study's runs, read and scored: how each question was answered in a run at each step."""

import gzip
import json
import lzma
import re
import zlib

import numpy as np

from errors import DataError

OVER = ("finished", "collapsed", "refused")  # statuses of a run from which nothing more comes
MEASURES = {"mean": "mean@{}", "maj": "maj@{}", "pass": "pass@{}", "length": "length"}
MISSING = "missing"
UNPACK = {".gz": gzip.decompress, ".xz": lzma.decompress}  # .xz in a copy, see `study.keep_study`


def read_json(path):
    """What a JSON file holds, packed or not; None where there is no such file."""
    try:
        data = path.read_bytes()
        return json.loads(UNPACK.get(path.suffix, bytes)(data))
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def read_run(study, seed, arm, record):
    """Add a run's scores in each evaluation that is whole, and the names of the files that are not there.

    A run that collapsed or was refused has at each later step the answers of its last weights, and where none
    were saved (no step) all of these count as not right.
    """
    missing = study.missing_files[seed, arm] = []
    scores = study.scores[seed, arm] = {}
    folder = study.folder / "runs" / str(seed) / arm / "answers"
    for evaluation in study.plan["evaluations"]:
        name, there = evaluation["name"], _steps_there(folder, evaluation["name"])
        paths = [_path_of(step, there, record) for step in evaluation["steps"]]
        missing += [
            f"answers/{name}-{step}.json.gz"
            for step, path in zip(evaluation["steps"], paths, strict=True)
            if path is MISSING
        ]
        if MISSING not in paths:
            scores[name] = [path and read_answers(study, path, evaluation) for path in paths]


def _steps_there(folder, evaluation):
    """{step: path} of an evaluation's answers."""
    paths = [*folder.glob(f"{evaluation}-*.json.gz"), *folder.glob(f"{evaluation}-*.json.xz")]
    names = {path: path.name.partition(".json")[0] for path in paths}
    steps = {path: name.removeprefix(f"{evaluation}-") for path, name in names.items()}
    return {int(step): path for path, step in steps.items() if re.fullmatch("[0-9]+", step)}


def _path_of(step, there, record):
    """The answers that a run has at a step; None where it has no weights, MISSING where they should be."""
    if step in there:
        return there[step]
    if record["status"] == "finished":
        return MISSING
    if not record.get("step"):
        return None
    last = max((made for made in there if made <= step), default=0)
    return there[last] if last >= record["step"] else MISSING  # the answers must be of its last weights


def read_answers(study, path, evaluation):
    """The scores of the questions at a step, {measure: (Q,)}, in the order of the study's first run."""
    answers, name, samples = read_json(path), evaluation["name"], evaluation["samples"]
    try:
        ids = answers["questions"] or study.questions.get(name, [])  # none in a copy, see `slimmed`
        right = np.nan_to_num(np.array(answers["right"], dtype=float))  # undecided: not right
        if "length_sums" in answers:
            lengths = np.array(answers["length_sums"], dtype=float)[:, None].repeat(samples, 1) / samples
        else:
            lengths = np.array(answers["lengths"], dtype=float)
        votes = np.array(answers["votes"], dtype=float) if "votes" in answers else None
        shapes = {array.shape for array in (right, lengths, votes) if array is not None}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    shape = len(ids), samples
    if shapes != {shape}:
        raise DataError(f"{path}: holds {sorted(shapes)} answers, and must hold {shape}: questions, samples")
    scores = {"mean": right.mean(1), "pass": right.max(1), "length": lengths.mean(1)}
    if samples == 1:
        scores["maj"] = scores["mean"]
    elif votes is not None:
        scores["maj"] = majorities(right, votes)
    elif {"evaluation": name, "measure": "maj"} in study.plan["secondary"]:
        raise DataError(f"{path}: holds no votes, without which there is no majority")
    order = _order(study.questions.setdefault(name, ids), ids, path)
    return {measure: values[order] for measure, values in scores.items()}


def slimmed(answers, questions):
    """The same as far as the analysis reads it, without the ids where they are the study's."""
    small = {key: answers[key] for key in ("evaluation", "step", "right")}
    small["questions"] = None if answers["questions"] == questions else answers["questions"]
    if "votes" in answers and len(answers["votes"][0]) > 1:
        small["votes"] = answers["votes"]
    return small | {"length_sums": [sum(row) for row in answers["lengths"]]}


def write_packed(path, value):
    """Write JSON as a .xz file: a quarter smaller than .gz, and the same bytes for the same value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(value, separators=(",", ":")).encode()))


def majorities(right, votes):
    """Whether the answer that most samples of a question give is right, (Q,); see `statistics.majority`.

    votes: (Q, S), equal for equal answers, NaN for none. Of several with the same count the first wins.
    """
    counts = (votes[:, :, None] == votes[:, None, :]).sum(2)  # NaN equals nothing
    winner = counts.argmax(1)
    return np.where(counts.max(1) > 0, right[np.arange(len(right)), winner], 0.0)


def _order(questions, ids, path):
    """Where each of the study's questions stands in a file that has the same ones."""
    if ids == questions:
        return slice(None)
    places = {question: i for i, question in enumerate(ids)}
    if len(places) < len(questions) or places.keys() != set(questions):
        raise DataError(f"{path}: has other questions than the runs before it: all must answer the same")
    return [places[question] for question in questions]


def fill(study):
    """Turn each run's scores into arrays {measure: (steps, Q)}: 0 at steps without weights, and no length."""
    for scores in study.scores.values():
        for name, of_steps in scores.items():
            questions = len(study.questions.get(name, [""]))
            nothing = {measure: np.zeros(questions) for measure in MEASURES}
            nothing["length"] = np.full(questions, np.nan)
            of_steps = [nothing if step is None else step for step in of_steps]
            measures = set.intersection(*(set(step) for step in of_steps))
            scores[name] = {measure: np.array([step[measure] for step in of_steps]) for measure in measures}
