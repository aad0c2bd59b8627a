"""Writes the evaluation: one Markdown document from what was measured."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.sim import evaluation_reasons, evaluation_tables
from scheduler.sim.calibrate import SEEDS, Point, distance
from scheduler.sim.evaluation import Measured
from scheduler.sim.evaluation_claims import (
    LATENCY_PERCENT,
    MISS_PERCENT,
    Judged,
    Verdict,
    judge,
    minimum,
)
from scheduler.sim.markdown import paragraph
from scheduler.sim.paper import Paper
from scheduler.sim.workload import MOST_USED_SHARES, TAIL_EXPONENT


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that the document shows."""

    paper: Paper
    measured: Measured
    seeds: int
    by_arrivals: Sequence[Point]
    by_memory: Sequence[Point]
    grid_seeds: int
    beyond: str


def render(evaluation: Evaluation) -> str:
    """The document."""
    judged = judge(evaluation.measured, evaluation.paper)
    sections = [
        _head(evaluation, judged),
        _minimum(evaluation),
        _claims(evaluation, judged),
        _setting(evaluation),
        _workload(),
        _figures(evaluation),
        _tables(evaluation),
        evaluation.beyond,
    ]
    return "\n\n".join(sections) + "\n"


def _head(evaluation: Evaluation, judged: Sequence[Judged]) -> str:
    count = Counter(each.verdict for each in judged)
    whole, partly = count[Verdict.REPRODUCED], count[Verdict.PARTLY]
    about = f"""The experiments of {evaluation.paper.attribution}, with the scheduling core of this
        repository on virtual time: 12 GPUs on 3 nodes, 325 requests a minute for 6 minutes, model
        sizes and times from the thesis's Table 1, the mean of {evaluation.seeds} seeds. What the
        thesis leaves open is set once, the same for all policies: **{evaluation.measured.setting}**
        a request."""
    return f"""\
# Evaluation: the thesis's experiments, simulated

Written by `gpufaas reproduce`; an edit by hand would be lost.

{paragraph(about)}

Of the thesis's {len(judged)} claims in figures {whole} are reproduced, {partly} partly and
{count[Verdict.NOT]} not."""


def _minimum(evaluation: Evaluation) -> str:
    table = evaluation_tables.checks(minimum(evaluation.measured))
    return f"""\
## What must hold

LALBO3 must be below LB by at least {-LATENCY_PERCENT:.0f} % in average latency and
{-MISS_PERCENT:.0f} % in miss ratio.

{table}"""


def _claims(evaluation: Evaluation, judged: Sequence[Judged]) -> str:
    why = evaluation_reasons.reasons(judged, evaluation.measured, evaluation.paper)
    return f"""\
## Claims

Reproduced: within 10 % of the thesis's figure. Partly: from half to twice its effect. Changes are
given in percent of the reference, differences in percentage points.

{evaluation_tables.claims(judged)}

### The likely why

{why}"""


def _setting(evaluation: Evaluation) -> str:
    found = distance(evaluation.measured, evaluation.paper)
    distances = f"""The chosen setting's distance is {found.total:.3f} (claims {found.claims:.3f},
        Table 2 {found.table2:.3f}, Table 3 {found.table3:.3f}). Around it ({evaluation.grid_seeds}
        seeds, the lowest of each table in bold), by arrivals and overhead:"""
    return f"""\
## The one setting, and how it was chosen

Three things are not in the thesis: how the requests of a minute lie in it, how much of a GPU's
memory models can have, and what a request costs beyond Table 1's times (the way through gateway,
datastore and process; here a fixed time that it holds its GPU, hit or miss). They were chosen
together, by the distance to all of the thesis's figures: the mean absolute relative error of the
claims, of Table 2's 75 and of Table 3's 40 figures, each error counting at most 1, and the three
groups alike. No policy has a setting of its own. `gpufaas reproduce --calibrate` searches the whole
grid again, in three rounds: the grid, small steps around its best settings, and the five nearest
with {SEEDS[-1]} seeds, the first of which is used here.

{paragraph(distances)}

{evaluation_tables.grid(evaluation.by_arrivals, "arrivals")}

and by memory and overhead:

{evaluation_tables.grid(evaluation.by_memory, "memory")}

{_flatness(evaluation)}"""


