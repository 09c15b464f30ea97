"""Curves of runs and pictures of evaluations, as SVG and PNG."""

import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from errors import counted, one_line
from reporting.statistics import clopper_pearson

COLOURS = ("#1f6fb4", "#e0812b", "#3a9250", "#b4453f", "#7a5ca8", "#5b5b5b", "#b08a1e", "#2aa1a1")
BLUE, ORANGE, GREEN, GREY = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[5]

STYLE = {"svg.hashsalt": "curves", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6",
         "axes.axisbelow": True}  # fmt: skip
COLUMNS = 3
KINDS = {"svg": {"Date": None}, "png": None}  # of files: their metadata
# Up to which size these metrics are rounding errors of float32 and nothing else.
ROUNDING = {"loss": 1e-6, "kl": 1e-9, "logp_diff": 1e-4, "logp_diff_max": 1e-3}


def series(lines, name):
    """(steps, values) of a metric, where it is a number."""
    numbers = [line for line in lines if isinstance(line.get(name), int | float)]
    return [line["step"] for line in numbers], [line[name] for line in numbers]


def is_rounding(name, values):
    """Whether a metric's values are the rounding of float32 alone, which there is nothing to see in."""
    return max(map(abs, values), default=0) < ROUNDING.get(name, 0)


def smooth(values, width):
    """Mean over the last `width` values."""
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def _line(axis, lines, name, colour, label=None):
    """A metric over the steps, smoothed; the raw values lie pale behind it where a run is long."""
    steps, values = series(lines, name)
    if not steps:
        return
    width = max(1, len(steps) // 25)
    if width > 1:
        axis.plot(steps, values, color=colour, lw=0.6, alpha=0.25)
    marker = "" if len(steps) > 1 else "o"
    axis.plot(steps, smooth(values, width), color=colour, lw=1.4, label=label, marker=marker)


def _single(name, axis, lines, colour, label, alone):
    _line(axis, lines, name, colour, None if alone else label)


def _rewards(axis, lines, colour, label, alone):
    _line(axis, lines, "reward", colour, "total" if alone else label)
    if alone:
        parts = sorted({name for line in lines for name in line if name.startswith("reward/")})
        for part, part_colour in zip(parts, COLOURS[1:], strict=False):
            _line(axis, lines, part, part_colour, part.removeprefix("reward/").removesuffix("_reward"))


def _held_out(axis, lines, colour, label, alone):
    """Accuracy on held-out problems with exact intervals, from the one before training on."""
    evaluated = [line for line in lines if isinstance(line.get("eval_accuracy"), int | float)]
    steps = [line["step"] for line in evaluated]
    accuracies = [line["eval_accuracy"] for line in evaluated]
    questions = [line.get("eval_questions", 0) for line in evaluated]
    if lines and "eval_accuracy_before" in lines[0]:
        steps = [0, *steps]
        accuracies = [lines[0]["eval_accuracy_before"], *accuracies]
        questions = [questions[0] if questions else 0, *questions]
    if not steps:
        return
    axis.plot(steps, accuracies, color=colour, lw=1.4, marker="o", ms=3, label=None if alone else label)
    if all(questions):
        pairs = zip(accuracies, questions, strict=True)
        lows, highs = zip(*(clopper_pearson(round(accuracy * n), n) for accuracy, n in pairs), strict=True)
        axis.fill_between(steps, lows, highs, color=colour, alpha=0.15, lw=0)
    axis.set_ylim(0, 1)


def _length(axis, lines, colour, label, alone):
    _line(axis, lines, "completion_length", colour, "mean" if alone else label)
    if alone:
        _line(axis, lines, "completion_length_max", ORANGE, "longest")
        _line(axis, lines, "completion_length_min", GREEN, "shortest")


def _seconds(axis, lines, colour, label, alone):
    """The parts of a step of one run, or the whole steps of several."""
    parts = {"rollout_seconds": "rollout", "reward_seconds": "rewards", "update_seconds": "update"}
    if alone:
        for (name, word), part_colour in zip(parts.items(), COLOURS, strict=False):
            _line(axis, lines, name, part_colour, word)
    else:
        whole = [{**line, "seconds": sum(line.get(name, 0) for name in parts)} for line in lines]
        _line(axis, whole, "seconds", colour, label)


def _changed(axis, lines, colour, label, alone):
    """The share of tokens that listening changed, in the groups that were read again."""
    read = [line for line in lines if line.get("listening_tokens")]
    shares = [{**line, "share": line["listening_changed_tokens"] / line["listening_tokens"]} for line in read]
    _line(axis, shares, "share", colour, None if alone else label)


# title of a panel: its metric, which decides whether there is such a panel
PANELS = {"reward": "reward", "held out": "eval_accuracy", "right": "correct",
          "groups without a signal": "frac_reward_zero_std", "completion length, tokens": "completion_length",
          "cut off": "truncated", "entropy, nats": "entropy", "KL to the reference, nats": "kl",
          "loss": "loss", "gradient norm": "grad_norm", "sampler against update, nats": "logp_diff",
          "inputs moved by listening": "input_change", "paths that think": "thinking_paths",
          "entropy of the weights over its maximum": "gate_entropy",
          "tokens changed by listening": "listening_changed_tokens",
          "seconds a step": "rollout_seconds"}  # fmt: skip
WITH_MORE = {
    "reward": _rewards,
    "eval_accuracy": _held_out,
    "completion_length": _length,
    "rollout_seconds": _seconds,
    "listening_changed_tokens": _changed,
}


def draw(runs, folder, kinds=KINDS):
    """Write curves.svg and curves.png into `folder`: runs {name: lines of metrics.jsonl}.

    Panels of metrics that no run has, or of which there are rounding errors only, are left out. kinds: which
    of the two.
    """
    panels = {}
    for title, metric in PANELS.items():
        values = [value for lines in runs.values() for value in series(lines, metric)[1]]
        if values and not is_rounding(metric, values):
            panel = WITH_MORE.get(metric, partial(_single, metric))
            panels[title] = partial(_all_runs, panel, runs, legend=len(runs) == 1 or not panels)
    if panels:
        _draw_panels(folder, panels, COLUMNS, xlabel="step", kinds=kinds)


def _all_runs(panel, runs, axis, legend):
    """One panel with every run in it; of several runs the first panel's legend serves for all."""
    for colour, (name, lines) in zip(COLOURS * len(runs), runs.items(), strict=False):
        panel(axis, lines, colour, name, len(runs) == 1)
    if legend and axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=7)


