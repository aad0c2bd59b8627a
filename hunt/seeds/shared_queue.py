"""What stands in for NATS and a gateway's lock where gateways of a simulation share their jobs."""

from pathlib import Path

from gateway_ext.shared_jobs import link, queue
from gateway_ext.shared_jobs.session import GatewayIdentity
from tests.kit.simulation.simulated_loop import PROGRAM
from tests.kit.simulation.simulated_nats_client import SimulatedNatsClient


class OwnedIdentity(GatewayIdentity):
    """The lock of a gateway's folder, which ends with its process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        program = PROGRAM.get()
        assert program is not None, "a gateway has it"
        program.at_death.append(self.close)


SHARED_QUEUE = (
    (link, "Client", SimulatedNatsClient),
    (queue, "GatewayIdentity", OwnedIdentity),
)
