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
    "sent", [(ONE, "nonsense"), ("handle", "handles"), [ONE] * 17, [f"{ONE},{ONE}"] * 9]
)
async def test_call_is_refused_when_any_of_its_data_headers_is_wrong(sent: list[str]) -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment("", enabled="true"), fake)
        answer = await gateway.call(headers=[f"X-Gpu-Data: {one}" for one in sent])
        assert answer.status == 400
        assert not fake.got


async def test_refusal_names_what_is_no_handle_and_has_the_id_of_its_call() -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment("", enabled="true"), fake)
        ours = await gateway.call(headers=[f"X-Gpu-Data: {ONE}, nonsense"])
        assert ours.body.decode() == (
            "X-Gpu-Data: 'nonsense' is no handle"
            " (context.put gives one, and so does the word handle)"
        )
        assert len(ours.header("x-call-id") or "") == len("7eeab308-98d2-4fff-a078-843ad0453cbc")
        theirs = await gateway.call(headers=["X-Gpu-Data: nonsense", "X-Call-Id: mine"])
        assert theirs.header("x-call-id") == "mine"


@pytest.mark.parametrize(
    "name",
    [
        *("X_Gpu_Lease", "x-gpu_lease", "X_GPU-ADDRESS", "x_gpu_data", "X_Call_Id", "x_start_time"),
        *("X_Forwarded_For", "Content_Length", "Transfer_Encoding", "Proxy_Authorization"),
    ],
)
async def test_header_that_cgi_would_take_for_the_gateways_own_reaches_no_function(
    name: str,
) -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(""), fake)
        assert (await gateway.call(headers=[f"{name}: 1", "x_own: 1"])).status == 200
        assert fake.got[0].header(name) is None
        assert fake.got[0].header("x_own") == "1"


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
