"""The README's figure, from the curves in benchmarks/results: the embedded job over three seeds, and GSM8K by
the clock, ours and its peers; the second one alone is speedrun.svg.

pip install matplotlib; python benchmarks/figure.py
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tables import RESULTS, SPEEDRUNS, values


def smooth(curve, width):
    """Mean over the last `width` steps."""
    return [
        sum(curve[max(0, i - width + 1) : i + 1]) / len(curve[max(0, i - width + 1) : i + 1])
        for i in range(len(curve))
    ]


def main():
    plt.rcParams.update(
        {
            "svg.hashsalt": "grpo",
            "svg.fonttype": "none",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    left, right = plt.subplots(1, 2, figsize=(8.4, 2.9), layout="constrained")[1]
    colours = {"m3po": "#1f6fb4", "grpo": "#e0812b", "shuffled": "#888888"}
    names = {"m3po": "GRPO with M3PO", "grpo": "GRPO", "shuffled": "advantages shuffled"}
    for case, curve in values("tiny_job")[1]["curves"].items():
        kind = case.split("-")[1]
        label = names.pop(kind, None)
        left.plot(range(1, len(curve) + 1), smooth(curve, 20), color=colours[kind], lw=1.2, label=label)
    left.set(
        title="Embedded job, three seeds, two CPU cores",
        xlabel="step",
        ylabel="share of sampled answers right",
        ylim=(0, 1),
    )
    left.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.1))
    draw_speedruns(right, colours)
    plt.savefig(RESULTS.parent / "curves.svg", metadata={"Date": None})
    draw_speedruns(plt.subplots(figsize=(5.2, 2.9), layout="constrained")[1], colours)
    plt.savefig(RESULTS.parent / "speedrun.svg", metadata={"Date": None})


def draw_speedruns(axes, colours):
    """Right samples over the minutes, in training, and on the test split at the end.

    Dotted from where GRPO has trained on the problems before.
    """
    runs = {}
    for name, label in SPEEDRUNS.items():
        if (RESULTS / f"{name}.json").exists():
            runs[label.replace("`", "")] = values(name)
    own = (colours["grpo"], "#6a4c93", "#888888")  # the speedrun is without M3PO
    for (label, (cases, result)), colour in zip(runs.items(), own, strict=False):
        for run, curve in result["curves"].items():
            until = result["new_until"][run]
            new = [point for point in curve if point[0] <= until]
            parts = ((new, "-"), (curve[max(0, len(new) - 1) :], ":"))
            for points, style in ((points, style) for points, style in parts if points):
                axes.plot(*zip(*points, strict=True), style, color=colour, lw=1.3, label=label)
                label = "_"  # matplotlib's word for a line that the legend leaves out
        for m in cases.values():
            axes.plot(m["seconds"] / 60, m["mean4"], "o", color=colour, ms=6, mec="white", zorder=3)
    axes.plot([], [], "o", color="#555555", ms=6, mec="white", label="test split, mean of 4 samples")
    axes.plot([], [], ":", color="#555555", lw=1.3, label="in training, problems seen before")
    title = "GSM8K by the clock, one card"
    axes.set(
        title=title,
        xlabel="minutes since the start",
        ylabel="share of right samples",
        xlim=(0, None),
        ylim=(0, 0.8),  # with room for the legend
    )
    axes.legend(frameon=False, loc="upper left", ncols=2, fontsize=8)


if __name__ == "__main__":
    main()
