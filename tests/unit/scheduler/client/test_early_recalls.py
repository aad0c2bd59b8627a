"""A lease that is wanted back before the task that was granted it has resumed."""

from scheduler.client.lease_client import LeaseClient
from scheduler.model.errors import SchedulerError
from scheduler.model.events import RequestArrived
from scheduler.model.values import LeaseId
from scheduler.service.access import ApiRole, token
from scheduler.wire.caller_stream import Granted
from tests.kit.cores.builders import request
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import SECRET, leading


class Noted:
    """Keeps leases, and notes in order what it hears of them."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, LeaseId]] = []

    def answered(self, answer: Granted | SchedulerError) -> None:
        assert isinstance(answer, Granted)
        self.heard.append(("granted", answer.placement.lease))

    def recalled(self, lease: LeaseId) -> None:
        self.heard.append(("recalled", lease))


async def test_recall_of_a_lease_follows_its_grant() -> None:
    noted = Noted()
    async with leading() as world, LeaseClient([world.url], token(SECRET, ApiRole.CALLER)) as it:
        office = world.office
        assert office is not None
        first = await world.acquire("r0")
        it.let_stand(noted.recalled)
        it.ask(request("r1"), None, noted.answered)
        await eventually(lambda: office.core.cluster.waiting.count == 1)

        def once_it_is_granted() -> None:
            """In the same step of the loop as the grant, somebody else waits."""
            if "r1" in [p.id for lease in office.core.leases.values() for p in lease.requests]:
                office.observers.clear()
                office.driver.report(RequestArrived(request("r2", "gpt")))

        office.observers.append(once_it_is_granted)
        office.driver.release(first.body["lease"])
        await eventually(lambda: len(noted.heard) == 2)
        assert [what for what, _ in noted.heard] == ["granted", "recalled"]
        assert len({lease for _, lease in noted.heard}) == 1
