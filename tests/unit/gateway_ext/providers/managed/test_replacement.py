"""A replica replaces what has died: at once after a long life, else after growing pauses."""

import asyncio
import errno
from itertools import pairwise
from pathlib import Path

from gateway_ext.model import Endpoint, FunctionId
from gateway_ext.providers.managed.logs.function_log import FunctionLog
from gateway_ext.providers.managed.managed_settings import ManagedSettings
from gateway_ext.providers.managed.replica import Replica, ReplicaContext
from tests.kit.virtual_time import until, virtually

_SETTINGS = ManagedSettings(first_pause_s=0.5, longest_pause_s=60.0)
_LONG_S, _SHORT_S = 100.0, 1.0


class MortalInstance:
    """An instance that is ready at once, and dies of itself after a time."""

    name = "f-1"
    endpoint = Endpoint("f-1", "unix:/nowhere")

    def __init__(self, lives_s: float) -> None:
        self.ready = True
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(lives_s, self.kill, "died")

    async def collect_output(self) -> None:
        await asyncio.shield(self.exited)

    async def until_ready(self, within_s: float) -> bool:
        del within_s
        return self.ready

    async def stop(self, within_s: float) -> None:
        del within_s
        self.kill("was stopped")

    def kill(self, why: str) -> None:
        if not self.exited.done():
            self.exited.set_result(why)


class UncollectedInstance(MortalInstance):
    """One of which the output cannot be collected."""

    async def collect_output(self) -> None:
        await super().collect_output()
        raise OSError(errno.EMFILE, "Too many open files")


async def _pauses(
    lives_s: list[float], folder: Path, kind: type[MortalInstance] = MortalInstance
) -> list[float]:
    """The seconds between the end of each instance and the start of the next one."""
    loop = asyncio.get_running_loop()
    starts: list[float] = []

    async def make() -> MortalInstance:
        starts.append(loop.time())
        return kind([*lives_s, 1_000.0][len(starts) - 1])

    log = FunctionLog(FunctionId("n", "f"), folder, 1 << 20)
    replica = Replica(ReplicaContext(lambda: None, log, _SETTINGS), make)
    await until(sum(lives_s) + 300.0)
    await replica.stop()
    log.close()
    assert len(starts) == len(lives_s) + 1
    return [
        later - earlier - lived
        for (earlier, later), lived in zip(pairwise(starts), lives_s, strict=True)
    ]


@virtually
async def test_instance_is_replaced_at_once_when_it_has_lived_long(tmp_path: Path) -> None:
    assert await _pauses([_LONG_S, _LONG_S], tmp_path) == [0.0, 0.0]


@virtually
async def test_pauses_grow_when_instances_die_early(tmp_path: Path) -> None:
    assert await _pauses([_SHORT_S] * 3, tmp_path) == [0.5, 1.0, 2.0]


@virtually
async def test_pauses_begin_anew_when_one_has_lived_long(tmp_path: Path) -> None:
    lives_s = [_SHORT_S, _SHORT_S, _LONG_S, _SHORT_S, _SHORT_S]
    assert await _pauses(lives_s, tmp_path) == [0.5, 1.0, 0.0, 0.5, 1.0]


@virtually
async def test_instance_is_replaced_when_its_output_cannot_be_collected(tmp_path: Path) -> None:
    assert await _pauses([_SHORT_S] * 2, tmp_path, UncollectedInstance) == [0.5, 1.0]