def _flatness(evaluation: Evaluation) -> str:
    points = {
        point.setting: point.distance.total
        for point in (*evaluation.by_arrivals, *evaluation.by_memory)
    }
    lowest = min(points.values())
    near = sorted(str(setting) for setting, total in points.items() if total <= lowest + _FLAT)
    return paragraph(
        f"The optimum is flat: {len(near)} of these {len(points)} settings lie within {_FLAT} of "
        f"the lowest, which other seeds can turn round: {'; '.join(near)}."
    )


_FLAT = 0.01


def _workload() -> str:
    shares = ", ".join(f"{share:g}" for share in MOST_USED_SHARES)
    return f"""\
## How the workload was read

- **Popularity.** The five most used functions make {shares} % of the requests
  (section 5.4) and the fifteen most used 56 % (section 5.1). Both are read as shares of the whole
  trace. Ranks six and beyond follow the power law through rank five (exponent {TAIL_EXPONENT:g})
  that gives the fifteen exactly their 56 %. A working set keeps its functions' proportions,
  scaled to sum to one.
- **Counts.** Every minute has 325 requests, the most that the thesis allows, split over the
  functions by largest remainder; their order within a minute is shuffled by the seed.
- **Models.** Each function has weights of its own. The five most used are the thesis's (vgg19,
  densenet161, resnet152, resnet18, alexnet); each further one takes the next unused model of the
  size class that has the fewest so far. When a class has no more, its models come again as distinct
  copies (`vgg11#2`), which share nothing with the first.
- **Arrivals.** "Uniform" spaces a minute's requests evenly, "poisson" draws them at random,
  "bunched" spaces them evenly over the first seconds of the minute.
- **Start.** All GPUs are empty; loads take Table 1's time from wherever the weights are, and an
  inference its time for a batch of 32."""


def _figures(evaluation: Evaluation) -> str:
    measured, paper = evaluation.measured, evaluation.paper
    metric = evaluation_tables.metric
    return f"""\
## Figures

The thesis prints most of its figures as pictures only. Where its claims and Table 3 imply a value,
it stands beside ours; white diamonds in the pictures.

### Figure 5: average latency in seconds

![Average latency](pictures/figure05-average-latency.png)

{metric(measured, paper, "avg_latency_s", 2)}

Lowest and highest average among the seeds:

{evaluation_tables.spread(measured, paper)}

### Figure 6: miss ratio

![Miss ratio](pictures/figure06-miss-ratio.png)

{metric(measured, paper, "miss_ratio", 3)}

### Figure 7: GPU utilisation

The thesis measures how many of the GPU's multiprocessors (SMs) are in use; a simulation has none.
Its counterpart here is the busy ratio, the share of GPU time spent on inference, which can at best
be proportional to it. So the ratios between policies are compared, RR being 1.

![Busy ratio over RR's](pictures/figure07-busy-ratio.png)

{evaluation_tables.utilisation(measured, paper)}

### Figure 8: false-miss ratio

The share of misses while another GPU held the model.

![False-miss ratio](pictures/figure08-false-miss-ratio.png)

{metric(measured, paper, "false_miss_ratio", 3)}

### Figure 9: duplicates of the most used model

The number of GPUs that hold vgg19, averaged over the placements; the figures are the first column
of Table 2 below.

![Copies of vgg19](pictures/figure09-duplicates.png)

### Figure 10: the O3 limit

Working set 35; the figures are those of Table 3 below.

![Latency and miss ratio along the O3 limit](pictures/figure10-o3-limit.png)"""


def _tables(evaluation: Evaluation) -> str:
    measured, paper = evaluation.measured, evaluation.paper
    return f"""\
## Tables

Each cell: simulated (thesis, difference).

### Table 2: average number of GPUs that hold a model at a placement

{evaluation_tables.copies(measured, paper)}

### Table 3: LALBO3 under different O3 limits, working set 35

{evaluation_tables.sweep(measured, paper)}"""
