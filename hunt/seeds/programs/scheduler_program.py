"""A scheduler of a simulation: the service, its server, and its connection to etcd."""

from common.errors import NoResponse
from common.http.asgi import App, Receive, Scope, Send, send_text
from common.http.client import HttpClient
from hunt.seeds.surroundings import SECRET, Surroundings
from scheduler.model.errors import NotLeading
from scheduler.service.http.app import serving
from scheduler.service.leadership.term import Office
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Serving, Settings
from tests.kit.simulation.simulated_etcd import EtcdClient
from tests.kit.simulation.simulated_network import listener

PORT = 7700
_SERVED = ("/readyz",)


class SchedulerProgram:
    """One of the schedulers, through all its lives."""

    def __init__(self, around: Surroundings, name: str) -> None:
        self.name = name
        self.url = f"http://{name}:{PORT}"
        self.service: SchedulerService | None = None
        self._around = around

    @property
    def office(self) -> Office | None:
        """The term in which this scheduler leads now."""
        try:
            return None if self.service is None else self.service.office()
        except NotLeading:
            return None

    def died(self) -> None:
        """It leads no more."""
        self.service = None

    async def run(self) -> None:
        """Serve until cancelled."""
        scenario = self._around.scenario
        standing_s = 5.0 if scenario.standing else 0.0
        serving_settings = Serving(attach_grace_s=5.0, standing_s=standing_s, history=200)
        settings = Settings(
            policy=scenario.policy,
            eviction=scenario.eviction,
            exit_rule=scenario.exit_rule,
            scheduler=serving_settings,
        )
        service = self.service = SchedulerService(settings, SECRET, self.name, self.url)
        async with (
            EtcdClient(self._around.etcd, self.name) as store,
            serving(probed_app(service), listener(self.name, PORT), streams=service.serve_stream),
        ):
            await service.run(store)


def probed_app(service: SchedulerService) -> App:
    """What a rival asks of a scheduler over HTTP; people's routes are no part of a simulation."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        health = service.health()
        leads = f"{health.term or 0} {int(health.leading)}"
        await send_text(send, 200 if scope["path"] in _SERVED else 404, leads)

    return app


async def term_at(url: str) -> int:
    """The term in which the scheduler at this URL leads; 0 if it does not lead or answer."""
    client = HttpClient()
    address = "tcp:" + url.removeprefix("http://")
    try:
        connection = await client.connect(address)
        await connection.ask(b"GET /readyz HTTP/1.1\r\nhost: scheduler\r\n\r\n")
        while not connection.complete:
            await connection.more()
        term, leads = connection.take().split()
        connection.let_go()
    except (NoResponse, ValueError):
        return 0
    finally:
        client.close()
    return int(term) * int(leads)
