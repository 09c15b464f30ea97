"""The page of a study, study.html, from what study.json holds. One file that loads nothing from elsewhere."""

import base64
import hashlib
import io
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from reporting.page import image, style_of_a_page
from reporting.plots import COLOURS, GREY, figure_of
from reporting.study_statistics import remark_on_spread

TEMPLATE = Path(__file__).with_name("study_template.html")
ARM_COLOURS = (*COLOURS, "#d16ba5", "#86714d")
RUN_COLUMNS = "seed arm status step seconds start_hash code_hash reason".split()


def study_page(found):
    """The page as text."""
    template = TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    shown = {
        "study": found,
        "hash": _base64(
            hashlib.sha256(script.encode()).digest()
        ),  # the page's policy lets this script run only
        "style": style_of_a_page(),
        "image": image,
        "headline": headline(found),
        "cards": cards(found),
        "statuses": ", ".join(
            f"{n} {status}" for status, n in Counter(r["status"] for r in found["runs"]).items()
        ),
        "run_header": [name.replace("_", " ") for name in RUN_COLUMNS],
        "runs": [[_short(run.get(name)) for name in RUN_COLUMNS] for run in found["runs"]],
    }
    if not found["hidden"]:
        shown |= {
            "outcomes": list(found["arms"][0]["outcomes"]),
            "arms": [arm_cells(found, arm) for arm in found["arms"]],
            "endpoints": [endpoint_part(found, endpoint) for endpoint in found["endpoints"]],
            "curves": draw_curves(found),
            "trained": training_table(found),
        }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(shown)


def _base64(data):
    return base64.b64encode(data).decode()


def _short(value):
    """A cell of the table of runs: the beginning of a hash, and whole seconds."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}"
    return value[:12] if re.fullmatch("[0-9a-f]{16,}", str(value)) else str(value)


def headline(found):
    """What the study found, or why there is no verdict."""
    if found["verdict"]:
        return found["verdict"]["sentence"]
    if found["hidden"]:
        look = f" {look_sentence(found)}" if found["look"] else ""
        return f"The means are hidden until the study is complete.{look}"
    if not found["complete"]:
        return f"No verdict: the study is incomplete, {len(found['missing'])} parts of it are missing."
    return found["result"] or "The study is complete; with one seed nothing is tested."


def look_sentence(found):
    """What the look at the spread found, and whether the seeds that it leads to are enough."""
    look = found["look"]
    needed = [
        f"{look['needed'][key] or 'over 1024'} for {name}" for key, name in (("t", "the t"), ("tost", "TOST"))
    ]
    enough = "" if look["enough"] else f", which do not reach a power of {found['power']:.0%}"
    return (
        f"After {look['after']} seeds the standard deviation of paired differences was "
        f"{100 * look['sd']:.2f} points, which asks for {' and '.join(needed)}: the study has "
        f"{look['seeds']} seeds{enough}."
    )


def cards(found):
    """Pairs (label, text) of what one wants to know first."""
    pairs = [("seeds", str(len(found["seeds"])))]
    if found["look"]:
        look = found["look"]
        pairs += [
            ("seeds that the look set", f"{look['seeds']} ({'enough' if look['enough'] else 'not enough'})"),
            ("deviation of paired differences", f"{100 * look['sd']:.2f} points, from {look['after']} seeds"),
        ]
    if not found["hidden"]:
        row = found["comparisons"][0]
        _, *labels = COLUMNS.values()
        first, *others = comparison_cells(row, True)
        pairs += [(f"{_pair(row)} in {row['endpoint']}, points", first), *zip(labels, others, strict=True)]
    return [(label, text) for label, text in pairs if text]


COLUMNS = {"difference": "difference", "difference_ci95": "95% interval", "p": "p", "p_holm": "p after Holm",
           "tost_p": "TOST p", "bootstrap_ci95": "bootstrap 95%",
           "smallest_effect": "would be seen"}  # fmt: skip


def _pair(row):
    return f"{row['arm']} − {row['other']}"


def _points(value, is_share, form="+.2f"):
    """A share in points, or a number of tokens as it is; both ends of an interval; empty without a value."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " to ".join(_points(end, is_share, form) for end in value)
    return format(100 * value if is_share else value, form).replace("-", "−")


