"""A replica replaces what has died: at once after a long life, else after growing pauses."""

import asyncio
import errno
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from gateway_ext.model import FunctionId, LogLine, SlowStart
from gateway_ext.ports import LogQuery
from gateway_ext.providers.managed.logs import FunctionLog, StartOutput
from gateway_ext.providers.managed.replicas import ManagedSettings, Replica
from tests.kit.virtual_time import until, virtually
from tests.unit.gateway_ext.providers.managed.managed_world import MadeVersion, MortalInstance

_SETTINGS = ManagedSettings(first_pause_s=0.5, longest_pause_s=60.0)
_LONG_S, _SHORT_S = 100.0, 1.0


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
    replica = Replica(MadeVersion(log, make, _SETTINGS))
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
async def test_pauses_stay_short_when_instances_were_ready(tmp_path: Path) -> None:
    assert await _pauses([_SHORT_S] * 6, tmp_path) == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


@virtually
async def test_pauses_begin_anew_when_one_has_lived_long(tmp_path: Path) -> None:
    lives_s = [_SHORT_S, _SHORT_S, _LONG_S, _SHORT_S, _SHORT_S]
    assert await _pauses(lives_s, tmp_path) == [0.5, 1.0, 0.0, 0.5, 1.0]


@virtually
async def test_instance_is_replaced_when_its_output_cannot_be_collected(tmp_path: Path) -> None:
    assert await _pauses([_SHORT_S] * 2, tmp_path, UncollectedInstance) == [0.5, 1.0]


# -- starts that fail ----------------------------------------------------------------------------


class StartingInstance(MortalInstance):
    """An instance that writes some lines, and ends in this way before it is ready, or after it."""

    def __init__(
        self, log: FunctionLog, name: str, why: str, *lines: str, ready: bool, lives_s: float
    ) -> None:
        super().__init__(lives_s if ready else _LONG_S)
        self.name = name
        self.ready = ready
        self._log = log
        self._way = why
        self._lines = lines

    async def until_ready(self, within_s: float) -> bool:
        del within_s
        for line in self._lines:
            self._log.write(self.name, line)
        if not self.ready:
            await asyncio.sleep(_SHORT_S)
            self.kill(self._way)
        return self.ready


class Starts:
    """A replica whose instances end as they are told here; the last way goes on for ever."""

    def __init__(self, folder: Path, *ways: tuple[str, bool, tuple[str, ...]]) -> None:
        self.log = FunctionLog(FunctionId("n", "f"), folder, 1 << 20)
        self._ways = ways
        self.lives_s = [_SHORT_S]  # of those that were ready; the last one of all later ones
        self._count = 0
        self.broken: list[str] = []
        self.version = MadeVersion(self.log, self.make, _SETTINGS, self._note)
        self.replica = Replica(self.version)

    async def lines(self) -> list[str]:
        return [line.text async for line in self.log.read(LogQuery(FunctionId("n", "f")))]

    async def end(self) -> None:
        await self.replica.stop()
        self.log.close()

    def _note(self) -> None:
        if not self.broken or self.broken[-1] != self.replica.broken:
            self.broken.append(self.replica.broken)

    async def make(self) -> MortalInstance:
        why, ready, lines = self._ways[min(self._count, len(self._ways) - 1)]
        lives_s = self.lives_s[min(self._count, len(self.lives_s) - 1)]
        self._count += 1
        name = f"f-{self._count}"
        return StartingInstance(self.log, name, why, *lines, ready=ready, lives_s=lives_s)


FAILS = ("exited with status 1", False, ("Traceback", "ValueError: no"))
WELL = ("exited with status 1", True, ("it runs",))


@virtually
async def test_replica_is_broken_as_soon_as_its_program_ends_before_it_is_ready(
    tmp_path: Path,
) -> None:
    starts = Starts(tmp_path, FAILS)
    await until(1.4)
    assert starts.broken[-1] == f"it {FAILS[0]}; last words: ValueError: no"
    await starts.end()


@virtually
async def test_replica_is_no_longer_broken_when_a_start_succeeds(tmp_path: Path) -> None:
    starts = Starts(tmp_path, FAILS, WELL)
    await until(2.0)
    assert starts.broken[-1] == ""
    await starts.end()


@virtually
async def test_replica_is_waited_for_when_it_was_ready_before_or_others_ended_it_once(
    tmp_path: Path,
) -> None:
    killed = ("was ended by SIGKILL", False, ())
    starts = Starts(tmp_path, WELL, killed, WELL, killed, killed)
    await until(4.0)
    assert starts.broken == [""]
    await until(20.0)
    assert starts.broken[-1] == "it was ended by SIGKILL", "twice, without being ready in between"
    await starts.end()


