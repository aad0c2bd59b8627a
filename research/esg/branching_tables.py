"""The tables on applications with branches: how their time is divided, and what comes of it."""

from collections.abc import Mapping

from research.esg.adaptive_planners import distribution
from research.esg.applications import BRANCHING, Application
from research.esg.esg_experiments import ESG, BySystem
from research.esg.esg_tables import percent
from research.esg.fitted_profiles import EsgAssumptions
from research.esg.printed_esg import esg_paper
from research.markdown import table


def shares_table(assumed: EsgAssumptions) -> str:
    """Each stage's part of the deadline, by the dominator tree and as if stages ran in a row."""
    rows = []
    for application in BRANCHING:
        by_tree = distribution(application, assumed)
        in_a_row = distribution(application, assumed, in_a_row=True)
        alone_ms = 1e3 * esg_paper().alone_s(application)
        for place, stage in enumerate(application.graph.order):
            rows.append(
                [
                    f"{application.name} (L {alone_ms:.0f} ms)" if place == 0 else "",
                    stage,
                    _after(application, stage),
                    percent(by_tree.shares[stage]),
                    percent(in_a_row.shares[stage]),
                ]
            )
    head = ["application", "stage", "after", "dominator tree", "in a row"]
    return table(head, rows, text_columns=3)


def branching_table(branching: Mapping[str, BySystem]) -> str:
    """Hit rate, cost and latency of each system in each setting."""
    rows = [
        [
            level,
            name,
            percent(each.hit),
            percent(min(each.hits)),
            f"{each.cost / found[ESG].cost:.3f}",
            f"{each.latency:.2f}",
            f"{each.batch:.2f}",
            percent(each.local),
        ]
        for level, found in branching.items()
        for name, each in found.items()
    ]
    head = ["setting", "system", "hit rate", "worst seed", "cost, ESG's = 1"]
    more = ["latency, of the deadline", "calls a batch", "inputs from the same node"]
    return table([*head, *more], rows, text_columns=2)


def _after(application: Application, stage: str) -> str:
    chance = dict(application.chances).get(stage)
    before = ", ".join(application.graph.before(stage)) or "the request"
    return before if chance is None else f"{before}; in {percent(chance)} of the calls"
