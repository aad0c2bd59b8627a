"""A scheduler reduced to its leadership, as a process: says what becomes of it, line by line.

It writes to the key `work` under its fence all the time, as a leader's keeper does.
"""

import asyncio
import logging
import sys

from scheduler.model.errors import Fenced, StoreUnavailable
from scheduler.service.leadership.election import Leadership
from scheduler.store.etcd_channel import EtcdSettings
from scheduler.store.etcd_store import EtcdStore


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def _lead(url: str, name: str) -> None:
    log = logging.getLogger(name)
    async with (
        EtcdStore(EtcdSettings((url,)), log) as store,
        Leadership(store, name, f"http://{name}", log) as leadership,
    ):
        _say(f"leads {await leadership.campaign()}")
        while not leadership.lost.is_set():
            try:
                await store.write({"work": name.encode()}, fence=leadership.fence)
            except Fenced:
                _say("fenced")
                leadership.doubt()
            except StoreUnavailable:
                _say("away")
            await asyncio.sleep(0.05)
        _say("lost")


asyncio.run(_lead(*sys.argv[1:]))