def comparison_cells(row, is_share):
    """The numbers of a comparison as text, in the order of COLUMNS."""
    cells = []
    for name in COLUMNS:
        if name in ("p", "p_holm", "tost_p"):
            cells.append(f"{row[name]:#.2g}" if name in row else "")
        else:
            cells.append(_points(row.get(name), is_share, ".2f" if name == "smallest_effect" else "+.2f"))
    return cells


def arm_cells(found, arm):
    """A row of the table of arms."""
    cells, there = [], len(arm["outcomes"][found["endpoints"][0]["name"]]["by_seed"])
    for endpoint in found["endpoints"]:
        outcome = arm["outcomes"].get(endpoint["name"])
        if outcome is not None:
            cells.append(_plus_minus(outcome, endpoint["is_share"]))
    return {
        "name": arm["name"],
        "role": arm["role"],
        "settings": ", ".join(f"{key}: {value}" for key, value in arm["settings"].items())
        or "the base recipe",
        "seeds": there if there == len(arm["seeds"]) else f"{there} of {len(arm['seeds'])}",
        "minutes": "" if arm["seconds"] is None else f"{arm['seconds'] / 60:.1f}",
        "cells": cells,
    }


def training_table(found):
    """Each arm's metrics over the last tenth of its steps as text, below a row of the metrics' names."""
    titles = list(dict.fromkeys(title for arm in found["arms"] for title in arm["training"]))
    rows = [["arm", *titles]]
    for arm in found["arms"]:
        spreads = [arm["training"].get(title) for title in titles]
        rows.append(
            [arm["name"], *(_plus_minus(spread, False, ".3g") if spread else "" for spread in spreads)]
        )
    return rows if titles else []


def _plus_minus(spread, is_share, form=".2f"):
    mean, deviation = (_points(spread[key], is_share, form) for key in ("mean", "deviation"))
    return f"{mean} ± {deviation}" if deviation else mean


def endpoint_part(found, endpoint):
    """An endpoint's title, picture and table of comparisons."""
    rows = [row for row in found["comparisons"] if row["endpoint"] == endpoint["name"]]
    is_share, table = endpoint["is_share"], []
    for row in rows:
        cells = [_pair(row), row["role"], row.get("seeds", 0), *comparison_cells(row, is_share)]
        if "seconds" in row:
            cells.append(" and ".join("unknown" if s is None else f"{s:.0f}" for s in row["seconds"]))
        table.append({"tested": row["role"] != "shown", "cells": cells})
    header = ["comparison", "role", "seeds", *COLUMNS.values()]
    header += ["training seconds"] if "seconds" in rows[0] else []
    unit = "points" if is_share else "tokens"
    title = f"{endpoint['name']}, {unit} ({endpoint['role']})"
    part = {"title": title, "header": header, "rows": table, "remark": remark_on_spread(rows)}
    return part | {"picture": draw_endpoint(found, endpoint, rows)}


@contextmanager
def drawing(pictures, rows, columns, **options):
    """Axes to draw on; the picture is then appended to `pictures`, as the address of an image."""
    with figure_of(rows, columns, **options) as (figure, axes):
        yield axes
        data = io.BytesIO()
        figure.savefig(data, format="svg", metadata={"Date": None})
        pictures.append(f"data:image/svg+xml;base64,{_base64(data.getvalue())}")


def draw_endpoint(found, endpoint, rows):
    """Differences with their intervals and seeds on the left, each arm's seeds on the right."""
    scale = 100 if endpoint["is_share"] else 1
    rows = [row for row in rows if "difference" in row]
    if not rows:
        return None
    pictures, names = [], [_pair(row) for row in rows]
    size = (4.9, 1.1 + 0.3 * max(len(rows), 4))
    with drawing(pictures, 1, 2, size=size, width_ratios=(1.35, 1)) as [[left, right]]:
        left.axvline(0, color=GREY, lw=0.8, ls="--")
        if endpoint["is_share"]:
            left.axvspan(-scale * found["margin"], scale * found["margin"], color=COLOURS[2], alpha=0.1, lw=0)
        for y, row in enumerate(rows):
            draw_difference(left, y, row, scale)
        left.set_yticks(range(len(rows)), names, fontsize=8)
        left.set_ylim(len(rows) - 0.4, -0.7)
        left.grid(visible=False, axis="y")
        left.set_title(
            f"difference, {'points' if endpoint['is_share'] else 'tokens'}", loc="left", fontsize=9
        )
        draw_seeds(right, found, endpoint, scale)
    return pictures[0]


