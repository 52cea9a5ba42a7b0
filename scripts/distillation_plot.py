"""The figure of study_distillation.py."""

from pathlib import Path
from typing import Any

Facts = dict[str, Any]


def plot(results: dict[str, dict[str, Facts]], path: Path) -> None:
    """Exact KL against staleness, a line a loss; KL and variance against m; the KL over time, sync and async."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4))
    lines: dict[str, list[tuple[int, Facts]]] = {}
    for name, cell in results.get("losses", {}).items():
        method, bound = name.split("@")
        lines.setdefault(method, []).append((int(bound), cell))
    for method, points in lines.items():
        kls = [cell["reverse_kl"] for _, cell in points]
        spreads = [cell["reverse_kl_spread"] for _, cell in points]
        left.errorbar([bound for bound, _ in points], kls, spreads, marker="o", capsize=3, label=method)
    left.set(xscale="symlog", yscale="log", xlabel="staleness, versions", ylabel="exact KL(πθ‖q), nats a token")
    draws = {int(name[2:]): cell["reverse_kl"] for name, cell in results.get("draws", {}).items()}
    cell = results.get("variance", {}).get("variance", {})
    noise = {int(key[2:]): value for key, value in cell.items() if not key.endswith("_spread")}
    for label, points in (("exact KL(πθ‖q)", draws), ("variance of the gradient", noise)):
        middle.plot(list(points), list(points.values()), marker="o", label=label)
    middle.set(xscale="log", yscale="log", xlabel="m, draws a position")
    for color, (name, cell) in enumerate(results.get("async", {}).items()):
        for number, curve in enumerate(cell["curves"]):
            right.plot(*zip(*curve, strict=True), color=f"C{color}", label=name if number == 0 else None)
    right.set(yscale="log", xlabel="seconds", ylabel="logged KL(πθ‖q)")
    for axes in (left, middle, right):
        if axes.has_data():
            axes.legend(fontsize=7)
        axes.set_visible(axes.has_data())
    figure.tight_layout()
    figure.savefig(path, dpi=80)
