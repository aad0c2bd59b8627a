"""What workers learned of merging: kept on disk, void with other code, refused when damaged."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_manager.node.learned_merges import knowledge_files
from gpu_manager.node.learned_merges.knowledge_files import KnowledgeFiles, usual_basis
from gpu_manager.node.learned_merges.merge_knowledge import MergeKnowledge
from gpu_manager.worker.merging.known_merges import (
    MOST_FORBIDDEN,
    MOST_KNOWN,
    KnownMerges,
    KnownRecord,
    KnownSize,
)

MODEL, DEVICE, BASIS = "team/0123", "cuda h200, share 1", "torch 2, merging 1"
DIGEST = "d" * 64
SIZE = KnownSize(8, 2, 0.5, 1.0, 0.5, 0, 256, 7)


def record(number: int = 0, single_s: float = 0.25) -> KnownRecord:
    return KnownRecord(f"{number:064x}", single_s, (SIZE,))


def files(folder: Path, basis: str = BASIS) -> KnowledgeFiles:
    return KnowledgeFiles(folder / "merging", basis)


def written(folder: Path) -> Path:
    """The only file, of one record and one forbidden program."""
    known = KnownMerges(MODEL, DEVICE, {DIGEST: "differs"}, {record().name: record()})
    files(folder).write(known)
    (path,) = (folder / "merging").iterdir()
    return path


def test_knowledge_outlives_the_manager(tmp_path: Path) -> None:
    async def first() -> None:
        knowledge = MergeKnowledge(files(tmp_path))
        known = await knowledge.of(MODEL, DEVICE)
        knowledge.learn(known, [record()])
        knowledge.forbid(known, {DIGEST: "differs"})
        await knowledge.close()

    async def second() -> KnownMerges:
        return await MergeKnowledge(files(tmp_path)).of(MODEL, DEVICE)

    asyncio.run(first())
    found = asyncio.run(second())
    assert (found.records, found.never) == ({record().name: record()}, {DIGEST: "differs"})
    (path,) = (tmp_path / "merging").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "merging").stat().st_mode & 0o777 == 0o700


def test_knowledge_is_written_a_moment_later_without_a_close(tmp_path: Path) -> None:
    async def work() -> None:
        knowledge = MergeKnowledge(files(tmp_path))
        known = await knowledge.of(MODEL, DEVICE)
        knowledge.learn(known, [record()])
        while not files(tmp_path).read(MODEL, DEVICE).records:
            await asyncio.sleep(0.05)
        knowledge.learn(known, [record(1)])
        while len(files(tmp_path).read(MODEL, DEVICE).records) < 2:
            await asyncio.sleep(0.05)

    asyncio.run(work())


def test_workers_share_what_is_known_when_there_are_no_files() -> None:
    async def work() -> None:
        knowledge = MergeKnowledge()
        known = await knowledge.of(MODEL, DEVICE)
        knowledge.learn(known, [record()])
        assert (await knowledge.of(MODEL, DEVICE)) is known
        assert not (await knowledge.of(MODEL, "another GPU")).records
        assert not (await knowledge.of("rivals/0123", DEVICE)).records
        await knowledge.close()

    asyncio.run(work())


def test_knowledge_is_void_when_torch_or_our_code_is_another(tmp_path: Path) -> None:
    written(tmp_path)
    found = files(tmp_path, "torch 3, merging 1").read(MODEL, DEVICE)
    assert not found.records
    assert not found.never


def test_the_basis_names_torch_and_our_code() -> None:
    torch, merging = usual_basis().split(", ")
    assert torch.startswith("torch 2")
    assert merging.startswith("merging ")
    assert usual_basis() == usual_basis()


def _foreign(path: Path) -> None:
    path.write_text('{"somebody": "else"}')


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _huge(path: Path) -> None:
    path.write_bytes(b" " * ((1 << 20) + 1))


def _deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def _of_another_model(path: Path) -> None:
    path.write_text(path.read_text().replace(MODEL, "rivals/0123"))


def _linked(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _absurd_number(path: Path) -> None:
    path.write_text(path.read_text().replace("256.0", "-1.0"))


def _absurd_reason(path: Path) -> None:
    path.write_text(path.read_text().replace("differs", "because"))


def _too_many(path: Path) -> None:
    found = json.loads(path.read_text())
    found["never"] = {f"{number:064x}": "differs" for number in range(MOST_FORBIDDEN + 1)}
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    "damage",
    [
        *(_foreign, _truncated, _huge, _deep, _of_another_model, _linked, _pipe),
        *(_absurd_number, _absurd_reason, _too_many),
    ],
)
def test_a_file_is_refused_and_begun_anew_when_it_is_damaged_or_not_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    path = written(tmp_path)
    damage(path)
    found = files(tmp_path).read(MODEL, DEVICE)
    assert not found.records
    assert not found.never
    assert "anew" in caplog.text
    found.learn([record(5)])
    files(tmp_path).write(found)
    assert list(files(tmp_path).read(MODEL, DEVICE).records) == [record(5).name]


def test_files_are_bounded_in_number_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knowledge_files, "_MOST_FILES", 3)
    for number in range(6):
        files(tmp_path).write(KnownMerges(f"model{number}", DEVICE, {}, {record().name: record()}))
    kept = [bool(files(tmp_path).read(f"model{each}", DEVICE).records) for each in range(6)]
    assert kept == [False, False, False, True, True, True]
    monkeypatch.setattr(knowledge_files, "_MOST_BYTES", 1)
    (tmp_path / "merging" / "half.aside").write_text("a crash left it")
    files(tmp_path).write(KnownMerges("last", DEVICE))
    assert not list((tmp_path / "merging").iterdir())


def test_records_of_a_model_are_bounded_and_the_oldest_leave() -> None:
    known = KnownMerges()
    known.learn(map(record, range(MOST_KNOWN)))
    known.learn([record(0, 0.5), record(MOST_KNOWN)])
    assert len(known.records) == MOST_KNOWN
    assert record(0).name in known.records
    assert record(1).name not in known.records


def test_no_forbidden_program_leaves_when_there_are_too_many() -> None:
    known = KnownMerges()
    assert known.forbid((f"{number:064x}", "differs") for number in range(2 * MOST_FORBIDDEN))
    assert not known.forbid([("f" * 64, "differs")])
    assert f"{0:064x}" in known.never
    assert known.is_closed


def test_the_manager_goes_on_when_the_disk_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "merging").write_text("a file where the folder should be")
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        files_here = files(tmp_path)
        files_here.write(KnownMerges(MODEL, DEVICE))
        files_here.write(KnownMerges(MODEL, DEVICE))
    assert caplog.text.count("ends with us") == 3
