"""Each system that makes batches, served and warm: ours three ways, and its peers."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.gateway.bench_stacks import call_until_leased
from bench.measure.load_figures import LoadFigures, http_post, load_for
from bench.measure.peers.four_models import answers, bodies, made
from bench.measure.peers.peer_installs import PeerSystem
from bench.measure.peers.peer_servers import peer_server
from bench.measure.report import MeasurementFailed
from bench.measure.whole_stack import WholeStack, whole_stack
from bench.merging import batch_functions
from bench.merging.batch_functions import OwnWay

CLIENTS = (1, 8, 32, 128)
_REQUESTS = 64
_WARM_S, _FIRST_WARM_S, _MOST_WARM = 0.5, 2.0, 8
_OVERLAPS = {OwnWay.SINGLY: 32, OwnWay.MERGED: 32, OwnWay.LISTS: 1}
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
_OK = 200


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """How a peer makes batches: its workers, torch's threads in each, and the wait for others."""

    workers: int
    threads: int
    wait_s: float

    @property
    def program(self) -> str:
        """The argument of the peer's script."""
        return f"batched:{self.workers}:{self.threads}:{self.wait_s:g}:{batch_functions.MOST}"

    def __str__(self) -> str:
        return f"{self.workers} x {self.threads} threads, {1e3 * self.wait_s:g} ms"


# Each was the best for some model and number of clients.
SETTINGS = (PeerSetting(1, 2, 0.0), PeerSetting(1, 2, 0.005), PeerSetting(2, 1, 0.0))


class ModelCalls:
    """Calls of one model, and what torch answers to them."""

    def __init__(self, model: str) -> None:
        self.bodies = bodies(model, _REQUESTS)
        found = answers(made(model), model, [json.loads(body) for body in self.bodies])
        self._expected = torch.tensor([each["scores"] for each in found])

    def load(self, url: str, path: str, clients: int, seconds: float) -> LoadFigures:
        """Put clients on a system; MeasurementFailed where an answer is wrong."""
        said: list[tuple[int, int, bytes]] = []
        calls = [http_post(path, body=body) for body in self.bodies]
        figures = load_for(url, calls, clients, seconds, lambda *each: said.append(each))
        right = [each for each in said if each[1] == _OK]
        if not right:
            raise MeasurementFailed(f"{url}{path}: none of {len(said)} calls: {said[:1]!r}")
        shown = torch.tensor([json.loads(body)["scores"] for _, _, body in right])
        expected = self._expected[[number for number, _, _ in right]]
        if not torch.allclose(shown, expected, _RELATIVE, _ABSOLUTE):
            apart = float((shown - expected).abs().max())
            raise MeasurementFailed(f"{url}{path}: answers differ by up to {apart:g}")
        return figures


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model at one system."""

    url: str
    path: str
    calls: ModelCalls
    stack: WholeStack | None = None

    def measure(self, clients: int, seconds: float) -> LoadFigures:
        """The figures of these clients, after they have called for a while."""
        self.load(clients, _WARM_S)
        before = None if self.stack is None else self.stack.cache()
        figures = self.load(clients, seconds)
        if self.stack is not None and before is not None:
            found = self.stack.cache().since(before)
            made_calls = figures.rate * seconds
            if found.hits + found.misses < made_calls / 2:
                raise MeasurementFailed(f"{self.path}: {found} leases for {made_calls:.0f} calls")
        return figures

    def load(self, clients: int, seconds: float) -> LoadFigures:
        return self.calls.load(self.url, self.path, clients, seconds)


@contextmanager
def stack_of_ours(way: OwnWay) -> Iterator[WholeStack]:
    """A stack with one emulated GPU, as it serves this way best, and no function yet."""
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        root = Path(name)
        root.chmod(0o755)  # functions are other users
        batch_functions.write_build(root / "build")
        options = (
            "--devices",
            "cpu:1",
            "--gpu-memory",
            "4GiB",
            "--gpu-overlap",
            str(_OVERLAPS[way]),
        )
        with whole_stack(root, options) as running:
            yield running


def served_by_ours(running: WholeStack, model: str, way: OwnWay, calls: ModelCalls) -> ServedModel:
    """Deploy a function, and call it until it has traced what it needs for every list."""
    running.deploy(batch_functions.deployment(model, way))
    name = batch_functions.name_of(model, way)
    running.ready(name)
    call_until_leased(running, name, calls.bodies[0])
    found = ServedModel(running.url, f"/function/{name}", calls, running)
    _settle(partial(found.load, 32, _FIRST_WARM_S))
    return found


def _settle(load: "partial[LoadFigures]") -> None:
    """Load until the rate grows no more: traces and comparisons of groups are made by then."""
    best = 0.0
    for _ in range(_MOST_WARM):
        rate = load().rate
        if rate < 1.1 * best:
            return
        best = max(best, rate)


@contextmanager
def served_by_peer(
    peer: PeerSystem, setting: PeerSetting, calls: dict[str, ModelCalls]
) -> Iterator[list[tuple[str, ServedModel]]]:
    """All of the models at a peer, each warm."""
    with peer_server(peer, setting.program) as served:
        found = []
        for model, its in calls.items():
            one = ServedModel(served.url, f"/{model}", its)
            _settle(partial(one.load, 32, _WARM_S))
            found.append((model, one))
        yield found
