"""The thesis's figures as carried, and what they imply."""

import pytest

from gpufaas.commands.demo import REPORTED_LATENCIES_S, REPORTED_MISS_RATIOS
from research.thesis import printed_figures
from research.thesis.experiments import PolicyFigures

PAPER = printed_figures.load()


def test_load_has_every_row_of_the_tables() -> None:
    assert PAPER.policies == ("rr", "lb", "rro3", "lalb", "lalbo3")
    assert PAPER.working_sets == (15, 25, 35)
    assert len(PAPER.table2) == 15
    assert {len(row.copies) for row in PAPER.table2} == {len(PAPER.models)}
    assert [row.o3_limit for row in PAPER.table3] == list(range(0, 50, 5))


def test_load_names_the_author() -> None:
    assert "Sungho Hong" in PAPER.attribution


def test_claims_are_about_policies_sizes_and_figures_that_exist() -> None:
    wrong = [
        claim
        for claim in PAPER.claims
        if not {claim.subject, claim.reference} <= set(PAPER.policies)
        or not set(claim.working_sets) <= set(PAPER.working_sets)
        or not hasattr(PolicyFigures, claim.metric)
        or not -100 < claim.change_percent < 0
    ]

    assert PAPER.claims
    assert wrong == []


def test_in_order_puts_the_thesis_policies_first() -> None:
    assert PAPER.in_order(["another", "lalb", "rr"]) == ["rr", "lalb", "another"]


def test_copies_finds_a_row_of_table_2() -> None:
    assert PAPER.copies("lalb", 25) == (4.86, 4.78, 5.75, 4.24, 2.67)


def test_limit_finds_a_row_of_table_3() -> None:
    assert PAPER.limit(25).avg_latency_s == 4.61


def test_implied_follows_the_claims_from_table_3() -> None:
    latency = PAPER.implied("avg_latency_s")

    assert latency["lb"] == pytest.approx(29.54 / 0.2)
    assert latency["rr"] == pytest.approx(29.54 / 0.2 / 0.56)
    assert latency["rro3"] == pytest.approx(latency["rr"] * 0.87)


def test_implied_leaves_out_what_no_claim_leads_to() -> None:
    assert set(PAPER.implied("miss_ratio")) == {"lb", "lalb", "lalbo3"}


@pytest.mark.parametrize(
    ("metric", "shown"),
    [("avg_latency_s", REPORTED_LATENCIES_S), ("miss_ratio", REPORTED_MISS_RATIOS)],
)
def test_demo_shows_what_the_thesis_implies(metric: str, shown: dict[str, float]) -> None:
    assert shown == pytest.approx(PAPER.implied(metric), rel=1e-3)
    assert tuple(REPORTED_LATENCIES_S) == PAPER.policies
