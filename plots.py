"""Curves of runs: curves.svg and curves.png from metrics.jsonl, redrawn while a run goes; several runs in one figure.

python plots.py RUN [RUN ...] [--out FOLDER]
"""

import argparse
import json
from pathlib import Path

from scipy import stats

COLOURS = ("#1f6fb4", "#e0812b", "#3a9250", "#b4453f", "#7a5ca8", "#5b5b5b", "#b08a1e", "#2aa1a1")
STYLE = {"svg.hashsalt": "curves", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": "#e6e6e6", "axes.axisbelow": True}  # fmt: skip


def read_metrics(folder):
    """The lines of a run's metrics.jsonl; half a line at the end, which is being written, is left out."""
    lines = []
    for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def series(lines, name):
    """(steps, values) of a metric, where it is a number."""
    pairs = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smooth(values, width):
    """Mean over the last `width` values."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def _line(axis, lines, name, colour, label=None, dashed=False):
    steps, values = series(lines, name)
    if not steps:
        return
    width = max(1, len(steps) // 25)
    if width > 1:
        axis.plot(steps, values, color=colour, lw=0.6, alpha=0.25)
    axis.plot(steps, smooth(values, width), color=colour, lw=1.4, ls="--" if dashed else "-", label=label, marker="" if len(steps) > 1 else "o")


def _rewards(axis, lines, colour, label, alone):
    _line(axis, lines, "reward", colour, "total" if alone else label)
    if alone:
        parts = sorted({k for line in lines for k in line if k.startswith("reward/")})
        for part, own in zip(parts, COLOURS[1:], strict=False):
            _line(axis, lines, part, own, part.removeprefix("reward/").removesuffix("_reward"))


def _held_out(axis, lines, colour, label, alone):
    steps, values = series(lines, "eval_accuracy")
    counts = [line.get("eval_questions", 0) for line in lines if isinstance(line.get("eval_accuracy"), int | float)]
    if lines and "eval_accuracy_before" in lines[0]:
        steps, values, counts = [0, *steps], [lines[0]["eval_accuracy_before"], *values], [*counts[:1], *counts]
    if not steps:
        return
    axis.plot(steps, values, color=colour, lw=1.4, marker="o", ms=3, label=None if alone else label)
    if all(counts):
        bounds = [stats.binomtest(round(v * n), n).proportion_ci(method="wilson") for v, n in zip(values, counts, strict=True)]
        axis.fill_between(steps, [b.low for b in bounds], [b.high for b in bounds], color=colour, alpha=0.15, lw=0)
    axis.set_ylim(0, 1)


def _length(axis, lines, colour, label, alone):
    _line(axis, lines, "completion_length", colour, "mean" if alone else label)
    if alone:
        _line(axis, lines, "completion_length_max", COLOURS[1], "longest")
        _line(axis, lines, "completion_length_min", COLOURS[2], "shortest")


def _seconds(axis, lines, colour, label, alone):
    if alone:
        for (name, word), own in zip((("rollout_seconds", "rollout"), ("reward_seconds", "rewards"), ("update_seconds", "update")), COLOURS, strict=False):
            _line(axis, lines, name, own, word)
    else:
        _line(axis, [{**line, "s": sum(line.get(f"{k}_seconds", 0) for k in ("rollout", "reward", "update"))} for line in lines], "s", colour, label)


def _single(name):
    return lambda axis, lines, colour, label, alone: _line(axis, lines, name, colour, None if alone else label)


PANELS = {
    "reward": ("reward", _rewards), "held out": ("eval_accuracy", _held_out), "right": ("correct", _single("correct")),
    "groups without a signal": ("frac_reward_zero_std", _single("frac_reward_zero_std")), "completion length, tokens": ("completion_length", _length),
    "cut off": ("truncated", _single("truncated")), "entropy, nats": ("entropy", _single("entropy")), "KL to the reference, nats": ("kl", _single("kl")),
    "loss": ("loss", _single("loss")), "gradient norm": ("grad_norm", _single("grad_norm")),
    "sampler against update, nats": ("logp_diff", _single("logp_diff")), "seconds a step": ("rollout_seconds", _seconds),
}  # fmt: skip


def draw(runs, folder):
    """Write curves.svg and curves.png into `folder`: runs {name: lines of metrics.jsonl}. Panels of metrics that no run has are left out."""
    import matplotlib  # only where something is drawn
    from matplotlib.figure import Figure

    shown = {title: panel for title, (needs, panel) in PANELS.items() if any(series(lines, needs)[0] for lines in runs.values())}
    if not shown:
        return
    alone, columns = len(runs) == 1, 3
    rows = -(-len(shown) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 2.3 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
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
        for kind in ("svg", "png"):
            part = Path(folder) / f"curves.part.{kind}"
            figure.savefig(part, dpi=110, metadata={"Date": None} if kind == "svg" else None)
            part.replace(Path(folder) / f"curves.{kind}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="folders that grpo_train.py or sft_train.py wrote")
    parser.add_argument("--out", help="where the figure goes (default: into the first)")
    args = parser.parse_args()
    names = [Path(run).resolve().name for run in args.runs]
    names = names if len(set(names)) == len(names) else args.runs
    out = Path(args.out or args.runs[0])
    out.mkdir(parents=True, exist_ok=True)
    draw({name: read_metrics(run) for name, run in zip(names, args.runs, strict=True)}, out)
    print(f"{out / 'curves.svg'}, {out / 'curves.png'}")


if __name__ == "__main__":
    main()
