"""The rules for what a trial run showed: graph breaks, graphs and operators in the function."""

from gpufaas.check.findings import UseOutcome, UseRule
from torch_shim.advice.break_reasons import for_break, for_local


def of_break(reason: str) -> UseRule:
    """The rule for a graph break, by Dynamo's reason."""
    why, remedy = for_break(reason)
    return UseRule(UseOutcome.LOCAL, why, remedy)


def of_local(reason: str, *, heavy: bool) -> UseRule:
    """The rule for a captured graph that ran in the function, by the shim's reason."""
    why, remedy = for_local(reason)
    return UseRule(UseOutcome.LOCAL, why, remedy, heavy)


def of_operator(name: str, *, heavy: bool) -> UseRule:
    """The rule for an operator outside of graphs; graphs take no sparse ones."""
    remedy = "compute it in the forward of an nn.Module, where no graph break keeps it out"
    return UseRule(
        UseOutcome.LOCAL,
        "outside of any graph it runs on the function's own processor",
        "" if "sparse" in name else remedy,
        heavy=heavy,
    )
