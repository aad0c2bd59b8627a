"""X-Gpu-Data of calls: passed on, passed back, and turned into where a request is best placed."""

import pytest

from tests.kit.fakes.fake_function import FakeFunction, a_function, says
from tests.kit.worlds.calling import Gateway, a_deployment, a_gateway

pytestmark = pytest.mark.timeout(180, func_only=True)

USES_A_MODEL = f"X-Gpu-Models: {64 * 'b'}\r\n"
ONE, OTHER = "node-1.lan." + 32 * "a", "node-2." + 32 * "b"


async def learned(gateway: Gateway, fake: FakeFunction) -> None:
    """A GPU function whose model is known."""
    gateway.deploy(a_deployment("", enabled="true"), fake)
    assert (await gateway.call()).status == 200


@pytest.mark.parametrize(
    ("sent", "near"),
    [
        (ONE, "node-1.lan"),
        (f"handle,{OTHER}", "node-2"),
        (f" {OTHER} , {ONE}", "node-2"),
        (",".join([*[OTHER] * 16, "handle"]), "node-2"),
        ("handle", None),
    ],
)
async def test_request_is_placed_near_the_first_data_that_its_call_names(
    sent: str, near: str | None
) -> None:
    async with a_gateway() as gateway, a_function(says(headers=USES_A_MODEL)) as fake:
        await learned(gateway, fake)
        await gateway.call(headers=[f"X-Gpu-Data: {sent}"])
        assert fake.got[1].header("x-gpu-data") == sent.strip()
        (request,) = gateway.leases.asked
        assert request.near == near


async def test_handle_of_an_answer_reaches_the_caller_and_nothing_else_of_the_gpu_does() -> None:
    more = f"X-Gpu-Data: {ONE}\r\nX-Gpu-Secret: 1\r\n{USES_A_MODEL}"
    async with a_gateway() as gateway, a_function(says(headers=more)) as fake:
        gateway.deploy(a_deployment("", enabled="true"), fake)
        answer = await gateway.call(headers=["X-Gpu-Data: handle"])
        assert answer.header("x-gpu-data") == ONE
        assert answer.header("x-gpu-secret") is None
        assert answer.header("x-gpu-models") is None


@pytest.mark.parametrize(
    "sent", ["nonsense", f"{ONE},", f"{ONE},{ONE}x", "handles", ",".join([ONE] * 17), "n.short"]
)
async def test_call_is_refused_when_its_data_is_no_list_of_handles(sent: str) -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment("", enabled="true"), fake)
        answer = await gateway.call(headers=[f"X-Gpu-Data: {sent}"])
        assert answer.status == 400
        assert b"X-Gpu-Data" in answer.body
        assert not fake.got
