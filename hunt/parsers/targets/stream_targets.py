"""Streams of gateways and nodes at the scheduler, the lines that carry them, and lease tokens."""

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from common.errors import StreamRefused
from common.frame_line import FrameLine, LineBroken
from common.stream_upgrade import SWITCHED, dial
from hunt.parsers.parser_target import InputForm, Target
from scheduler.model import events
from scheduler.model.actions import Demote, EndLease, Prepare
from scheduler.model.errors import BadToken, BadValue, OverQuota, QueueFull
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import (
    CallEnd,
    Estimate,
    LeaseId,
    LeaseUse,
    ModelLoad,
    Placement,
    RequestId,
    SlotId,
    StandingTerms,
)
from scheduler.wire import caller_stream, node_stream
from scheduler.wire.codec import pack
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens
from scheduler.wire.refusals import error_of, refusal
from tests.kit.cores.builders import gpu, model, request

_SECRET = b"0123456789abcdef0123456789abcdef"
_GPU, _NODE, _SLOT, _BERT = GpuId("g0"), NodeId("n0"), SlotId("g0"), ModelId("openfaas-fn/bert")
_LEASE, _REQUEST = LeaseId(7), RequestId("r1")
_PLACEMENT = Placement(
    _LEASE, _GPU, _NODE, _SLOT, (_BERT,), hit=False, estimate=Estimate(1.0, 0.5),
    stands=StandingTerms(30.0, 100, 0.5),
)  # fmt: skip
_MOST_FRAME_BYTES = 1 << 16

T = TypeVar("T")


def targets() -> list[Target]:
    """All of this file."""
    return [*_of_callers(), *_of_nodes(), _token(), _frame_line(), _upgrade()]


def _of_callers() -> list[Target]:
    reads = ("scheduler/wire/caller_stream.py",)
    bound = "a frame of 1 MiB; lists of 4,096 in what is asked and reported"
    return [
        Target(
            "caller-stream-up", caller_stream.read_up, (BadValue,), _caller_ups,
            InputForm.MSGPACK, reads, "gateways and other callers", bound,
            encode=pack,
        ),
        Target(
            "caller-stream-down", _refusals_too, (BadValue,), _caller_downs,
            InputForm.MSGPACK, reads, "the leading scheduler", bound,
            encode=pack,
        ),
    ]  # fmt: skip


def _refusals_too(data: bytes) -> caller_stream.CallerDown:
    found = caller_stream.read_down(data)
    if isinstance(found, caller_stream.Refused):
        error_of(found.refusal)
    return found


def _caller_ups() -> list[bytes]:
    used = events.LeaseUsed(
        _LEASE, "openfaas-fn/f", (LeaseUse(_REQUEST, -1.0, -0.5, None, "00-a"),),
        (CallEnd(_REQUEST, -0.1),), 2,
    )  # fmt: skip
    terms = caller_stream.FunctionTerms("openfaas-fn/f", OwnerTerms(weight=2.0, leases=3))
    asked = request("r1", "bert", "resnet", deadline_s=5.0, max_wait_s=2.0, near="n0")
    return [
        pack(each)
        for each in (
            caller_stream.AskLease(1, asked, "00-ab", "x=1", keeps=True),
            caller_stream.Ran((used,)),
            caller_stream.ToldTerms((terms,), begins=True),
            caller_stream.Present(1, "gateway"),
            caller_stream.Holds(((_LEASE, _REQUEST),)),
            caller_stream.GiveBack(_LEASE, request=_REQUEST),
            caller_stream.Cancel(_REQUEST),
        )
    ]


def _caller_downs() -> list[bytes]:
    refused = (
        QueueFull(_REQUEST, "full", 3, 1.5),
        OverQuota(_REQUEST, "used up", 2.0),
        BadValue("no"),
    )
    sent: list[caller_stream.CallerDown] = [
        caller_stream.Granted(1, _PLACEMENT, 3, ("unix:@m", "tcp:h:1"), "token"),
        *(caller_stream.Refused(2, refusal(each)) for each in refused),
        caller_stream.Leads(3),
        caller_stream.SentAway("http://h:1"),
        caller_stream.Recalled(_LEASE),
        caller_stream.Alive(),
    ]
    return [pack(each) for each in sent]


def _of_nodes() -> list[Target]:
    reads = ("scheduler/wire/node_stream.py", "scheduler/wire/codec.py")
    bound = "a message of 16 MiB; lists and features of 262,144"
    return [
        Target(
            "node-greeting", node_stream.read_greeting, (BadValue,), _greetings,
            InputForm.MSGPACK, reads, "whoever connects, before it has proved anything",
            "16 KiB; 64 addresses",
            encode=pack,
        ),
        Target(
            "node-stream-up", lambda data: node_stream.DownChannel().unpack(data), (BadValue,),
            _reports, InputForm.MSGPACK, reads, "GPU managers", bound,
            encode=lambda sent: node_stream.UpChannel().pack(sent),
        ),
        Target(
            "node-stream-down", lambda data: node_stream.UpChannel().unpack(data), (BadValue,),
            _orders, InputForm.MSGPACK, reads, "the leading scheduler", bound,
            encode=lambda sent: node_stream.DownChannel().pack(sent),
        ),
    ]  # fmt: skip


