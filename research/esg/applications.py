"""Applications: functions and who waits for whom; ESG's are chains, ours have branches too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from gateway_ext.workflows.graph import Workflow


@dataclass(frozen=True, slots=True)
class Application:
    """Stages, each named by its function; without `edges` they run one after the other.

    `chances`: how probable it is that the condition of a stage that waits for others is met; those
    that are not listed have none.
    """

    name: str
    stages: tuple[str, ...]
    edges: tuple[tuple[str, str], ...] = ()
    chances: tuple[tuple[str, float], ...] = ()

    @property
    def graph(self) -> Workflow:
        """Who waits for whom."""
        return _graph_of(self)

    @property
    def entries(self) -> tuple[str, ...]:
        """The stages that wait for no other."""
        return tuple(stage for stage in self.graph.order if not self.graph.before(stage))

    def heaviest_path(self, weights: Mapping[str, float], first: str = "") -> Sequence[str]:
        """The stages of the heaviest path, in their order; of those that begin with `first`."""
        graph = self.graph
        weight = graph.longest(weights)
        path = [first or max(self.entries, key=weight.__getitem__)]
        while after := graph.after(path[-1]):
            path.append(max(after, key=weight.__getitem__))
        return path


@cache
def _graph_of(application: Application) -> Workflow:
    edges = application.edges or tuple(pairwise(application.stages))
    return Workflow(application.name, application.stages, edges)


# Ours, of ESG's six functions, since ESG's applications have no branches.
_JOIN = Application(
    "picture report",
    ("super-resolution", "segmentation", "depth", "classification"),
    (
        *(("super-resolution", "segmentation"), ("super-resolution", "depth")),
        *(("segmentation", "classification"), ("depth", "classification")),
    ),
)
_CHOICE = Application(
    "background if needed",
    ("deblur", "background", "super-resolution", "segmentation", "classification"),
    (
        *(("deblur", "background"), ("deblur", "super-resolution")),
        ("super-resolution", "segmentation"),
        *(("background", "classification"), ("segmentation", "classification")),
    ),
    (("background", 0.5),),
)
_NESTED = Application(
    "nested branches",
    ("deblur", "background", "super-resolution", "segmentation", "classification", "depth"),
    (
        *(("deblur", "background"), ("deblur", "super-resolution")),
        *(("super-resolution", "segmentation"), ("super-resolution", "classification")),
        *(("background", "depth"), ("segmentation", "depth"), ("classification", "depth")),
    ),
)
_TAIL = Application(
    "branches and a tail",
    ("super-resolution", "classification", "segmentation", "deblur", "depth", "background"),
    (
        *(("super-resolution", "classification"), ("super-resolution", "segmentation")),
        *(("classification", "deblur"), ("segmentation", "deblur")),
        *(("deblur", "depth"), ("depth", "background")),
    ),
    (("classification", 0.7),),
)
BRANCHING = (_JOIN, _CHOICE, _NESTED, _TAIL)