def _draw_panels(folder, panels, columns, xlabel=None, kinds=KINDS):
    """Write curves.svg and curves.png of `panels`, {title: a function that draws on an axis}."""
    with _figure(folder, "curves", -(-len(panels) // columns), columns, kinds=kinds) as axes:
        for axis, (title, panel) in zip(axes.flat, panels.items(), strict=False):
            panel(axis)
            axis.set_title(title, loc="left", fontsize=9)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        if xlabel:
            for axis in axes[-1]:
                axis.set_xlabel(xlabel)
            for axis in axes.flat[: len(panels)]:
                axis.xaxis.get_major_locator().set_params(integer=True)  # there is no step 2.5


@contextmanager
def figure_of(rows, columns, size=(3.5, 2.3), **options):
    """A figure and its axes (rows, columns), to draw on and save within; `size` of a panel in inches."""
    import matplotlib  # slow to load, and needed only where something is drawn
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)


@contextmanager
def _figure(folder, name, rows, columns, size=(3.5, 2.3), kinds=KINDS, **options):
    """Axes (rows, columns) to draw on, then written to name.svg and name.png; see `figure_of`."""
    with figure_of(rows, columns, size, **options) as (figure, axes):
        yield axes
        figure.get_layout_engine().execute(figure)
        figure.set_layout_engine("none")  # else each kind would find the same places again, the longest part
        for kind in kinds:
            part = Path(folder) / f"{name}.part.{kind}"
            figure.savefig(part, dpi=110, metadata=KINDS[kind])
            part.replace(Path(folder) / f"{name}.{kind}")


def or_warn(drawing, *arguments):
    """What the drawing returns; a failed one only warns."""
    try:
        return drawing(*arguments)
    except Exception as error:  # fonts, a full disk, another version of matplotlib
        warnings.warn(f"no picture: {type(error).__name__}: {one_line(error)}", stacklevel=2)


def _dots(axis, rows, form="{:.3f}"):
    """Values with their intervals, one below the other: rows {name: (value, low, high) or None}."""
    for y, row in enumerate(rows.values()):
        if row is None:
            continue
        value, low, high = row
        axis.plot([low, high], [y, y], color=BLUE, lw=1.4, solid_capstyle="butt")
        axis.plot([value], [y], color=BLUE, marker="o", ms=4)
        above = dict(xytext=(0, 4), textcoords="offset points", ha="center", fontsize=7)
        axis.annotate(form.format(value), (value, y), **above)
    axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.7)
    axis.grid(visible=False, axis="y")


def _accuracies(rows, axis):
    _dots(axis, rows)
    axis.set_xlim(0, min(1.05, 1.1 * max(high for _, _, high in rows.values()) or 1))


def _against_k(sides, axis):
    """pass@k and maj@k against k, with their intervals; sides {label: report}."""
    for colour, (label, report) in zip(COLOURS, sides.items(), strict=False):
        for word, dashes in (("pass", "-"), ("maj", "--")):
            names = [name for name in report if name.startswith(f"{word}@")]
            points = {int(name.partition("@")[2]): report[name] for name in names}
            points.setdefault(1, report["pass@1"])  # a vote of one is that one
            ks = sorted(points)
            means, lows, highs = zip(*(points[k] for k in ks), strict=True)
            axis.plot(ks, means, color=colour, lw=1.4, ls=dashes, marker="o", ms=3, label=f"{word}@k{label}")
            axis.fill_between(ks, lows, highs, color=colour, alpha=0.12, lw=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, [str(k) for k in ks])
        axis.minorticks_off()
        axis.set_ylim(0, 1.03)
    axis.set_xlabel("k")
    axis.legend(frameon=False, fontsize=7)