def _greetings() -> list[bytes]:
    return [
        pack(each)
        for each in (
            node_stream.Hello(
                1, "n0", "run", "nonce", 3, node_stream.Resume("run", 5), ("tls:h:1",), "ab"
            ),
            node_stream.Challenge(1, "nonce", 3, "run", "proof"),
            node_stream.Welcome(resumed=True, seen=3, proof="ab"),
            node_stream.TurnedAway("no", "http://h:1"),
        )
    ]


def _reports() -> list[bytes]:
    live = events.LiveLease(_LEASE, _SLOT, (_BERT,), (_REQUEST,))
    snapshot = events.NodeSnapshot(
        _NODE,
        (events.GpuSnapshot(gpu("g0", slots=2, vcpus=4), ((_BERT, 5),), (live,)),),
        ((_BERT, Tier.HOST),),
    )
    return [
        node_stream.UpChannel().pack(each)
        for each in (
            node_stream.Report(snapshot),
            node_stream.Report(events.ModelRegistered(model("bert"))),
            node_stream.Report(events.ModelLoaded(_GPU, _BERT, 1.5, Tier.DISK, 9)),
            node_stream.Report(events.RunFinished(_SLOT, _BERT, 4, 0.1, 77)),
            node_stream.Report(events.LeaseComputed(_LEASE, 0.5)),
            node_stream.Acquire(3, request("r1", deadline_s=3.0)),
            node_stream.Ask(4, "pin", _BERT, _GPU),
            node_stream.Locate(5, _NODE),
            node_stream.Beat(),
        )
    ]


def _orders() -> list[bytes]:
    load = ModelLoad(_BERT, 1 << 30, Tier.HOST, ModelId("resnet"))
    return [
        node_stream.DownChannel().pack(each)
        for each in (
            node_stream.Given(3, Prepare(_SLOT, _GPU, _LEASE, (ModelId("vgg"),), (load,))),
            node_stream.Given(3, EndLease(_SLOT, _LEASE, "released")),
            node_stream.Given(3, Demote(_GPU, _BERT, "idle")),
            node_stream.Answer(1, _PLACEMENT, None, None, ("unix:@m",)),
            node_stream.Answer(2, refusal=refusal(QueueFull(_REQUEST, "full", 3, 1.5))),
            node_stream.Contended(waiting=True),
        )
    ]


def _token() -> Target:
    """Claims that are signed, as another version would sign them."""
    tokens = LeaseTokens(_SECRET)
    claims = LeaseClaims(
        _LEASE, _REQUEST, "openfaas-fn/f", _NODE, _GPU, _SLOT, 3, 2e9, ("tls:h:1#ab",),
        stands=True, ahead=True,
    )  # fmt: skip

    def signed(body: str) -> str:
        return f"{body}.{tokens._mac(body)}"  # noqa: SLF001 - nobody else signs other claims

    def verify(data: bytes) -> LeaseClaims:
        return tokens.verify(signed(_in_base64(data)), 0.0)

    def encode(found: LeaseClaims) -> bytes:
        return _from_base64(tokens.sign(found).rpartition(".")[0])

    return Target(
        "lease-token", verify, (BadToken,), lambda: [encode(claims)], InputForm.JSON,
        ("scheduler/wire/lease_tokens.py",), "whoever presents a lease; signed by the cluster",
        "4,096 characters", encode=encode,
    )  # fmt: skip


def _frame_line() -> Target:
    async def frames(data: bytes) -> list[bytes]:
        line = FrameLine(_MOST_FRAME_BYTES)
        found: list[bytes] = []
        pumped = asyncio.ensure_future(line.pump(found.append))
        await asyncio.sleep(0)
        for at in range(0, len(data), 1 + len(data) // 3):
            line.data_received(data[at : at + 1 + len(data) // 3])
        line.eof_received()
        try:
            await pumped
        except LineBroken:
            return found
        raise AssertionError("a line that has ended is not pumped")

    def encode(found: list[bytes]) -> bytes:
        return b"".join(len(frame).to_bytes(4, "big") + frame for frame in found)

    seeds = [encode([b"ab", b"c" * 300]), encode([]), encode([b"x"]) + b"\xff\xff\xff\xff"]
    return Target(
        "frame-line", _in_loop(frames), (), lambda: seeds, InputForm.BINARY,
        ("common/frame_line.py",), "both ends of a stream of frames",
        "the line's own bound on a frame; memory as bytes arrive", encode=encode,
    )  # fmt: skip


def _upgrade() -> Target:
    """A server's answer to the request for a stream of frames, over a socket of this process."""

    async def answered(data: bytes) -> int:
        server = await asyncio.start_server(_Saying(data), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            line = await dial(f"http://127.0.0.1:{port}", "/nodes/n0/stream", {}, 1 << 10)
            line.abort()
        return 0

    seeds = [SWITCHED + b"\0\0\0\x01x", b"HTTP/1.1 307 Elsewhere\r\n\r\n", b"HTTP/1.1 101 \r\n\r\n"]
    return Target(
        "stream-upgrade", _in_loop(answered), (LineBroken, StreamRefused, OSError), lambda: seeds,
        InputForm.TEXT, ("common/stream_upgrade.py",), "whoever listens at a URL",
        "16 KiB of headers",
    )  # fmt: skip


class _Saying:
    """A server that says one thing to everyone."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self._data)
        writer.close()


def _in_loop(do: Callable[[bytes], Coroutine[Any, Any, T]]) -> Callable[[bytes], T]:
    return lambda data: asyncio.run(do(data))


def _in_base64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_base64(text: str) -> bytes:
    return urlsafe_b64decode(text + "==")
