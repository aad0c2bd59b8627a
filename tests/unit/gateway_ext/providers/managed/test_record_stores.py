"""State folders of both providers that manage functions: read back, cleaned up, refused."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.providers.docker.container_spec import Release, ReleaseRecord
from gateway_ext.providers.managed.records import RecordStore
from gateway_ext.providers.process.builds import BuildRecord, BuildStore

F = FunctionId("openfaas-fn", "f")
NOW = datetime(2026, 1, 2, tzinfo=UTC)

Make = Callable[[Path], Any]


def build_record(folder: Path) -> BuildRecord:
    return BuildRecord(Deployment(F, "f:1"), folder, "build-1", NOW, 2, None)


def release_record(folder: Path) -> ReleaseRecord:
    return ReleaseRecord(Release("1", Deployment(F, "f:1"), None, ""), None, folder, NOW, 2)


def release_store(folder: Path) -> RecordStore[ReleaseRecord]:
    return RecordStore(folder, ReleaseRecord)


both = pytest.mark.parametrize(
    ("kind", "record_in"), [(BuildStore, build_record), (release_store, release_record)]
)


@both
def test_record_is_read_back_and_a_forgotten_ones_folder_is_deleted(
    tmp_path: Path, kind: Callable[[Path], RecordStore[Any]], record_in: Make
) -> None:
    store = kind(tmp_path)
    assert store.open() == []
    kept, forgotten = (record_in(store.new_folder(F)) for _ in range(2))
    store.save(kept)
    store.save(forgotten)
    store.forget(forgotten)
    store.give_back()
    again = kind(tmp_path)
    assert again.open() == [kept]
    assert not forgotten.folder.exists()
    again.give_back()


@both
def test_damaged_record_is_refused(
    tmp_path: Path, kind: Callable[[Path], RecordStore[Any]], record_in: Make
) -> None:
    store = kind(tmp_path)
    store.open()
    record = record_in(store.new_folder(F))
    store.save(record)
    store.give_back()
    (record.folder / "record.json").write_text("{}")
    again = kind(tmp_path)
    with pytest.raises(ProviderFailed, match=r"record\.json is damaged"):
        again.open()
    again.give_back()
