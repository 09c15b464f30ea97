"""Pages and curves of runs: python -m reporting RUN [RUN ...] [--out FOLDER] [--watch [SECONDS]]

One run gets its curves and its report.html again, one evaluation its report.html. Several runs, or a folder
of them, get a page over all, runs.html, and their curves in one figure, in the folder that all of them are
in; report.html is written where a run has none, or one that is older than its log.
"""

import argparse
import errno
import functools
import os
import sys
import time
from pathlib import Path

from errors import counted, one_line, show_all_letters
from reporting.files import LOGS, damaged_lines, read_metrics
from reporting.page import write_report
from reporting.plots import draw
from reporting.runs import folders_below, is_evaluation, is_run, names_of, write_runs_page

STILL_GOING = 180  # seconds since the last line of a log


def main():
    show_all_letters()
    parser = argparse.ArgumentParser(
        prog="python -m reporting", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="folders that the scripts wrote, or folders of runs")
    help_text = "where runs.html and the curves of all runs go (default: the folder that all of them are in)"
    parser.add_argument("--out", action="append", help=help_text)
    help_text = "write runs.html again as the runs go on, looking for news every so many seconds (default 30)"
    parser.add_argument("--watch", nargs="?", type=float, const=30.0, metavar="SECONDS", help=help_text)
    args = parser.parse_args()
    if args.out is not None and len(args.out) > 1:
        refuse(f"--out is given {len(args.out)} times: give one folder")
    args.out = args.out[0] if args.out else None
    for name in (*args.runs, args.out or "."):
        refuse_too_long(name)
    if args.watch is not None and not 1 <= args.watch <= 86400:
        refuse(f"--watch {args.watch:g}: must be from 1 to 86400 seconds")
    runs, evaluations = find(args)
    counts = (("run", len(runs)), ("evaluation", len(evaluations)))
    words = [counted(n, what) for what, n in counts if n]
    print(f"reading {' and '.join(words)}", flush=True)
    asked = [folder for folder in evaluations if folder in map(Path, args.runs) or is_stale(folder)]
    are_made = [report_on(folder) for folder in asked]
    is_one = len(args.runs) == 1 and is_run(args.runs[0])
    if is_one and args.out is None and args.watch is None:
        draw_curves(runs, runs[0])
        are_made.append(report_on(runs[0]))
    elif runs:
        out = folder_for(runs, args)
        draw_curves(runs, out)
        for run in (run for run in runs if not writes_itself(run)):
            if not (run / "curves.svg").exists():
                draw_curves([run], run)
            if is_one or is_stale(run):
                report_on(run)
        write_over(args, runs, out)
    if not all(are_made):
        sys.exit(1)


def refuse(line):
    print(f"python -m reporting: {line}", file=sys.stderr)
    sys.exit(2)


def refuse_too_long(name):
    """Refuse a path that is too long for the file system, as a whole or in a part of it."""
    try:
        os.lstat(name)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            refuse(f"{name[:60]} ...: a name of {len(name)} characters is no folder's")


def find(args):
    """The runs and the evaluations that are meant, each once; ends with a line on what is neither.

    A run without a finished step is none, unless it is watched, or one of a folder's.
    """
    runs, evaluations = {}, {}
    for name in args.runs:
        found = [Path(name)] if is_run(name) or is_evaluation(name) else folders_below(name)
        is_empty = is_run(name) and args.watch is None and not read_metrics(name)
        if is_empty or not found:
            what = "no finished step of a run" if is_empty else "no metrics.jsonl"
            wrote = "grpo_train.py, sft_train.py or grpo_eval.py wrote"
            refuse(f"{name} holds {what}: give a folder that {wrote}, or one with such folders in it")
        for folder in found:
            (runs if is_run(folder) else evaluations).setdefault(folder.resolve(), folder)
    return list(runs.values()), list(evaluations.values())


def folder_for(runs, args):
    """The folder of the page over runs, made if need be; refused where a run or an evaluation is."""
    out = Path(args.out or os.path.commonpath([run.resolve().parent for run in runs]))
    if is_run(out) or is_evaluation(out):
        refuse(f"{out} is a run's own folder, whose curves would be written over: give another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--out {out}: cannot be made ({error.strerror})")
    return out


def draw_curves(runs, out):
    lines = {name: read_metrics(run) for name, run in zip(names_of(runs), runs, strict=True)}
    try:
        draw(lines, out)
    except OSError as error:
        tell(f"{out}: its curves cannot be drawn ({one_line(error)})")
    if (out / "curves.svg").exists():
        print(f"{out / 'curves.svg'}, {out / 'curves.png'}")


def is_stale(run):
    """Whether the page of a run or an evaluation is missing, or older than what it shows."""
    page, read = run / "report.html", [run / name for name in (*LOGS, "samples.jsonl")]
    return not page.exists() or any(f.exists() and page.stat().st_mtime < f.stat().st_mtime for f in read)


def writes_itself(run):
    """Whether a run is going on, whose process writes its page and curves: two writers would be in each
    other's way.
    """
    is_locked = (run / ".lock").exists()  # also after a kill; then nothing is written any more
    return is_locked and time.time() - (run / "metrics.jsonl").stat().st_mtime < STILL_GOING


def report_on(folder):
    """Write the page of a run or an evaluation; what is damaged in its logs is told in a line.

    Returns whether there is a page.
    """
    for name in LOGS:
        if damaged := damaged_lines(folder / name):
            tell(f"{folder / name}: {damaged} damaged {'line is' if damaged == 1 else 'lines are'} left out")
    if is_run(folder) and not read_metrics(folder):
        tell(f"{folder}: has no finished step yet, and no curve")
    try:
        print(write_report(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # written by something else
        tell(f"{folder}: its page cannot be made ({type(error).__name__}: {one_line(error)})")
        return False
    return True


@functools.cache  # each line once
def tell(line):
    print(f"note: {line}", file=sys.stderr, flush=True)


def write_over(args, runs, out):
    """Write the page over runs, and with --watch again whenever their logs have grown, until Ctrl-C."""
    notes = []
    print(write_runs_page(runs, out, notes, args.watch), flush=True)
    try:
        while True:
            for note in notes:
                tell(note)
            if args.watch is None:
                return
            shown, notes = state_of(runs), []
            while state_of(runs) == shown:
                time.sleep(args.watch)
                runs, _ = find(args)
            write_runs_page(runs, out, notes, args.watch)
    except KeyboardInterrupt:
        write_runs_page(runs, out, [])  # which opens no longer anew
        print(f"stopped watching; {out / 'runs.html'} stays as it is", flush=True)


def state_of(runs):
    """What tells whether there is news: the runs, and the size of each one's log."""
    logs = [run / "metrics.jsonl" for run in runs]
    sizes = [log.stat().st_size if log.exists() else 0 for log in logs]
    return list(zip(runs, sizes, [(run / "report.html").exists() for run in runs], strict=True))


if __name__ == "__main__":
    main()
