"""The comparison of batching with peers, over HTTP: each system's best figures, as a table."""

import time
from dataclasses import dataclass

from bench.measure.load_figures import LoadFigures
from bench.measure.peers.peer_installs import PeerSystem, PeerUnavailable, install
from bench.measure.report import BenchReport
from bench.merging.batch_functions import MOST, OwnWay
from bench.merging.batching_systems import (
    CLIENTS,
    SETTINGS,
    ModelCalls,
    ServedModel,
    served_by_ours,
    served_by_peer,
    stack_of_ours,
)

_PEERS = {"LitServe": PeerSystem.LITSERVE, "Ray Serve": PeerSystem.RAY}
_COLUMNS = (*(f"ours, {way}" for way in OwnWay), *_PEERS)
_ABOUT = (
    "\nEach system serves the model over HTTP; clients call it in a closed loop, each call with "
    "one input (an image of 64 x 64 or 16 words, in base64 in JSON), and every answer is compared "
    f"with torch's. Lists have {MOST} calls at most. *Singly*: `com.gpufaas.batch: off`. "
    "*Merged*: `model(x)` in an unmodified handler, run as one by the worker. *Lists*: "
    f"`handle_batch` with `com.gpufaas.batch-handler: {MOST}`, no wait. Ours run on one emulated "
    "GPU (torch on this machine's cores), singly and merged with 32 leases at a time. Of the peers "
    "the best of some settings is shown for each number of clients: workers x torch's threads, "
    "wait for others. Cells: calls/s, p50 / p99 ms; failed calls where there were any."
)


@dataclass(frozen=True, slots=True)
class _Best:
    """The best figures so far, and how they came about."""

    figures: LoadFigures
    setting: str = ""

    def cell(self) -> str:
        found = self.figures
        text = f"{found.rate:,.0f}, {1e3 * found.p50_s:.1f} / {1e3 * found.p99_s:.1f}"
        text += f", {found.failed} failed" if found.failed else ""
        return f"{text} ({self.setting})" if self.setting else text


class BatchingComparison:
    """What was measured so far."""

    def __init__(self, models: list[str], seconds: float) -> None:
        self._calls = {model: ModelCalls(model) for model in models}
        self._seconds = seconds
        self._found: dict[tuple[str, str, int], _Best] = {}
        self._absent: dict[str, str] = {}

    def measure(self, report: BenchReport) -> None:
        """Measure every system, and add the table."""
        report.add(_ABOUT)
        begun_s = time.monotonic()
        for way in OwnWay:
            with stack_of_ours(way) as running:
                for model, calls in self._calls.items():
                    served = served_by_ours(running, model, way, calls)
                    self._take(f"ours, {way}", model, served)
        for name, peer in _PEERS.items():
            try:
                install(peer)
                self._measure_peer(name, peer)
            except PeerUnavailable as error:
                self._absent[name] = str(error)
        self._add_table(report)
        report.add(f"\nAll of it took {time.monotonic() - begun_s:.0f} s.")

    def _measure_peer(self, name: str, peer: PeerSystem) -> None:
        for setting in SETTINGS:
            with served_by_peer(peer, setting, self._calls) as models:
                for model, served in models:
                    self._take(name, model, served, str(setting))

    def _take(self, system: str, model: str, served: ServedModel, setting: str = "") -> None:
        for clients in CLIENTS:
            found = _Best(served.measure(clients, self._seconds), setting)
            print(f"{system}, {model}, {clients} clients: {found.cell()}", flush=True)
            key = system, model, clients
            known = self._found.get(key)
            if known is None or found.figures.rate > known.figures.rate:
                self._found[key] = found

    def _add_table(self, report: BenchReport) -> None:
        for name, why in self._absent.items():
            report.add(f"\n{name} is not measured: {why}")
        report.add(f"\n| model | clients | {' | '.join(_COLUMNS)} |")
        report.add(f"| --- | ---: |{' ---: |' * len(_COLUMNS)}")
        for model in self._calls:
            for clients in CLIENTS:
                found = [self._found.get((system, model, clients)) for system in _COLUMNS]
                cells = ["-" if each is None else each.cell() for each in found]
                report.add(f"| {model} | {clients} | {' | '.join(cells)} |")
