"""Each kind of load is measured, in the process that it is about."""

import asyncio

from bench.emptied_workers import measured


def test_every_kind_of_load_has_a_time_when_it_is_measured() -> None:
    (times,) = asyncio.run(measured(1 << 20, rounds=1))

    assert all(0.0 < seconds < 60.0 for seconds in times)
