"""Figures, drawn with matplotlib: colour-blind safe, byte-deterministic, each stating trace, split, seeds and units."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
"""Okabe and Ito's palette: distinguishable with every common colour vision."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "apexsim",
    "svg.fonttype": "path",
    "figure.dpi": 110,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}


def speed_waste(rows: Sequence[dict[str, Any]], caption: str, folder: Path, stem: str = "speed_waste") -> list[Path]:
    """Speed-up against waste: the fixed sweep as one line per method, policies as markers, oracles as stars.

    Args:
        rows: Rows of results.json with workload ``all``; one panel per bundle.
        caption: Split, seeds and cost profile, printed under the panels.
        folder: Where to write; made if missing.
        stem: File name without its ending.

    Returns:
        The SVG and the PNG.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bundles = list(dict.fromkeys(row["bundle"] for row in rows))
    with plt.rc_context(STYLE):
        size = (8.2, 4.9 * len(bundles))
        figure, axes = plt.subplots(len(bundles), 1, figsize=size, squeeze=False, layout="constrained")
        for axis, bundle in zip(axes[:, 0], bundles, strict=True):
            _panel(axis, [row for row in rows if row["bundle"] == bundle], bundle)
        figure.supxlabel(caption, fontsize=7.5, color="#444444")
        files = [folder / f"{stem}.svg", folder / f"{stem}.png"]
        figure.savefig(files[0], metadata={"Date": None})
        figure.savefig(files[1], dpi=160, metadata={"Software": None})
        plt.close(figure)
    return files


def ribbon(blocks: Sequence[tuple[int, int, int, int]], length: int, title: str) -> Figure:
    """One request as a ribbon: where each block starts, what it drafted, and what of that was accepted or wasted.

    Args:
        blocks: (position, drafted, accepted, emitted) of each block so far.
        length: T, or the position reached where the end is not known yet.
        title: Request, trace and policy.
    """
    with plt.rc_context(STYLE):
        figure, (waste, tokens) = plt.subplots(
            2, 1, figsize=(9.0, 2.7), sharex=True, height_ratios=(1.2, 1.0), layout="constrained"
        )
        for position, drafted, accepted, emitted in blocks:
            tokens.broken_barh([(position, emitted)], (0.0, 1.0), facecolor="#DDDDDD", edgecolor="white", lw=0.6)
            tokens.broken_barh([(position, accepted)], (0.0, 1.0), facecolor=COLOURS[2], edgecolor="white", lw=0.6)
            waste.bar(position, drafted - accepted, emitted, align="edge", color=COLOURS[1], edgecolor="white", lw=0.6)
        waste.set(ylabel="wasted,\ntokens", title=title)
        tokens.set(
            xlim=(1, max(length, 2)),
            ylim=(0, 1),
            yticks=[],
            xlabel="output position, tokens; a step of the bars is a block",
        )
        for colour, label in (
            (COLOURS[2], "accepted draft"),
            ("#DDDDDD", "the target's own token"),
            (COLOURS[1], "wasted draft"),
        ):
            tokens.plot([], [], lw=6, color=colour, label=label)
        figure.legend(ncols=3, loc="outside lower right", fontsize=7, frameon=False)
        return figure


def pixels(figure: Figure) -> np.ndarray:
    """(height, width, 3) uint8 picture of a figure, which is closed."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    picture = np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]
    plt.close(figure)
    return picture


def ribbon_text(blocks: Sequence[tuple[int, int, int, int]]) -> str:
    """The ribbon in characters: ``#`` accepted draft, ``.`` the target's own token, ``x`` wasted draft, ``|`` between blocks."""
    return "|".join("#" * a + "." * (e - a) + "x" * (d - a) for _, d, a, e in blocks)


def _panel(axis: Axes, rows: Sequence[dict[str, Any]], bundle: str) -> None:
    sweeps: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        family, *rest = row["policy"].split(":")
        if family == "fixed" and row["waste_percent"] is not None:
            sweeps.setdefault(rest[0], []).append((row["waste_percent"], row["speedup"], rest[1]))
    for i, (method, points) in enumerate(sweeps.items()):
        points.sort(key=lambda point: int(point[2]))
        colour = COLOURS[i % len(COLOURS)]
        axis.plot(
            [x for x, _, _ in points],
            [y for _, y, _ in points],
            marker=".",
            color=colour,
            lw=1.2,
            label=f"fixed {method}, k {points[0][2]} to {points[-1][2]}",
        )
        for x, y, depth in points:
            axis.annotate(f"k{depth}", (x, y), xytext=(4, -9), textcoords="offset points", fontsize=7, color=colour)
    others = [r for r in _mean_over_seeds(rows) if not r["policy"].startswith("fixed:") and r["policy"] != "ar"]
    drawn: dict[tuple[float, float], list[str]] = {}
    for row in others:
        if row["waste_percent"] is not None:
            drawn.setdefault((round(row["waste_percent"], 3), round(row["speedup"], 4)), []).append(row["policy"])
    for i, ((waste, speedup), names) in enumerate(drawn.items()):
        oracle = names[0].startswith("oracle")
        axis.plot(
            waste,
            speedup,
            linestyle="",
            marker="*" if oracle else MARKERS[i % len(MARKERS)],
            ms=11 if oracle else 6,
            color=COLOURS[(i + len(sweeps)) % len(COLOURS)],
            markeredgecolor="black",
            markeredgewidth=0.5,
            label=", ".join(names),
            clip_on=False,
            zorder=3,
        )
    axis.axhline(1.0, color="#777777", lw=1, ls="--", label="ar (plain decoding)")
    count, tokens = rows[0]["requests"], rows[0]["tokens"]
    axis.set_title(f"{bundle}: {count} requests, {tokens:,} decode tokens", fontsize=10)
    axis.set_xlabel("wasted draft tokens, % of drafted (mean over requests)")
    axis.set_ylabel("speed-up over plain decoding, times (mean over requests)")
    axis.set_xlim(left=-2)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _mean_over_seeds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(row["policy"] for row in rows))
    means = []
    for name in names:
        mine = [row for row in rows if row["policy"] == name]
        wastes = [row["waste_percent"] for row in mine if row["waste_percent"] is not None]
        waste = sum(wastes) / len(wastes) if wastes else None
        means.append({"policy": name, "speedup": sum(r["speedup"] for r in mine) / len(mine), "waste_percent": waste})
    return means
