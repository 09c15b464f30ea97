"""The analysis of a study: study.json with every number, and study.html.

    python -m reporting.study OUT [--hide_means] [--keep FOLDER]

OUT is the folder that grpo_study.py filled: its plan, and the answers and metrics of its runs. Both files are
made anew from these each time. A verdict is read from complete data only.
"""

import argparse
import json
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from errors import DataError, SettingError, counted, one_line
from reporting.files import write_whole
from reporting.plots import series, smooth
from reporting.statistics import holm
from reporting.study_answers import read_json, slimmed, write_packed
from reporting.study_page import headline, look_sentence, study_page
from reporting.study_runs import peers_of, read_study
from reporting.study_statistics import compared, look, read_verdict, remark_on_spread

CURVES = {"reward": "reward", "correct": "right while sampling",
          "frac_reward_zero_std": "groups without a signal", "completion_length": "completion length, tokens",
          "truncated": "cut off", "entropy": "entropy, nats", "kl": "KL to the reference, nats",
          "grad_norm": "gradient norm", "input_change": "inputs moved by listening",
          "gate_entropy": "entropy of the weights over its maximum",
          "gate_same_token": "weight on peers with the same token",
          "gate_mean_cosine": "cosine of what is heard and the plain mean",
          "credit_size": "credit over advantage"}  # fmt: skip


def write_study(folder, hide_means=None):
    """Write study.json and study.html into a study's folder; returns what study.json holds.

    hide_means: show nothing of an incomplete study that tells one arm from another, and set the number of
    seeds once the first `look_after` are there (look.json, written once); None: as the plan says.
    """
    study = read_study(folder)
    if hide_means is None:
        hide_means = study.plan.get("hide_means", False)
    if study.look is None and hide_means and study.plan.get("look_after"):
        take_look(study)
    found = analysis(study, hide_means)
    write_whole(study.folder / "study.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_whole(study.folder / "study.html", study_page(found))
    return found


def keep_study(folder, to):
    """Copy what the analysis reads into another folder, packed, so that a repository can hold it.

    `write_study` makes the same study.json of both.
    """
    study, to = read_study(folder), Path(to)
    if to.exists():
        raise SettingError("keep", str(to), "is there already: name a folder to be made")
    notes = [
        path
        for pattern in ("*.json", "starts/*.json", "runs/*/*/run.json")
        for path in study.folder.glob(pattern)
    ]
    for path in notes:
        kept = to / path.relative_to(study.folder)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, kept)
    for path in study.folder.glob("runs/*/*/answers/*.json.?z"):
        answers = read_json(path)
        small = slimmed(answers, study.questions.get(answers["evaluation"]))
        write_packed(to / path.relative_to(study.folder).with_suffix(".xz"), small)
    write_packed(to / "questions.json.xz", study.questions)
    names = {"step", "train_seconds", *CURVES}
    for seed, arm in study.runs:
        lines = [{key: line[key] for key in line if key in names} for line in study.metrics(seed, arm)]
        write_packed(to / f"runs/{seed}/{arm}/metrics.json.xz", lines)


def take_look(study):
    """Set the number of seeds from the spread of the first paired differences, once these are there."""
    after = study.plan["look_after"]
    seeds = study.plan["seeds"][:after]
    paired = study.paired(study.plan["treatment"], study.plan["baseline"], study.primary, seeds)
    if len(paired) < after:
        return
    found = look([by_question.mean() for by_question in paired.values()], study.plan)
    study.look = plain({"after": after, "seeds_looked_at": seeds} | found)
    write_whole(study.folder / "look.json", json.dumps(study.look, indent=1) + "\n")


