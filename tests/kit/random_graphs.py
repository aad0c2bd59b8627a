"""Graphs of workflows as Hypothesis draws them."""

from itertools import combinations

from hypothesis import strategies as st

from gateway_ext.workflows.graph import Workflow


@st.composite
def graphs(draw: st.DrawFn) -> Workflow:
    """Any graph of up to eight stages whose edges lead from earlier stages to later ones."""
    stages = tuple("abcdefgh"[: draw(st.integers(1, 8))])
    edges = tuple(edge for edge in combinations(stages, 2) if draw(st.booleans()))
    return Workflow("random", stages, edges)
