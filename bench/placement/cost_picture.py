"""The cost of a placement against the size of the cluster, as a picture."""

from pathlib import Path

import matplotlib.pyplot as plt

from bench.placement.core_costs import Cost

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")


def draw(costs: list[Cost], naive: list[Cost], path: Path) -> None:
    """Solid: the core; dashed: the naive version of the tests."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    policies = list(dict.fromkeys(cost.policy for cost in costs))
    for colour, policy in zip(_COLOURS, policies, strict=False):
        for group, style in ((costs, "o-"), (naive, "x--")):
            points = [cost for cost in group if cost.policy == policy]
            if points:
                axes.plot(
                    [cost.size.waiting for cost in points],
                    [cost.median_us for cost in points],
                    style,
                    color=colour,
                    label=policy if group is costs else f"{policy}, naive",
                )
    axes.axhline(50, color="#888888", linewidth=1)
    axes.annotate("target: 50 µs", (100, 53), fontsize=8, color="#555555")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("waiting requests (with 12 to 10,000 GPUs, 35 to 5,000 models)")
    axes.set_ylabel("median cost of a placement, µs")
    axes.legend(fontsize=7, ncol=2)
    axes.grid(visible=True, which="major", alpha=0.25)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
