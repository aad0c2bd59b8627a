"""The figures that the thesis prints as numbers, for comparison."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TypeVar, cast

_Row = TypeVar("_Row")

# Table 3 and Figure 10 are about LALBO3 at this working set; elsewhere its limit is the usual one.
SWEEP_POLICY = "lalbo3"
SWEEP_WORKING_SET = 35
USUAL_LIMIT = 25


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of chapter 5: the change of `subject` against `reference` in one metric.

    `metric` is a field of `experiments.Figures`. The claim holds for each of its working sets.
    """

    subject: str
    reference: str
    metric: str
    working_sets: tuple[int, ...]
    change_percent: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """The subject's figure over the reference's."""
        return 1.0 + self.change_percent / 100.0


@dataclass(frozen=True, slots=True)
class CopiesRow:
    """A row of Table 2: average number of GPUs that hold each of the five most used models."""

    working_set: int
    policy: str
    copies: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LimitRow:
    """A row of Table 3: LALBO3 at working set 35 with this O3 limit."""

    o3_limit: int
    avg_latency_s: float
    latency_variance: float
    miss_ratio: float
    false_miss_ratio: float


@dataclass(frozen=True, slots=True)
class Paper:
    """Chapter 5 in numbers."""

    attribution: str
    claims: tuple[Claim, ...]
    sm_utilisation: Mapping[str, float]
    models: tuple[str, ...]
    table2: tuple[CopiesRow, ...]
    table3: tuple[LimitRow, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """The five policies, in the thesis's order."""
        return tuple(dict.fromkeys(row.policy for row in self.table2))

    @property
    def working_sets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row.working_set for row in self.table2))

    def in_order(self, found: Sequence[str]) -> list[str]:
        """These policies, the thesis's in its order, then all others."""
        known = [name for name in self.policies if name in found]
        return known + [name for name in found if name not in known]

    def copies(self, policy: str, working_set: int) -> tuple[float, ...]:
        """The row of Table 2 for these."""
        (row,) = (
            row for row in self.table2 if (row.policy, row.working_set) == (policy, working_set)
        )
        return row.copies

    def limit(self, o3_limit: int) -> LimitRow:
        """The row of Table 3 for this limit."""
        (row,) = (row for row in self.table3 if row.o3_limit == o3_limit)
        return row

    @property
    def utilised(self) -> list[str]:
        """The policies whose utilisation is compared with that of RR."""
        return [policy for policy in self.sm_utilisation if policy != self.policies[0]]

    def utilisation_ratio(self, policy: str) -> float:
        """The SM utilisation of a policy over that of RR."""
        return self.sm_utilisation[policy] / self.sm_utilisation[self.policies[0]]

    def implied(self, metric: str) -> dict[str, float]:
        """The absolute values at working set 35 that the claims and Table 3 imply.

        LALB is LALBO3 with a limit of 0. If two claims imply one figure, the first counts.
        """
        strict, loose = self.limit(0), self.limit(USUAL_LIMIT)
        known: dict[str, float] = {
            "lalb": getattr(strict, metric),
            "lalbo3": getattr(loose, metric),
        }
        claims = [
            c for c in self.claims if c.metric == metric and SWEEP_WORKING_SET in c.working_sets
        ]
        for claim in claims * len(self.policies):
            if claim.subject in known:
                known.setdefault(claim.reference, known[claim.subject] / claim.ratio)
            if claim.reference in known:
                known.setdefault(claim.subject, known[claim.reference] * claim.ratio)
        return known


def load() -> Paper:
    """The thesis's figures from our data file."""
    text = files("research").joinpath("data/thesis-results.json").read_text(encoding="utf-8")
    data = cast(dict[str, object], json.loads(text))
    return Paper(
        attribution=str(data["attribution"]),
        claims=_rows(Claim, data["claims"]),
        sm_utilisation=cast(dict[str, float], data["sm_utilisation_percent"]),
        models=tuple(cast(list[str], data["table2_models"])),
        table2=_rows(CopiesRow, data["table2"]),
        table3=_rows(LimitRow, data["table3"]),
    )


def _rows(kind: type[_Row], rows: object) -> tuple[_Row, ...]:
    return tuple(kind(**_frozen(row)) for row in cast(list[dict[str, object]], rows))


def _frozen(row: dict[str, object]) -> dict[str, object]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
