"""Curves of figures over what they grow with: drawn, and judged by whether they grow faster than theory has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("Agg")  # files, no window
TOLERANCE = 0.15
"""What a point may lie above what those before it promise: figures of a shared machine scatter by 10%."""


class Law(StrEnum):
    """What theory says of a cost."""

    FLAT = "flat"
    LINE = "a line"
    PROPORTIONAL = "proportional, or less"  # the cost of each does not rise
    OTHER = "other"  # is not judged


@dataclass(frozen=True, slots=True)
class Curve:
    """``ys`` over ``xs``, both positive and in order of ``xs``, and what theory says of them."""

    name: str
    x: str
    y: str
    law: Law
    theory: str
    xs: list[float]
    ys: list[float]

    @property
    def bends_up_at(self) -> list[float]:
        """Where it does and should not."""
        return bends_up(self.law, self.xs, self.ys)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "x": self.x,
            "y": self.y,
            "theory": f"{self.law}: {self.theory}",
            "points": {f"{x:g}": float(f"{y:.4g}") for x, y in zip(self.xs, self.ys)},
            "bends_up_at": self.bends_up_at,
        }


def bends_up(law: Law, xs: Sequence[float], ys: Sequence[float], tolerance: float = TOLERANCE) -> list[float]:
    """The ``xs`` whose ``ys`` lie more than ``tolerance`` above what ``law`` makes of all points before them."""
    first = 3 if law is Law.LINE else 1  # two points make a line of noise
    indices = [] if law is Law.OTHER else range(first, len(xs))
    return [xs[index] for index in indices if ys[index] > (1 + tolerance) * _expected(law, xs[:index], ys[:index], xs[index])]


def _expected(law: Law, xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    if law is Law.PROPORTIONAL:
        return x * min(one_y / one_x for one_x, one_y in zip(xs, ys))
    if law is Law.LINE:
        slope, intercept = np.polyfit(xs, ys, 1, w=1 / np.asarray(ys))  # the least squares of relative errors
        if slope > 0:  # what was cheaper by chance is no promise
            return float(slope * x + intercept)
    return float(np.mean(ys))


def panels(count: int, title: str) -> tuple[Figure, list[Axes]]:
    """``count`` plots side by side, in rows of three."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 4 * rows), squeeze=False, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    for axis in axes.flat[count:]:
        axis.remove()
    for axis in axes.flat[:count]:
        axis.grid(alpha=0.3)
    return figure, list(axes.flat[:count])


def draw(axis: Axes, curve: Curve) -> None:
    """Points joined, those that bend up in red."""
    axis.plot(curve.xs, curve.ys, marker="o")
    marked = [(x, y) for x, y in zip(curve.xs, curve.ys) if x in curve.bends_up_at]
    if marked:
        axis.plot(*zip(*marked), "rs", label="more than the points before promise")
        axis.legend()
    axis.set(xlabel=curve.x, ylabel=curve.y, xlim=(0, None), ylim=(0, None))
    axis.set_title(f"{curve.name}\ntheory: {curve.law}; {curve.theory}", fontsize="small")


def cumulative(axis: Axes, values: Sequence[float], *, label: str) -> None:
    """The share of ``values`` that are at most x."""
    axis.step(sorted(values), np.arange(1, len(values) + 1) / max(1, len(values)), where="post", label=label)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=100, metadata={"Software": None})  # no version in it: the same figures give the same file
    plt.close(figure)
