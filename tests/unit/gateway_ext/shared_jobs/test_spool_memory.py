"""A body on its way into a queue is freed with its spool, also without a collector."""

import weakref
from pathlib import Path

import pytest

from gateway_ext.jobs.sqlite.body_files import FileSpool
from gateway_ext.shared_jobs.bodies import ScratchSpool
from tests.kit.without_collector import without_collector


@pytest.mark.parametrize("kind", [FileSpool, ScratchSpool])
async def test_spool_is_freed_once_nobody_has_it(
    tmp_path: Path, kind: type[FileSpool] | type[ScratchSpool]
) -> None:
    with without_collector():
        spool = kind(tmp_path, 100, 1_000)
        await spool.write(bytes(50))
        there = weakref.ref(spool)
        del spool
        assert there() is None