@virtually
async def test_log_has_what_a_failing_start_writes_once_and_then_how_often(tmp_path: Path) -> None:
    starts = Starts(tmp_path, FAILS)
    await until(12.0)
    lines = await starts.lines()
    assert lines[:2] == list(FAILS[2])
    again = f"this instance {FAILS[0]} ({{}} times), in the same way as before; last words: {{}}"
    assert lines[2:5] == [
        f"this instance {FAILS[0]}; the next one starts in 0.5 s",
        f"{again.format(2, 'ValueError: no')}; the next one starts in 1 s",
        f"{again.format(3, 'ValueError: no')}; the next one starts in 2 s",
    ]
    await starts.end()


@virtually
async def test_log_has_all_that_a_start_writes_when_it_differs_from_the_one_before(
    tmp_path: Path,
) -> None:
    other = ("exited with status 1", False, ("Traceback", "KeyError: 1"))
    shorter = ("exited with status 1", False, ("Traceback",))
    starts = Starts(tmp_path, FAILS, other, shorter, WELL)
    await until(8.0)
    written = [line for line in await starts.lines() if not line.startswith("this instance")]
    assert written == [*FAILS[2], *other[2], *shorter[2], *WELL[2]]
    await starts.end()


@virtually
async def test_replica_is_dying_from_its_third_death_until_an_instance_has_lived_long(
    tmp_path: Path,
) -> None:
    starts = Starts(tmp_path, *[WELL] * 3, ("died", True, ()))
    starts.lives_s = [_SHORT_S] * 3 + [1_000.0]
    await until(3.0)
    assert starts.replica.dying == ""
    await until(10.0)
    assert starts.replica.dying == "died (3 times); last words: it runs"
    assert starts.replica.trouble == starts.replica.dying
    await until(80.0)
    assert (starts.replica.dying, starts.replica.trouble) == ("", "")
    await starts.end()


@virtually
async def test_log_says_once_that_a_start_takes_long_and_since_when_is_known(
    tmp_path: Path,
) -> None:
    loop = asyncio.get_running_loop()
    waits: list[asyncio.Future[MortalInstance]] = []

    async def make() -> MortalInstance:
        waits.append(loop.create_future())
        return await waits[-1]

    log = FunctionLog(FunctionId("n", "f"), tmp_path, 1 << 20)
    changes: list[float] = []
    replica = Replica(MadeVersion(log, make, _SETTINGS, lambda: changes.append(loop.time())))
    await until(9.0)
    assert (replica.slow, replica.trouble) == (None, "")
    await until(11.0)
    slow = SlowStart("its module is still being imported", changes[0] - 10.0)
    text = "its module is still being imported after 10 s"
    assert (replica.slow, replica.trouble) == (slow, text)
    waits[0].set_exception(OSError("no"))
    await until(30.0)
    assert replica.slow is not None, "the next start takes long, too"
    assert [line.text async for line in log.read(LogQuery(log.function))] == [
        text,
        "this instance cannot be started: no; the next one starts in 0.5 s",
    ]
    waits[1].set_result(MortalInstance(_LONG_S))
    await until(31.0)
    assert [replica.slow, replica.trouble] == [None, ""]
    await replica.stop()
    log.close()


@virtually
async def test_warning_names_the_function_whose_instance_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts = Starts(tmp_path, FAILS)
    await until(1.4)
    assert "f.n: an instance exited with status 1" in caplog.text
    await starts.end()


@virtually
async def test_deaths_fill_no_log_of_the_gateway_when_instances_end_again_and_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts = Starts(tmp_path, WELL)
    replicas = [Replica(starts.version) for _ in range(4)]
    await until(200.0)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 4, "one at once, and one a minute"
    assert "lines like this one were left out" in warnings[-1].getMessage()
    deaths = [line for line in await starts.lines() if line.startswith("this instance")]
    assert len(deaths) > 100, "the function's own log has all of them"
    for replica in replicas:
        await replica.stop()
    await starts.end()


def test_empty_lines_of_a_start_are_bounded_as_others_are() -> None:
    lines = [LogLine(FunctionId("n", "f"), "f-1", datetime.now(UTC), "")] * 10_000
    start = StartOutput([""] * len(lines))
    assert start.pass_on(lines) == lines
    assert (start.repeats, start.texts) == (False, [])


def test_output_beyond_what_is_remembered_is_never_held_back() -> None:
    long = "x" * (256 << 10)
    start = StartOutput(["first", long])
    first, rest = (
        LogLine(FunctionId("n", "f"), "f-1", datetime.now(UTC), text) for text in ("first", long)
    )
    assert start.pass_on([first]) == ()
    assert start.pass_on([rest]) == [first, rest]
    assert (start.repeats, start.texts) == (False, [])