def analysis(study, hide_means=False):
    """What study.json holds, as plain data."""
    plan, missing = study.plan, study.missing()
    complete = not missing["confirmatory"]
    found = {"schema": 1, "name": plan["name"], "complete": complete, "hidden": hide_means and not complete}
    found |= {
        key: plan[key] for key in ("baseline", "treatment", "margin", "alpha", "effect", "power", "text")
    }
    found |= {"missing": missing["confirmatory"], "missing_exploratory": missing["exploratory"]}
    found |= {"notes": study.notes(), "seeds": study.seeds, "look": study.look, "starts": study.starts}
    found |= {"runs": list(study.runs.values()), "verdict": None, "result": None}
    if found["hidden"]:
        return plain(found)
    comparisons = compare_all(study)
    if complete and len(study.seeds) > 1:
        if plan["verdict"]:
            found["verdict"] = verdict_of(plan, comparisons)
        else:
            pair = f"{plan['treatment']} against {plan['baseline']} (the study's file asks for no verdict)"
            remark = remark_on_spread(comparisons[:1])
            found["result"] = f"{pair}. {difference_sentence(plan, comparisons[0])} {remark}".rstrip()
    found["endpoints"] = [endpoint_row(plan, endpoint) for endpoint in study.endpoints]
    found["arms"] = [arm_row(study, arm) for arm in plan["arms"]]
    return plain(found | {"comparisons": comparisons, "curves": curves(study)})


def plain(value):
    """The same without numpy: numbers to six digits, and None for what is no number."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def endpoint_row(plan, endpoint):
    """What an endpoint is: its evaluation's questions and temperature, its measure, and its role."""
    evaluation = next(e for e in plan["evaluations"] if e["name"] == endpoint.evaluation)
    row = {"name": endpoint.name, "role": endpoint.role, "measure": endpoint.measure}
    return row | {"evaluation": evaluation, "steps": endpoint.steps, "is_share": endpoint.is_share}


def arm_row(study, arm):
    """An arm: its settings, and for each endpoint the mean over seeds, their deviation, and each seed's."""
    name, seeds = arm["name"], study.seeds_of(arm["name"])
    outcomes = {}
    for endpoint in study.endpoints:
        if endpoint.steps is not None:
            continue  # it has a step for treatment and baseline only
        by_seed = {seed: study.value(name, seed, endpoint) for seed in seeds}
        by_seed = {seed: value for seed, value in by_seed.items() if value is not None}
        outcomes[endpoint.name] = {**spread_of(list(by_seed.values())), "by_seed": by_seed}
    seconds = [study.runs[seed, name].get("seconds") for seed in seeds if (seed, name) in study.scores]
    row = {"name": name, "role": arm["role"], "settings": arm["settings"], "seeds": seeds}
    row |= {"seconds": spread_of([s for s in seconds if s is not None])["mean"], "outcomes": outcomes}
    return row | {"training": training_of(study, name, seeds)}


