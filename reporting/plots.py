"""Curves of runs and pictures of evaluations, as SVG and PNG."""

import warnings
from contextlib import contextmanager
from pathlib import Path

from scipy import stats

COLOURS = ("#1f6fb4", "#e0812b", "#3a9250", "#b4453f", "#7a5ca8", "#5b5b5b", "#b08a1e", "#2aa1a1")


STYLE = {"svg.hashsalt": "curves", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": "#e6e6e6", "axes.axisbelow": True}  # fmt: skip


def series(lines, name):
    """(steps, values) of a metric, where it is a number."""
    pairs = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smooth(values, width):
    """Mean over the last `width` values."""
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
        for i in range(len(values))
    ]


def _line(axis, lines, name, colour, label=None, dashed=False):
    steps, values = series(lines, name)
    if not steps:
        return
    width = max(1, len(steps) // 25)
    if width > 1:
        axis.plot(steps, values, color=colour, lw=0.6, alpha=0.25)
    axis.plot(
        steps,
        smooth(values, width),
        color=colour,
        lw=1.4,
        ls="--" if dashed else "-",
        label=label,
        marker="" if len(steps) > 1 else "o",
    )


def _rewards(axis, lines, colour, label, alone):
    _line(axis, lines, "reward", colour, "total" if alone else label)
    if alone:
        parts = sorted({k for line in lines for k in line if k.startswith("reward/")})
        for part, own in zip(parts, COLOURS[1:], strict=False):
            _line(axis, lines, part, own, part.removeprefix("reward/").removesuffix("_reward"))


def _held_out(axis, lines, colour, label, alone):
    steps, values = series(lines, "eval_accuracy")
    counts = [
        line.get("eval_questions", 0) for line in lines if isinstance(line.get("eval_accuracy"), int | float)
    ]
    if lines and "eval_accuracy_before" in lines[0]:
        steps, values, counts = (
            [0, *steps],
            [lines[0]["eval_accuracy_before"], *values],
            [*counts[:1], *counts],
        )
    if not steps:
        return
    axis.plot(steps, values, color=colour, lw=1.4, marker="o", ms=3, label=None if alone else label)
    if all(counts):
        bounds = [
            stats.binomtest(round(v * n), n).proportion_ci(method="wilson")
            for v, n in zip(values, counts, strict=True)
        ]
        axis.fill_between(
            steps, [b.low for b in bounds], [b.high for b in bounds], color=colour, alpha=0.15, lw=0
        )
    axis.set_ylim(0, 1)


def _length(axis, lines, colour, label, alone):
    _line(axis, lines, "completion_length", colour, "mean" if alone else label)
    if alone:
        _line(axis, lines, "completion_length_max", COLOURS[1], "longest")
        _line(axis, lines, "completion_length_min", COLOURS[2], "shortest")


def _seconds(axis, lines, colour, label, alone):
    if alone:
        for (name, word), own in zip(
            (("rollout_seconds", "rollout"), ("reward_seconds", "rewards"), ("update_seconds", "update")),
            COLOURS,
            strict=False,
        ):
            _line(axis, lines, name, own, word)
    else:
        _line(
            axis,
            [
                {**line, "s": sum(line.get(f"{k}_seconds", 0) for k in ("rollout", "reward", "update"))}
                for line in lines
            ],
            "s",
            colour,
            label,
        )


def _single(name):
    return lambda axis, lines, colour, label, alone: _line(
        axis, lines, name, colour, None if alone else label
    )


PANELS = {
    "reward": ("reward", _rewards), "held out": ("eval_accuracy", _held_out), "right": ("correct", _single("correct")),
    "groups without a signal": ("frac_reward_zero_std", _single("frac_reward_zero_std")), "completion length, tokens": ("completion_length", _length),
    "cut off": ("truncated", _single("truncated")), "entropy, nats": ("entropy", _single("entropy")), "KL to the reference, nats": ("kl", _single("kl")),
    "loss": ("loss", _single("loss")), "gradient norm": ("grad_norm", _single("grad_norm")),
    "sampler against update, nats": ("logp_diff", _single("logp_diff")), "seconds a step": ("rollout_seconds", _seconds),
}  # fmt: skip


def draw(runs, folder):
    """Write curves.svg and curves.png into `folder`: runs {name: lines of metrics.jsonl}. Panels of metrics that no run has are left out."""
    shown = {
        title: panel
        for title, (needs, panel) in PANELS.items()
        if any(series(lines, needs)[0] for lines in runs.values())
    }
    if not shown:
        return
    alone, columns = len(runs) == 1, 3
    with _figure(folder, "curves", -(-len(shown) // columns), columns) as axes:
        for axis, (title, panel) in zip(axes.flat, shown.items(), strict=False):
            for colour, (name, lines) in zip(COLOURS * len(runs), runs.items(), strict=False):
                panel(axis, lines, colour, name, alone)
            axis.set_title(title, loc="left", fontsize=9)
            if axis.get_legend_handles_labels()[0] and (alone or axis is axes.flat[0]):
                axis.legend(frameon=False, fontsize=7)
        for axis in list(axes.flat)[len(shown) :]:
            axis.set_visible(False)
        for axis in axes[-1]:
            axis.set_xlabel("step")


@contextmanager
def _figure(folder, name, rows, columns, size=(3.5, 2.3), **how):
    """Axes (rows, columns) to draw on, written to name.svg and name.png of the folder in the end; `size` of a panel in inches."""
    import matplotlib  # only where something is drawn
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        yield figure.subplots(rows, columns, squeeze=False, **how)
        for kind in ("svg", "png"):
            part = Path(folder) / f"{name}.part.{kind}"
            figure.savefig(part, dpi=110, metadata={"Date": None} if kind == "svg" else None)
            part.replace(Path(folder) / f"{name}.{kind}")


def or_warn(drawing, *what):
    """Draw; nothing ends for want of a picture."""
    try:
        drawing(*what)
    except Exception as error:  # fonts, a full disk, a matplotlib of another time
        warnings.warn(
            f"no picture: {type(error).__name__}: {' '.join(str(error).split())[:200]}", stacklevel=2
        )


def _dots(axis, rows, form="{:.3f}", colour=COLOURS[0]):
    """Values with their intervals, one below the other: rows {name: (value, low, high) or None}."""
    for place, (value, low, high) in ((place, row) for place, row in enumerate(rows.values()) if row):
        axis.plot([low, high], [place, place], color=colour, lw=1.4, solid_capstyle="butt")
        axis.plot([value], [place], color=colour, marker="o", ms=4)
        axis.annotate(
            form.format(value), (value, place), (0, 4), textcoords="offset points", ha="center", fontsize=7
        )
    axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.7)
    axis.grid(visible=False, axis="y")


def _accuracies(axis, rows):
    _dots(axis, rows)
    axis.set_xlim(0, min(1.05, 1.1 * max(high for _, _, high in rows.values()) or 1))


def _against_k(axis, report, colour, label):
    """pass@k and maj@k against k, with their intervals."""
    for word, dashes in (("pass", "-"), ("maj", "--")):
        found = sorted(
            (int(name.partition("@")[2]), value)
            for name, value in report.items()
            if name.startswith(f"{word}@")
        )
        found = found if word == "pass" else [(1, report["pass@1"]), *found]
        ks, means, lows, highs = zip(*((k, *value) for k, value in found), strict=True)
        axis.plot(ks, means, color=colour, lw=1.4, ls=dashes, marker="o", ms=3, label=f"{word}@k{label}")
        axis.fill_between(ks, lows, highs, color=colour, alpha=0.12, lw=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, [str(k) for k in ks])
    axis.minorticks_off()
    axis.set_ylim(0, 1.03)


def _what_became(axis, kinds):
    """Shares of the answers that were right, wrong or none, and how much of each the limit cut off: kinds {name: [(length, cut off), ...]}."""
    total = sum(map(len, kinds.values()))
    for place, (found, colour) in enumerate(zip(kinds.values(), COLOURS[2:0:-1] + COLOURS[5:6], strict=True)):
        share, cut = len(found) / total, sum(is_cut for _, is_cut in found) / total
        axis.barh(place, share - cut, color=colour, height=0.6)
        axis.barh(place, cut, left=share - cut, color=colour, alpha=0.4, height=0.6)
        axis.text(
            share, place, f"  {share:.1%}" + (f" ({cut:.1%} cut off)" if cut else ""), va="center", fontsize=7
        )
    axis.set_yticks(range(len(kinds)), list(kinds), fontsize=8)
    axis.set_ylim(len(kinds) - 0.5, -0.5)
    axis.set_xticks((0, 0.25, 0.5, 0.75, 1))
    axis.set_xlim(0, 1.7 * max(map(len, kinds.values())) / total)
    axis.grid(visible=False, axis="y")


def _lengths(axis, kinds):
    """How long right and other answers are."""
    lengths = {
        "right": [n for n, _ in kinds["right"]],
        "not right": [n for n, _ in kinds["wrong"] + kinds["no answer"]],
    }
    drawn = {name: found for name, found in lengths.items() if found}
    axis.hist(list(drawn.values()), bins=30, histtype="step", lw=1.4, color=[COLOURS[2] if name == "right" else COLOURS[1] for name in drawn],
              label=list(drawn), range=(0, max(map(max, drawn.values()))))  # fmt: skip
    axis.set_xlabel("tokens")
    axis.set_ylabel("answers")
    axis.legend(frameon=False, fontsize=7)


def draw_evaluation(report, records, folder):
    """Write curves.svg and curves.png of one evaluation: its report and its records. Panels of what it has not are left out."""
    kinds = {"right": [], "wrong": [], "no answer": []}
    for r in records:
        columns = (
            r["exact_match"]["strict-match"],
            r["filtered_resps"]["strict-match"],
            r["length"],
            r["stop_condition"],
        )
        for right, answer, length, stop in zip(*columns, strict=True):
            kinds["right" if right else "no answer" if answer in (None, "") else "wrong"].append(
                (length, stop == "length")
            )
    sides = {"": report} | ({", interacting": report["m3po"]} if "m3po" in report else {})
    accuracies = {f"{word}{name}": (side[key], *side[f"{key}_ci95"]) for name, side in sides.items()
                  for word, key in (("in the format", "accuracy"), ("last number", "accuracy_last_number"))}  # fmt: skip
    panels = {"accuracy": lambda axis: _accuracies(axis, accuracies)}
    for key in (key for key in report if key.startswith("accuracy_by_")):
        rows = {f"{name} ({g['questions']})": (g["accuracy"], *g["ci95"]) for name, g in report[key].items()}
        panels[f"by {key.removeprefix('accuracy_by_')} (questions)"] = lambda axis, rows=rows: _accuracies(
            axis, rows
        )
    if "pass@1" in report:

        def samples(axis):
            for colour, (name, side) in zip(COLOURS, sides.items(), strict=False):
                _against_k(axis, side, colour, name)
            axis.set_xlabel("k")
            axis.legend(frameon=False, fontsize=7)

        panels["samples of a question"] = samples
    panels["what became of the answers"] = lambda axis: _what_became(axis, kinds)
    panels["length"] = lambda axis: _lengths(axis, kinds)
    columns = 3 if len(panels) != 4 else 2
    with _figure(folder, "curves", -(-len(panels) // columns), columns) as axes:
        for axis, (title, panel) in zip(axes.flat, panels.items(), strict=False):
            panel(axis)
            axis.set_title(title, loc="left", fontsize=9)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)


def draw_comparison(found, folder, name="compare"):
    """Write name.svg and name.png of what compare.compare found: the sides' accuracies, and the paired difference of each from the first."""
    first, sides = found[0], [found[0]["a"], *(f["b"] for f in found)]
    names = [
        Path(side.split(",")[0]).name + (f" and {side.count(',')} more" if "," in side else "")
        for side in sides
    ]
    names = names if len(set(names)) == len(names) else sides
    accuracies = [
        (first["accuracy_a"], *first["accuracy_a_ci95"]),
        *((f["accuracy_b"], *f["accuracy_b_ci95"]) for f in found),
    ]
    differences = [None, *((f["difference"], *f["difference_ci95"]) for f in found)]
    with _figure(
        folder, name, 1, 2, (3.5 + 0.03 * max(map(len, names)), 0.9 + 0.35 * len(names)), sharey=True
    ) as axes:
        left, right = axes[0]
        _dots(right, dict(zip(names, differences, strict=True)), "{:+.3f}")
        _accuracies(left, dict(zip(names, accuracies, strict=True)))
        left.set_title("accuracy", loc="left", fontsize=9)
        right.set_title("difference from the first, paired", loc="left", fontsize=9)
        right.axvline(0, color=COLOURS[5], lw=0.8, ls="--")
        left.set_xlabel(f"{first['questions']} questions, 95% intervals", fontsize=8)
