"""What functions ask of a manager about weights: offers, proofs, uploads, and what others see."""

import os
from pathlib import Path

import pytest

from common.addresses import TcpAddress, UnixAddress
from gpu_manager.weights.sealed_images import ImageWriter
from tests.kit.fakes.sealed_images import open_images
from tests.kit.nodes.manager_client import (
    ManagerClient,
    closed,
    manager,
    refusal,
    weights,
)
from tests.kit.waiting import PATIENCE_S, eventually
from torch_shim.wire.image_digests import image_digest, lay_out, pack_sizes, parts_of
from torch_shim.wire.protocol import MAX_STORAGES, FrameKind

pytestmark = pytest.mark.timeout(180, func_only=True)

LOCALHOST = TcpAddress("127.0.0.1", 0)


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


async def test_function_needs_no_further_proof_when_one_of_its_processes_has_the_weights() -> None:
    async with manager() as it:
        image = weights(os.urandom(1000))
        await (await it.client("first")).upload(image)
        another = await it.client("first")

        offered, _ = await another.ask(FrameKind.OFFER, {"digest": image.digest})
        _, (copy,) = await another.ask(FrameKind.PROVE, {"digest": image.digest})

        assert offered == {"have": True, "yours": True}
        assert os.pread(copy, 1000, 0) == image.content
        os.close(copy)
        wrong = {"digest": image.digest, "proof": "0" * 64}
        assert await refusal(another.ask(FrameKind.PROVE, wrong)) == "weights refused"
        image.close()


@pytest.mark.parametrize(("function", "tenant"), [("second", "team"), ("first", "other")])
async def test_right_to_weights_is_of_no_use_to_another_function(
    function: str, tenant: str
) -> None:
    async with manager() as it:
        image = weights(os.urandom(1000))
        await (await it.client("first", tenant="team")).upload(image)
        other = await it.client(function, tenant=tenant)

        offered, _ = await other.ask(FrameKind.OFFER, {"digest": image.digest})

        assert "yours" not in offered
        asked = other.ask(FrameKind.PROVE, {"digest": image.digest})
        assert await refusal(asked) == "unknown model"
        assert await refusal(other.acquire(image.digest)) == "unknown model"
        image.close()


async def test_right_to_weights_ends_when_the_function_forgets_them() -> None:
    async with manager() as it:
        image = weights(os.urandom(1000))
        first, fellow = await it.client("first"), await it.client("second")
        await first.upload(image)
        await fellow.upload(image)
        await first.tell(FrameKind.FORGET, {"digest": image.digest})

        assert (await first.ask(FrameKind.OFFER, {"digest": image.digest}))[0] == {"have": True}
        asked = first.ask(FrameKind.PROVE, {"digest": image.digest})
        assert await refusal(asked) == "unknown model"
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
        assert (await other.ask(FrameKind.OFFER, {"digest": image.digest}))[0]["have"]
        await other.tell(FrameKind.FORGET, {"digest": image.digest})
        assert (await other.ask(FrameKind.OFFER, {"digest": image.digest}))[0] == {"have": False}

        assert open_images() == images - 1
        image.close()


async def test_client_is_hung_up_on_when_a_body_comes_without_an_upload() -> None:
    async with manager() as it:
        client = await it.client()
        piece = {"digest": "0" * 64, "offset": 0, "last": False}
        await client.tell(FrameKind.CHUNK, piece, bytes(10))
        assert await closed(client)


async def test_upload_in_pieces_ends_when_no_piece_comes(tmp_path: Path) -> None:
    listen = (UnixAddress(str(tmp_path / "node.sock")), LOCALHOST)
    async with manager(listen=listen) as it:
        incoming = it.node.manager.library.incoming
        incoming.of_a_connection, incoming.of_a_tenant = 2, 3
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
        incoming.silence_s = 0.1  # from the next piece of each
        for client, number in ((one, 1), (one, 2), (other, 4)):
            piece = {"digest": f"{number:064x}", "offset": 0, "last": False}
            await client.ask(FrameKind.CHUNK, piece, b"x")
        await eventually(lambda: not incoming.counts, "the uploads end")
        incoming.silence_s, incoming.of_a_tenant = PATIENCE_S, 1
        await begin(other, 5)
        other.close()
        await eventually(lambda: not incoming.counts, "the upload ends with its connection")
        await begin(one, 6)


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
        begun = await client.answer()
        piece = {"digest": image.digest, "offset": 0, "last": False}
        await client.stream.send(FrameKind.CHUNK, [8, piece], [image.content[:60_000]])
        last = {"digest": image.digest, "offset": 60_000, "last": True}
        rest = image.content[60_000:] + bytes(image.table.total_bytes - 100_000)

        await client.stream.send(FrameKind.CHUNK, [9, last], [rest])

        frames = [begun, *[await client.answer() for _ in range(2)]]
        assert [frame.kind for frame in frames] == [FrameKind.ANSWER] * 3
        assert [frame.meta for frame in frames] == [(7, {}), (8, {}), (9, {"digest": image.digest})]
        answer, ends = await client.acquire(image.digest)
        assert ends == []
        assert answer["fresh"] == list(answer["workers"].values())
        image.close()