def _outcomes(answers):
    """Answers by what became of them: {outcome: [(tokens, whether the limit cut it off), ...]}."""
    outcomes = {"right": [], "wrong": [], "no answer": [], "undecided": []}
    for record in answers:
        for right, answer, length, stop in zip(
            record["exact_match"]["strict-match"],
            record["filtered_resps"]["strict-match"],
            record["length"],
            record["stop_condition"],
            strict=True,
        ):
            if right is None:
                outcome = "undecided"
            elif right:
                outcome = "right"
            else:
                outcome = "no answer" if answer in (None, "") else "wrong"
            outcomes[outcome].append((length, stop == "length"))
    return {name: rows for name, rows in outcomes.items() if rows or name != "undecided"}


def _shares(outcomes, axis):
    """Shares of the answers that were right, wrong or none, and paler what the limit cut off of each."""
    total = sum(map(len, outcomes.values()))
    beside = dict(xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)
    for y, (answers, colour) in enumerate(zip(outcomes.values(), (GREEN, ORANGE, GREY, BLUE), strict=False)):
        share, cut = len(answers) / total, sum(cut_off for _, cut_off in answers) / total
        axis.barh(y, share - cut, color=colour, height=0.6)
        axis.barh(y, cut, left=share - cut, color=colour, alpha=0.4, height=0.6)
        note = f" ({cut:.1%} cut off)" if cut else ""
        axis.annotate(f"{share:.1%}{note}", (share, y), **beside)
    axis.set_yticks(range(len(outcomes)), list(outcomes), fontsize=8)
    axis.set_ylim(len(outcomes) - 0.5, -0.5)
    axis.set_xticks((0, 0.25, 0.5, 0.75, 1))
    axis.set_xlim(0, 1.7 * max(map(len, outcomes.values())) / total)
    axis.grid(visible=False, axis="y")


def _lengths(outcomes, axis):
    """How long right and other answers are."""
    right = [length for length, _ in outcomes["right"]]
    others = [length for name, rows in outcomes.items() if name != "right" for length, _ in rows]
    drawn = [row for row in (("right", right, GREEN), ("not right", others, ORANGE)) if row[1]]
    labels, lengths, colours = map(list, zip(*drawn, strict=True))
    widest = (0, max(map(max, lengths)))
    axis.hist(lengths, bins=30, histtype="step", lw=1.4, color=colours, label=labels, range=widest)
    axis.set_xlabel("tokens")
    axis.set_ylabel("answers")
    axis.legend(frameon=False, fontsize=7)


def draw_evaluation(report, records, folder):
    """Write curves.svg and curves.png of one evaluation; panels of what it does not have are left out."""
    sides = {"": report} | ({", interacting": report["m3po"]} if "m3po" in report else {})
    accuracies = {}
    for label, side in sides.items():
        for word, key in (("in the format", "accuracy"), ("last number", "accuracy_last_number")):
            accuracies[f"{word}{label}"] = (side[key], *side[f"{key}_ci95"])
    panels = {"accuracy": partial(_accuracies, accuracies)}
    for key in (key for key in report if key.startswith("accuracy_by_")):
        rows = {f"{name} ({g['questions']})": (g["accuracy"], *g["ci95"]) for name, g in report[key].items()}
        panels[f"by {key.removeprefix('accuracy_by_')} (questions)"] = partial(_accuracies, rows)
    if "pass@1" in report:
        panels["samples of a question"] = partial(_against_k, sides)
    outcomes = _outcomes([record for record in records if not record.get("skipped")])
    panels["what became of the answers"] = partial(_shares, outcomes)
    panels["length"] = partial(_lengths, outcomes)
    _draw_panels(folder, panels, 2 if len(panels) == 4 else COLUMNS)


def draw_comparison(results, folder, name="compare"):
    """Write name.svg and name.png of a comparison's results.

    The sides' accuracies, and the paired difference of each from the first.
    """
    first = results[0]
    names = [first["a"], *(result["b"] for result in results)]
    accuracies = [(first["accuracy_a"], *first["accuracy_a_ci95"])]
    accuracies += [(result["accuracy_b"], *result["accuracy_b_ci95"]) for result in results]
    differences = [None, *((result["difference"], *result["difference_ci95"]) for result in results)]
    size = (3.5 + 0.03 * max(map(len, names)), 0.9 + 0.35 * len(names))
    with _figure(folder, name, 1, 2, size, sharey=True) as [[left, right]]:
        _dots(right, dict(zip(names, differences, strict=True)), "{:+.3f}")
        _accuracies(dict(zip(names, accuracies, strict=True)), left)
        left.set_title("accuracy", loc="left", fontsize=9)
        right.set_title("difference from the first, paired", loc="left", fontsize=9)
        right.axvline(0, color=GREY, lw=0.8, ls="--")
        left.set_xlabel(f"{counted(first['questions'], 'question')}, 95% intervals", fontsize=8)
