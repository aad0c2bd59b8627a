"""What all programs of one simulation share: network, etcd, chance, scenario and journal."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from hunt.seeds.event_journal import EventJournal
from hunt.seeds.scenarios.scenario import Scenario
from scheduler.service.leadership.term import Office
from tests.kit.simulation.simulated_etcd import SimulatedEtcd
from tests.kit.simulation.simulated_nats import SimulatedNats
from tests.kit.simulation.simulated_network import Network, NetworkedLoop

SECRET = b"the secret of a simulated cluster"


@dataclass(slots=True)
class Surroundings:
    """One simulation's world outside our programs."""

    loop: NetworkedLoop
    scenario: Scenario
    chance: Random
    network: Network
    etcd: SimulatedEtcd
    nats: SimulatedNats  # runs where gateways share a queue
    journal: EventJournal
    folder: Path  # for what insists on one; nothing is kept there
    # The schedulers that lead, or believe so.
    offices: Callable[[], list[Office]] = list

    @property
    def scheduler_urls(self) -> list[str]:
        """Where the schedulers listen."""
        return [f"http://s{number}:7700" for number in range(self.scenario.schedulers)]
