"""How images are laid out, what names them, and what proves having them."""

import hashlib
import os
import struct
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from torch_shim.wire.image_digests import (
    NONCE_BYTES,
    PIECE_BYTES,
    FilePart,
    GrowingDigest,
    Storage,
    image_digest,
    lay_out,
    new_nonce,
    parts_of,
    possession_proof,
)


def plain_digest(storages: list[bytes], purpose: bytes = b"image") -> str:
    """The definition once more, in one thread."""
    table = lay_out(len(storage) for storage in storages)
    header = struct.pack("<3Q", 1, table.total_bytes, len(storages))
    for offset, size in table.storages:
        header += struct.pack("<2Q", offset, size)
    root = hashlib.sha256(b"gpufaas root of " + purpose + b"\0" + header)
    for storage in storages:
        for start in range(0, len(storage), PIECE_BYTES):
            piece = storage[start : start + PIECE_BYTES]
            start_of_piece = b"gpufaas piece of " + purpose + b"\0"
            root.update(hashlib.sha256(start_of_piece + piece).digest())
    return root.hexdigest()


def test_table_aligns_every_storage_and_the_end_to_64_bytes() -> None:
    table = lay_out([1, 64, 0, 65])
    assert table.storages == ((0, 1), (64, 64), (128, 0), (128, 65))
    assert table.total_bytes == 256


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [5], [3, 0, 7], [PIECE_BYTES], [PIECE_BYTES + 1, 9], [1000] * 50, [PIECE_BYTES] * 4],
)
def test_digest_is_the_documented_one_for_any_sizes(sizes: list[int]) -> None:
    storages = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    assert image_digest(storages) == plain_digest(storages)


def test_digest_is_the_same_from_memory_and_from_a_file(tmp_path: Path) -> None:
    sizes = [100, PIECE_BYTES + 13, 3]
    content = [os.urandom(size) for size in sizes]
    table = lay_out(sizes)
    file = tmp_path / "image"
    with file.open("w+b") as stream:
        for (offset, _), storage in zip(table.storages, content, strict=True):
            stream.seek(offset)
            stream.write(storage)
        stream.flush()
        from_file = image_digest(parts_of(stream.fileno(), table))
    assert from_file == image_digest([memoryview(bytearray(one)) for one in content])


def test_digest_differs_when_a_byte_or_a_boundary_differs() -> None:
    variants: list[list[Storage]] = [
        [b"ab", b"c"],
        [b"a", b"bc"],
        [b"ab", b"d"],
        [b"ab", b"c", b""],
        [b"c", b"ab"],
        [b"ab" + bytes(62) + b"c"],
    ]
    assert len({image_digest(variant) for variant in variants}) == len(variants)


def test_digest_refuses_a_file_that_ends_too_early(tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.write_bytes(b"abc")
    with file.open("rb") as stream, pytest.raises(EOFError):
        image_digest([FilePart(stream.fileno(), 0, 4)])


def test_proof_depends_on_nonce_and_every_piece_and_is_no_digest() -> None:
    storages = [bytes(10), b"x" * (PIECE_BYTES + 1)]
    other = [bytes(10), b"x" * PIECE_BYTES + b"y"]
    first, second = new_nonce(), new_nonce()
    answers = {
        possession_proof(storages, first),
        possession_proof(storages, second),
        possession_proof(other, first),
        image_digest(storages),
        image_digest(other),
    }
    assert len(answers) == 5


def test_proof_salts_every_piece_so_that_kept_digests_of_pieces_prove_nothing() -> None:
    storages = [bytes(10), b"x" * (PIECE_BYTES + 1)]
    nonce = new_nonce()
    expected = plain_digest(storages, b"proof of " + nonce.encode())
    assert possession_proof(storages, nonce) == expected


def test_digest_is_the_same_when_the_interpreter_ends_and_starts_no_threads() -> None:
    program = (
        "import atexit\n"
        "from torch_shim.wire.image_digests import PIECE_BYTES, image_digest\n"
        "storages = [bytes(PIECE_BYTES), bytes(PIECE_BYTES + 1)]\n"
        "print(image_digest(storages))\n"
        "atexit.register(lambda: print(image_digest(storages)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    before, at_the_end = done.stdout.split()
    assert before == at_the_end


def test_nonce_has_32_bytes() -> None:
    assert len(bytes.fromhex(new_nonce())) == NONCE_BYTES


def test_digest_of_a_growing_image_is_that_of_the_whole() -> None:
    images: tuple[list[int], ...] = (
        [],
        [0, 0],
        [1],
        [5, 0, 100],
        [3 << 20] * 7,
        [(20 << 20) + 1, 7, 9 << 20],
    )
    wrong = [
        (sizes, step, growing, whole)
        for sizes, step in product(images, (1 << 20, 3 * (1 << 20) + 64, 1 << 30))
        for growing, whole in [growing_and_whole(sizes, step)]
        if growing != whole
    ]
    assert wrong == []


def growing_and_whole(sizes: list[int], step: int) -> tuple[str, str]:
    """The digest of an image that arrives in pieces of this size, and that of the whole one."""
    storages = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    table = lay_out(sizes)
    memory = bytearray(table.total_bytes)
    with memoryview(memory) as view, GrowingDigest(view, table) as growing:
        content = bytearray(table.total_bytes)
        for (offset, size), storage in zip(table.storages, storages, strict=True):
            content[offset : offset + size] = storage
        for begin in range(0, table.total_bytes, step):
            memory[begin : begin + step] = content[begin : begin + step]
            growing.arrived(min(begin + step, table.total_bytes))

        return growing.result(), image_digest(storages)
