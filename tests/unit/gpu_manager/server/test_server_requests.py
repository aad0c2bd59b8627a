"""What functions ask of a manager: weights, leases, channels."""

import asyncio
import os
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB
from common.addresses import TcpAddress, UnixAddress
from gpu_manager.node.leases_in_force import LeaseTimes
from gpu_manager.sessions.incoming_images import IncomingLimits
from gpu_manager.weights.sealed_images import ImageWriter
from testbed.nodes.manager_client import (
    ManagerClient,
    ManagerRefused,
    closed,
    manager,
    refusal,
    weights,
)
from tests.kit.fakes.sealed_images import open_images
from tests.kit.waiting import eventually
from torch_shim.wire.image_digests import image_digest, lay_out, pack_sizes, parts_of
from torch_shim.wire.protocol import MAX_STORAGES, FrameKind

pytestmark = pytest.mark.timeout(20, func_only=True)

LOCALHOST = TcpAddress("127.0.0.1", 0)


# -- weights ------------------------------------------------------------------------------------


async def test_weights_are_uploaded_once_when_a_second_function_proves_that_it_has_them() -> None:
    async with manager() as it:
        image = weights(os.urandom(100_000))
        first, second = await it.client("first"), await it.client("second")
        assert (await first.ask(FrameKind.OFFER, image.offer))[0] == {"have": False}
        await first.upload(image)
        assert (await second.ask(FrameKind.OFFER, image.offer))[0] == {"have": True}

        proof = {"digest": image.digest, "proof": image.proof(second.welcome["nonce"])}
        answer, (copy,) = await second.ask(FrameKind.PROVE, proof)

        assert answer == {}
        assert os.pread(copy, 100_000, 0) == image.content
        with pytest.raises(PermissionError):
            os.pwrite(copy, b"x", 0)
        os.close(copy)
        image.close()


async def test_weights_are_refused_when_the_proof_is_another_sessions() -> None:
    async with manager() as it:
        image = weights(b"secret")
        first, second = await it.client("first"), await it.client("second")
        await first.upload(image)

        proof = {"digest": image.digest, "proof": image.proof(first.welcome["nonce"])}
        assert await refusal(second.ask(FrameKind.PROVE, proof)) == "weights refused"
        assert await refusal(second.acquire(image.digest)) == "unknown model"
        image.close()


async def test_weights_count_as_absent_when_only_another_tenant_has_them() -> None:
    async with manager() as it:
        image = weights(os.urandom(1000))
        await (await it.client("first")).upload(image)
        stranger = await it.client("first", tenant="other")
        right = image.proof(stranger.welcome["nonce"])

        assert (await stranger.ask(FrameKind.OFFER, {"digest": image.digest}))[0] == {"have": False}
        for proof in (right, "0" * 64):
            asked = stranger.ask(FrameKind.PROVE, {"digest": image.digest, "proof": proof})
            assert await refusal(asked) == "unknown model"

        await stranger.upload(image)
        fellow = await it.client("second", tenant="other")
        assert (await fellow.ask(FrameKind.OFFER, {"digest": image.digest}))[0] == {"have": True}
        image.close()


async def test_upload_is_refused_when_its_sizes_are_not_those_of_the_image() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client()
        for sizes, total in (
            (b"\1" * 7, 64),
            (bytes(8), 64),
            ((5).to_bytes(8, "little"), 65),
            ((1 << 63).to_bytes(8, "little") * 3, 64),
            ("sizes", 64),
        ):
            fields = {"digest": image.digest, "sizes": sizes, "total": total}
            asked = client.ask(FrameKind.UPLOAD, fields, descriptors=[image.descriptor])
            assert await refusal(asked) == "weights refused"
        image.close()


async def test_thousands_of_storages_are_taken_when_their_sizes_are_packed() -> None:
    async with manager() as it:
        table = lay_out([1] * MAX_STORAGES)
        writer = ImageWriter(table)
        writer.write(bytes(table.total_bytes))
        descriptor = writer.seal()
        digest = image_digest(parts_of(descriptor, table))
        fields = {"digest": digest, "sizes": pack_sizes(table), "total": table.total_bytes}

        answer, _ = await (await it.client()).ask(
            FrameKind.UPLOAD, fields, descriptors=[descriptor]
        )

        assert answer == {"digest": digest}
        os.close(descriptor)


async def test_image_is_gone_when_its_last_function_forgets_it() -> None:
    async with manager() as it:
        image = weights(os.urandom(1000))
        one, other = await it.client("first"), await it.client("second")
        for client in (one, other):
            await client.upload(image)
        images = open_images()

        await one.tell(FrameKind.FORGET, {"digest": image.digest})
        assert (await other.ask(FrameKind.OFFER, {"digest": image.digest}))[0] == {"have": True}
        await other.tell(FrameKind.FORGET, {"digest": image.digest})
        assert (await other.ask(FrameKind.OFFER, {"digest": image.digest}))[0] == {"have": False}

        assert open_images() == images - 1
        image.close()


