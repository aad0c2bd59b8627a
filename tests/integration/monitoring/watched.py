"""What the tests here look at."""

from dataclasses import dataclass

from tests.kit.engines.prometheus_server import Prometheus
from tests.kit.stacks.stack import Stack


@dataclass(frozen=True)
class Watched:
    """A stack, who watches it, and where its processes show their metrics."""

    stack: Stack
    prometheus: Prometheus
    pages: dict[str, str]