def training_of(study, arm, seeds):
    """{title: mean and deviation over seeds} of each metric's mean over the last tenth of a run's steps."""
    found = {}
    for metric, title in CURVES.items():
        values = [series(study.metrics(seed, arm), metric)[1] for seed in seeds]
        ends = [np.mean(v[-max(1, len(v) // 10) :]) for v in values if v]
        if ends:
            found[title] = spread_of(ends)
    return found


def spread_of(values):
    """Mean and standard deviation; None of too few."""
    mean = np.mean(values) if values else None
    return {"mean": mean, "deviation": np.std(values, ddof=1) if len(values) > 1 else None}


def compare_all(study):
    """Every comparison, each with its role.

    primary: treatment and baseline at the primary endpoint. control: other confirmatory arms there.
    secondary: treatment and baseline at another endpoint, with Holm's correction over these. shown: the rest,
    which is not tested and has no p.
    """
    plan, rows = study.plan, []
    pair = plan["treatment"], plan["baseline"]
    others = [arm["name"] for arm in plan["arms"] if arm["name"] not in pair]
    for endpoint in study.endpoints:
        pairs = [pair]
        if endpoint.steps is None:
            pairs += [(other, pair[1]) for other in others] + [(pair[0], other) for other in others]
        rows += [compare_two(study, endpoint, *two) for two in pairs]
    family = [row for row in rows if row["role"] == "secondary" and "p" in row]
    for row, p in zip(family, holm([row["p"] for row in family]), strict=True):
        row["p_holm"] = p
    return rows


def compare_two(study, endpoint, arm, other):
    """The numbers of one comparison, arm minus other; without any that is not there yet."""
    row = {
        "endpoint": endpoint.name,
        "arm": arm,
        "other": other,
        "role": role_of(study, endpoint, arm, other),
    }
    paired = study.paired(arm, other, endpoint)
    if paired:
        plan = study.plan
        row |= compared(np.array(list(paired.values())), plan["margin"], plan["alpha"], plan["power"])
        row["by_seed"] = {seed: by_question.mean() for seed, by_question in paired.items()}
    if row["role"] == "shown":
        row = {key: value for key, value in row.items() if key not in ("p", "tost_p")}
    if endpoint.steps is not None:
        row["seconds"] = [study.seconds_at(*side) for side in zip((arm, other), endpoint.steps, strict=True)]
    return row


def role_of(study, endpoint, arm, other):
    plan, pair = study.plan, (arm, other)
    of_treatment = pair == (plan["treatment"], plan["baseline"])
    if endpoint.role == "primary" and of_treatment:
        return "primary"
    if endpoint.role == "primary":
        return "control" if study.is_confirmatory(arm) and study.is_confirmatory(other) else "shown"
    tested = endpoint.is_share and endpoint.steps is None and of_treatment
    return "secondary" if tested else "shown"


def verdict_of(plan, comparisons):
    """The verdict in the words of the study, and the sentence that gives its numbers."""
    primary = comparisons[0]["endpoint"]
    rows = {(row["arm"], row["other"]): row for row in comparisons if row["endpoint"] == primary}
    words, second = read_verdict(lambda *pair: rows[pair], plan["verdict"], plan["alpha"])
    row, name = comparisons[0], ", ".join(filter(None, (words, second)))
    sentence = f"{row['arm']} against {row['other']}: {name}. {difference_sentence(plan, row)}"
    if words == "undecided":
        sentence += (
            f" A true difference of {100 * row['smallest_effect']:.2f} points would have been found in "
            f"{plan['power']:.0%} of such studies."
        )
    if words in ("helps", "acts as noise"):
        others = [rows[row["arm"], peer] for peer in peers_of(plan["verdict"])]
        each = [f"{r['other']} {100 * r['difference']:+.2f} (p = {r['p']:#.2g})" for r in others]
        sentence += f" Against {', '.join(each)}." if each else ""
    sentence = f"{sentence} {remark_on_spread(rows.values())}".rstrip()
    return {"words": words, "second": second, "sentence": sentence}


def difference_sentence(plan, row):
    """What the comparison of treatment and baseline found at the primary endpoint."""
    low, high = (100 * end for end in row["difference_ci95"])
    margin = counted(100 * plan["margin"], "point", "g")
    return (
        f"The difference in {row['endpoint']} is {100 * row['difference']:+.2f} points (95% interval "
        f"{low:+.2f} to {high:+.2f}, p = {row['p']:#.2g}, {row['seeds']} seeds; TOST within {margin}: "
        f"p = {row['tost_p']:#.2g})."
    )


def curves(study):
    """{title: {arm: {steps, mean, low, high}}}: the mean over seeds, and the lowest and highest seed."""
    lines = {arm: {seed: study.metrics(seed, arm) for seed in study.seeds_of(arm)} for arm in study.arms}
    found = {}
    steps = study.steps_of(study.primary.evaluation)
    found[study.primary.name] = {
        arm: band([study.by_step(arm, seed, study.primary, steps) for seed in study.seeds_of(arm)])
        for arm in study.arms
    }
    for metric, title in CURVES.items():
        found[title] = {
            arm: band([smoothed(of_run, metric) for of_run in of_arm.values()])
            for arm, of_arm in lines.items()
        }
    return {title: {arm: b for arm, b in arms.items() if b["steps"]} for title, arms in found.items()}


def smoothed(lines, metric):
    """[(step, value)] of a run's metric, each a mean over the last steps as in the curves of one run."""
    steps, values = series(lines, metric)
    return list(zip(steps, smooth(values, max(1, len(steps) // 25)), strict=True))


def band(runs):
    """The mean, the lowest and the highest of the runs at each step that any of them has."""
    values = defaultdict(list)
    for step, value in (point for run in runs for point in run):
        values[step].append(value)
    steps = sorted(values)
    found = {
        name: [of(values[s]) for s in steps] for name, of in (("mean", np.mean), ("low", min), ("high", max))
    }
    return {"steps": steps, **found}


def result_rows(found):
    """Rows (case, metric, value, unit) for benchmarks/results from what study.json holds, a case an arm.

    The difference, with its interval and both p, is the arm's from the baseline at the primary endpoint;
    exploratory arms have no p.
    """
    primary, *secondary = found["endpoints"]
    rows = []
    for arm in found["arms"]:
        outcome = arm["outcomes"][primary["name"]]
        mean_name = f"mean{primary['evaluation']['samples']}"
        rows.append((arm["name"], "seeds", len(outcome["by_seed"]), "seeds"))
        rows.append((arm["name"], mean_name, outcome["mean"], "accuracy"))
        if (greedy := greedy_endpoint(primary, secondary)) is not None:
            rows.append((arm["name"], "greedy", arm["outcomes"][greedy]["mean"], "accuracy"))
    of_primary = [row for row in found["comparisons"] if row["endpoint"] == primary["name"]]
    for row in of_primary:
        if row["other"] == found["baseline"]:
            units = {"difference": "accuracy", "difference_ci95": "accuracy", "p": "p", "tost_p": "p"}
            rows += [(row["arm"], name, row[name], unit) for name, unit in units.items() if name in row]
    return rows


def greedy_endpoint(primary, secondary):
    """The name of the endpoint that asks the primary one's questions once, at temperature 0; None without."""
    asked = [primary["evaluation"].get(key) for key in ("dataset", "split")]
    for endpoint in secondary:
        evaluation = endpoint["evaluation"]
        is_greedy = (
            evaluation["temperature"] == 0 and endpoint["measure"] == "mean" and endpoint["steps"] is None
        )
        if is_greedy and [evaluation.get(key) for key in ("dataset", "split")] == asked:
            return endpoint["name"]
    return None


def told(found):
    """The lines for people: the verdict, or what is missing."""
    lines = [*found["notes"]]
    if found["missing"]:
        more = f", and {len(found['missing']) - 5} more" if len(found["missing"]) > 5 else ""
        lines.append(f"incomplete, without a verdict: {'; '.join(found['missing'][:5])}{more}")
    if found["look"]:
        lines.append(look_sentence(found))
    if found["complete"]:
        lines.append(headline(found))
    return lines


def main():
    parser = argparse.ArgumentParser(prog="python -m reporting.study", description=__doc__)
    parser.add_argument("folder", help="the folder that grpo_study.py filled")
    parser.add_argument("--hide_means", action="store_true", help="no means before the study is complete")
    parser.add_argument("--keep", help="copy what the analysis reads into this new folder, packed")
    args = parser.parse_args()
    try:
        found = write_study(args.folder, args.hide_means or None)
        if args.keep:
            keep_study(args.folder, args.keep)
    except (DataError, SettingError) as error:
        print(f"study: {one_line(error, limit=None)}", file=sys.stderr)
        sys.exit(error.status)
    print("\n".join([*told(found), f"{args.folder}/study.json, {args.folder}/study.html"]))


if __name__ == "__main__":
    main()