async def test_upload_in_pieces_ends_when_no_piece_comes(tmp_path: Path) -> None:
    listen = (UnixAddress(str(tmp_path / "node.sock")), LOCALHOST)
    async with manager(listen=listen) as it:
        incoming = it.node.manager.library.incoming
        incoming.limits = IncomingLimits(of_a_connection=2, of_a_tenant=3, silence_s=0.05)
        one, other = await it.client(tcp=True), await it.client("second", tcp=True)
        fields = {"sizes": (64).to_bytes(8, "little"), "total": 64}

        async def begin(client: ManagerClient, number: int) -> None:
            await client.ask(FrameKind.UPLOAD, fields | {"digest": f"{number:064x}"})

        await begin(one, 1)
        await begin(one, 2)
        assert await refusal(begin(one, 2)) == "not allowed"
        assert await refusal(begin(one, 3)) == "not allowed"
        await begin(other, 4)
        assert await refusal(begin(other, 5)) == "not allowed"
        await eventually(lambda: not incoming.counts, "the uploads end")
        await begin(other, 5)


async def test_model_is_unknown_when_another_function_uploaded_it() -> None:
    async with manager() as it:
        image = weights(b"secret")
        await (await it.client("first")).upload(image)

        for tenant, function in (("team", "second"), ("other", "first")):
            client = await it.client(function, tenant)
            assert await refusal(client.acquire(image.digest)) == "unknown model"
        image.close()


async def test_upload_is_refused_when_it_is_not_what_was_announced() -> None:
    async with manager() as it:
        image, other = weights(b"a" * 100), weights(b"b" * 100)
        client = await it.client()

        upload = client.ask(FrameKind.UPLOAD, other.offer, descriptors=[image.descriptor])

        assert await refusal(upload) == "weights refused"
        assert await refusal(client.acquire(image.digest)) == "unknown model"
        image.close()
        other.close()


async def test_upload_is_refused_when_its_memory_could_still_change() -> None:
    async with manager() as it:
        image = weights(b"a" * 100)
        client = await it.client()
        open_memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(open_memory, image.table.total_bytes)

        upload = client.ask(FrameKind.UPLOAD, image.offer, descriptors=[open_memory])

        assert await refusal(upload) == "weights refused"
        os.close(open_memory)
        image.close()


async def test_weights_come_in_pieces_when_the_client_is_elsewhere(tmp_path: Path) -> None:
    listen = (UnixAddress(str(tmp_path / "node.sock")), LOCALHOST)
    async with manager(listen=listen) as it:
        image = weights(os.urandom(100_000))
        client = await it.client(tcp=True)
        assert client.welcome["local"] is False
        await client.stream.send(FrameKind.UPLOAD, [7, image.offer])
        piece = {"digest": image.digest, "offset": 0, "last": False}
        await client.stream.send(FrameKind.CHUNK, [8, piece], [image.content[:60_000]])
        last = {"digest": image.digest, "offset": 60_000, "last": True}
        rest = image.content[60_000:] + bytes(image.table.total_bytes - 100_000)

        await client.stream.send(FrameKind.CHUNK, [9, last], [rest])

        frames = [await client.answer() for _ in range(3)]
        assert [frame.kind for frame in frames] == [FrameKind.ANSWER] * 3
        assert [frame.meta for frame in frames] == [[7, {}], [8, {}], [9, {"digest": image.digest}]]
        answer, ends = await client.acquire(image.digest)
        assert ends == []
        assert answer["fresh"] == list(answer["workers"].values())
        image.close()


# -- leases -------------------------------------------------------------------------------------


async def test_lease_comes_with_a_channel_to_its_worker() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client(session="me")
        await client.upload(image)

        answer, (channel,) = await client.acquire(image.digest)

        worker = it.runtime.hosted[0]
        assert answer["workers"] == {image.digest: worker.id}
        assert answer["hit"] is False
        assert worker.admitted == {answer["lease"]}
        assert worker.holders == {answer["lease"]: "team/function/me"}
        (served,) = worker.channels
        assert served[:2] == ("team/function/me", "function")
        channel.sendall(b"hello")
        assert served[2].recv(5) == b"hello"
        channel.close()
        image.close()


async def test_lease_is_joined_when_the_session_holds_one_already() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client(session="me")
        await client.upload(image)
        first, (one,) = await client.acquire(image.digest)
        worker = first["workers"][image.digest]

        again, (two,) = await client.acquire(image.digest)
        known, none = await client.acquire(image.digest, workers=[worker])

        assert first["lease"] == again["lease"] == known["lease"]
        assert known["fresh"] == none == []
        for end in (one, two):
            end.close()
        image.close()


