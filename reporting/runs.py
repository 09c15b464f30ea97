"""The page over runs, runs.html: their curves, what differs in their settings, and links to their pages."""

import os
import time
from pathlib import Path
from urllib.parse import quote

from errors import SettingError, counted
from reporting.files import FINISHED, changes_of, damaged_lines, read_metrics, read_run_config, write_whole
from reporting.page import filled, style_of_a_page
from reporting.plots import PANELS, is_rounding

TEMPLATE = Path(__file__).with_name("runs_template.html")
MOST_POINTS, FEWEST_POINTS, ALL_POINTS = 500, 50, 20_000  # of a curve, and of all runs together
DEEPEST = 3  # levels below a folder in which runs are looked for: a study has runs/SEED/ARM
VERSION_OF = "version of "
OF_THE_FOLDER = ("output_dir", "overwrite_output_dir", "resume", "resume_anyway", "run_name", "stop_after")


def is_run(folder):
    return (Path(folder) / "metrics.jsonl").is_file()


def is_evaluation(folder):
    return all((Path(folder) / name).is_file() for name in ("report.json", "samples.jsonl"))


def folders_below(folder):
    """The folders of runs and evaluations in a folder, in the order of their names; in them nothing more is
    looked for.
    """
    found, folder = [], Path(folder)
    for path, folders, _ in os.walk(folder):
        depth = len(Path(path).relative_to(folder).parts)
        is_found = is_run(path) or is_evaluation(path)
        found += [Path(path)] if is_found else []
        stays_above = is_found or depth == DEEPEST
        folders[:] = [] if stays_above else sorted(name for name in folders if not name.startswith("."))
    return found


def names_of(folders):
    """For each folder the last parts of its path, as many as tell it from the others."""
    parts = [Path(folder).resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(of_one[-count:]) for of_one in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return list(map(str, folders))


def thinned(points, width):
    """Points (step, value) of a curve, each a mean over the values of `width` steps, at the last of these."""
    bins = {}
    for step, value in points:
        bins.setdefault((step - 1) // width, []).append((step, value))
    return [[of_bin[-1][0], _short(sum(v for _, v in of_bin) / len(of_bin))] for of_bin in bins.values()]


def _short(value):
    """A number to six digits."""
    return float(f"{value:.6g}")


def curves_of(lines, width):
    """{metric: points} of a run, the accuracy before training as that of step 0."""
    found = {}
    by_step = {line["step"]: line for line in lines}  # the last one of each
    for step, line in sorted(by_step.items()):
        for name, value in line.items():
            is_before = name.startswith("eval_") and name.endswith("_before")
            metric, at = (name.removesuffix("_before"), 0) if is_before else (name, step)
            if metric != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(metric, []).append((at, value))
    return {metric: thinned(sorted(points), width) for metric, points in found.items()}


def metrics_to_show(curves):
    """The metrics of runs, those of report.html first; none that holds rounding errors alone."""
    names = dict.fromkeys([*PANELS.values(), *sorted({name for of_run in curves for name in of_run})])
    values = {name: [value for of_run in curves for _, value in of_run.get(name, ())] for name in names}
    return [name for name in names if values[name] and not is_rounding(name, values[name])]


def differing(settings):
    """The names of settings that runs have with different values, in the order in which runs have them.

    One that a run lacks, since another script or an earlier version wrote it, differs in nothing.
    """
    names = dict.fromkeys(name for of_run in settings for name in of_run)
    values = {name: {repr(of_run[name]) for of_run in settings if name in of_run} for name in names}
    return [name for name in names if len(values[name]) > 1 and name not in OF_THE_FOLDER]


def runs_page(folders, out, notes, reload=None):
    """The page as text, for a file in `out`; what could not be read is appended to `notes`, a line each.

    reload: seconds after which a browser opens the page anew, or None.
    """
    folders, lines = list(map(Path, folders)), [_lines_of(folder, notes) for folder in folders]
    settings = [_settings_of(folder, notes) for folder in folders]
    steps = max((line["step"] for of_run in lines for line in of_run), default=1)
    width = -(-steps // max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // len(folders))))
    curves, names = [curves_of(of_run, width) for of_run in lines], differing(settings)
    shown = metrics_to_show(curves)
    runs = [
        {
            "name": name,
            "page": _link(folder / "report.html", out),
            "steps": of_run[-1]["step"] if of_run else 0,
            "minutes": round(of_run[-1].get("train_seconds", 0) / 60, 1) if of_run else 0,
            "finished": (folder / FINISHED).exists(),
            "settings": {key: _text(of_settings.get(key)) for key in names},
            "curves": {key: of_curves[key] for key in shown if key in of_curves},
        }
        for name, folder, of_run, of_settings, of_curves in zip(
            names_of(folders), folders, lines, settings, curves, strict=True
        )
    ]
    titles = {metric: title for title, metric in PANELS.items()}
    groups = [name for name in names if name not in ("seed", "commit") and not name.startswith(VERSION_OF)]
    data = {
        "runs": runs,
        "settings": names,
        "groups": groups,
        "metrics": {name: titles.get(name, name) for name in shown},
    }
    data |= {"width": width, "reload": reload, "written": time.strftime("%Y-%m-%d %H:%M:%S")}
    return filled(TEMPLATE, counted(len(runs), "run"), data, STYLE=style_of_a_page())


def _lines_of(folder, notes):
    path = folder / "metrics.jsonl"
    lines, damaged = read_metrics(folder), damaged_lines(path)
    if damaged:
        notes.append(f"{path}: {damaged} damaged {'line is' if damaged == 1 else 'lines are'} left out")
    if not lines:
        notes.append(f"{folder}: has no finished step yet, and no curve")
    return lines


def _settings_of(folder, notes):
    """The settings of a run, and each package's version as one more; none where they cannot be read."""
    try:
        settings = read_run_config(folder)
    except SettingError as error:
        notes.append(f"{folder}: its settings are left out: {error}")
        return {}
    settings["changes"] = " ".join(changes_of(settings)).replace("`", "")
    versions = settings.pop("versions", None)
    if isinstance(versions, dict):
        settings |= {f"{VERSION_OF}{package}": version for package, version in versions.items()}
    return settings


def _text(value):
    return value if isinstance(value, str) else "" if value is None else repr(value)


def _link(path, out):
    """The address of a file from a page in `out`; None where there is no file."""
    if not path.exists():
        return None
    try:
        return "./" + quote(os.path.relpath(path.resolve(), Path(out).resolve()).replace(os.sep, "/"))
    except ValueError:  # another drive
        return path.resolve().as_uri()


def write_runs_page(folders, out, notes, reload=None):
    """Write runs.html into `out`; returns its path."""
    path = Path(out) / "runs.html"
    write_whole(path, runs_page(folders, out, notes, reload))
    return path