def draw_difference(axis, y, row, scale):
    """A row of the forest: seeds, the bootstrap's interval below, the intervals of the t, and the mean."""
    colour = COLOURS[0] if row["role"] != "shown" else GREY
    seeds = [scale * value for value in row["by_seed"].values()]
    axis.plot(seeds, [y] * len(seeds), color=colour, marker="o", ms=3, lw=0, alpha=0.45, mew=0)
    for key, width, below in (
        ("difference_ci95", 1.2, 0),
        ("difference_ci_tost", 3.2, 0),
        ("bootstrap_ci95", 1.0, 0.22),
    ):
        if key in row:
            ends = [scale * end for end in row[key]]
            axis.plot(ends, [y + below] * 2, color=GREY if below else colour, lw=width, solid_capstyle="butt")
    axis.plot([scale * row["difference"]], [y], color=colour, marker="D", ms=4.5, mec="white", mew=0.6)


def draw_seeds(axis, found, endpoint, scale):
    """Each arm's result with each seed; pale lines join the arms of a seed."""
    outcomes = {arm["name"]: arm["outcomes"].get(endpoint["name"]) for arm in found["arms"]}
    outcomes = {name: outcome for name, outcome in outcomes.items() if outcome and outcome["by_seed"]}
    if not outcomes:
        axis.set_visible(False)
        return
    for seed in found["seeds"]:
        of_arms = [(x, o["by_seed"].get(str(seed))) for x, o in enumerate(outcomes.values())]
        points = [(x, scale * value) for x, value in of_arms if value is not None]
        axis.plot(*zip(*points, strict=True), color=GREY, lw=0.5, alpha=0.35) if points else None
    for x, (colour, outcome) in enumerate(zip(ARM_COLOURS * len(outcomes), outcomes.values(), strict=False)):
        values = [scale * value for value in outcome["by_seed"].values()]
        axis.plot([x] * len(values), values, color=colour, marker="o", ms=4, lw=0, alpha=0.75, mew=0)
        axis.plot([x - 0.25, x + 0.25], [scale * outcome["mean"]] * 2, color=colour, lw=2)
    slanted = dict(rotation=30, ha="right") if len(outcomes) > 4 else {}
    axis.set_xticks(range(len(outcomes)), list(outcomes), fontsize=8, **slanted)
    axis.set_xlim(-0.6, len(outcomes) - 0.4)
    axis.grid(visible=False, axis="x")
    axis.set_title(f"{endpoint['name']}, {'percent' if scale > 1 else 'tokens'}", loc="left", fontsize=9)


def draw_curves(found, columns=3):
    """The curves by arm, of confirmatory arms with the band of seeds; None where there are none."""
    panels = {title: arms for title, arms in found["curves"].items() if arms}
    if not panels:
        return None
    looks = {}  # of each arm: its colour, and whether it is confirmatory
    for arm, colour in zip(found["arms"], ARM_COLOURS * len(found["arms"]), strict=False):
        looks[arm["name"]] = colour, arm["role"] == "confirmatory"
    pictures = []
    with drawing(pictures, -(-len(panels) // columns), columns) as axes:
        for axis, (title, arms) in zip(axes.flat, panels.items(), strict=False):
            for arm, curve in arms.items():
                draw_curve(axis, arm, curve, *looks[arm])
            axis.set_title(title, loc="left", fontsize=9)
            axis.xaxis.get_major_locator().set_params(integer=True)
        legend = dict(loc="outside upper left", ncols=min(9, len(looks)), frameon=False, fontsize=8)
        figure = axes.flat[0].figure
        figure.legend(*legend_of(axes), **legend)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis in axes[-1]:
            axis.set_xlabel("step")
    return pictures[0]


def draw_curve(axis, arm, curve, colour, confirmatory):
    marker, dashes = "o" if len(curve["steps"]) < 10 else "", "-" if confirmatory else "--"
    style = dict(color=colour, lw=1.3 if confirmatory else 0.9, ls=dashes, marker=marker, ms=3)
    axis.plot(curve["steps"], curve["mean"], label=arm, **style)
    if confirmatory:
        axis.fill_between(curve["steps"], curve["low"], curve["high"], color=colour, alpha=0.1, lw=0)


def legend_of(axes):
    """The lines of the arms, each once, and their names: an arm may be missing from the first panel."""
    lines = {}
    for axis in axes.flat:
        for line, name in zip(*axis.get_legend_handles_labels(), strict=True):
            lines.setdefault(name, line)
    return list(lines.values()), list(lines)