async def test_lease_is_waited_for_when_another_session_holds_the_gpu() -> None:
    times = LeaseTimes(first_call_s=30.0)
    async with manager(leases=times) as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        first, ends = await one.acquire(image.digest)
        waiting = asyncio.ensure_future(other.acquire(image.digest))
        await asyncio.sleep(0.05)
        assert not waiting.done()

        await one.tell(FrameKind.RELEASE, {"lease": first["lease"]})

        second, more = await waiting
        assert second["hit"] is True
        assert second["lease"] != first["lease"]
        assert await one.hint() == first["lease"]
        assert it.runtime.hosted[0].admitted == {second["lease"]}
        for end in [*ends, *more]:
            end.close()
        image.close()


async def test_lease_is_left_alone_when_another_session_releases_it() -> None:
    async with manager() as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        answer, (end,) = await one.acquire(image.digest)

        await other.tell(FrameKind.RELEASE, {"lease": answer["lease"]})
        assert (await other.ask(FrameKind.OFFER, image.offer))[0] == {"have": True}

        assert it.runtime.hosted[0].admitted == {answer["lease"]}
        end.close()
        image.close()


async def test_everything_of_a_session_is_gone_when_its_last_connection_is() -> None:
    async with manager() as it:
        image = weights(b"model")
        one, other = await it.client(session="me"), await it.client(session="me")
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)

        one.close()
        await other.ask(FrameKind.OFFER, image.offer)
        assert len(it.node.manager.node.leases) == 1
        other.close()
        await eventually(lambda: not len(it.node.manager.node.leases), "its lease ends")

        assert it.runtime.hosted[0].admitted == set()
        end.close()
        image.close()


async def test_request_is_cancelled_when_its_client_goes_away() -> None:
    times = LeaseTimes(first_call_s=30.0)
    async with manager(leases=times) as it:

        def waiting() -> int:
            status = it.node.status()
            return status.waiting_locally + status.waiting

        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)
        asking = asyncio.ensure_future(other.acquire(image.digest))
        await eventually(waiting, "the other one waits")

        asking.cancel()
        other.close()

        await eventually(lambda: not waiting(), "nobody waits")
        end.close()
        image.close()


async def test_acquire_is_refused_when_no_gpu_is_large_enough() -> None:
    async with manager(gpu_mib=64) as it:
        image = weights(b"model")
        client = await it.client()
        await client.upload(image)

        with pytest.raises(ManagerRefused) as refused:
            await client.acquire(image.digest)

        assert refused.value.failure == "too large for any GPU"
        assert refused.value.facts["largest_bytes"] == 64 * MIB
        image.close()


async def test_acquire_is_refused_when_its_deadline_passes() -> None:
    times = LeaseTimes(first_call_s=30.0)
    async with manager(leases=times) as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)

        assert await refusal(other.acquire(image.digest, deadline_s=0.05)) == "deadline passed"
        end.close()
        image.close()


async def test_worker_is_replaced_when_it_died_between_two_calls() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client()
        await client.upload(image)
        first, (one,) = await client.acquire(image.digest)
        it.runtime.hosted[0].die("killed")
        assert await client.hint() == first["lease"]

        second, (two,) = await client.acquire(image.digest)

        assert second["workers"] != first["workers"]
        assert one.recv(1) == b""
        for end in (one, two):
            end.close()
        image.close()


# -- channels from other nodes ------------------------------------------------------------------


async def test_channel_is_relayed_when_the_client_is_elsewhere(tmp_path: Path) -> None:
    listen = (UnixAddress(str(tmp_path / "node.sock")), LOCALHOST)
    async with manager(listen=listen) as it:
        image = weights(b"model")
        await (await it.client()).upload(image)
        client = await it.client(session="far", tcp=True)
        answer, _ = await client.acquire(image.digest)
        loop = asyncio.get_running_loop()

        channel = await it.stranger(str(it.node.addresses[1]))
        await channel.hello(it.credential(), "far", role="channel", worker=answer["fresh"][0])

        (session, _, served) = it.runtime.hosted[0].channels[0]
        served.setblocking(False)
        assert session == "team/function/far"
        sent = os.urandom(3 * MIB)
        sending = asyncio.ensure_future(loop.sock_sendall(channel.stream.socket, sent))
        got = b""
        while len(got) < len(sent):
            got += await loop.sock_recv(served, 1 << 20)
        await sending
        assert got == sent
        await loop.sock_sendall(served, b"answer")
        assert await loop.sock_recv(channel.stream.socket, 10) == b"answer"
        channel.close()
        assert await loop.sock_recv(served, 1) == b""
        image.close()


async def test_channel_is_refused_when_the_worker_is_another_functions() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client()
        await client.upload(image)
        answer, (end,) = await client.acquire(image.digest)
        worker = answer["workers"][image.digest]

        for tenant, function, name in (
            ("team", "second", worker),
            ("other", "function", worker),
            ("team", "function", "worker-99"),
        ):
            thief = await it.stranger()
            credential = it.credential(function, tenant)
            hello = thief.hello(credential, role="channel", worker=name)
            assert await refusal(hello) in {"not allowed", "worker lost"}
            assert await closed(thief)
        assert len(it.runtime.hosted[0].channels) == 1
        end.close()
        image.close()
