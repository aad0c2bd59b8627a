"""The template of one version of a function: started when an instance is first needed.

Whatever it does, an instance is started: from the template, or anew as if there were none.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from common.tasks import BackgroundTasks
from gateway_ext.providers.process import processes
from gateway_ext.providers.process.launch import InstanceProcess, LaunchOrders
from gateway_ext.providers.process.template_run import ProcessPlace, TemplateKeeper, TemplateRun
from gateway_ext.runtime.template.fork_line import TemplateBroken

log = logging.getLogger(__name__)

_WARM_S = 600.0
_MOST_FAILURES = 3
# A template waits for orders: beyond that much processor time it does something else.
_MOST_IDLE_CPU_S = 10.0
# Instances that have just been started have the processors to themselves for so long.
_QUIET_S = 1.0
_NOTICE_S = 1.0  # between the end of a process and the report of its keeper


class TemplateUsage(NamedTuple):
    """The resources of the process that waits for orders, of its spare, and of what is warmed.

    All are those of whole sessions, which copies of a template are in until they are forks;
    `alone` are those of the waiting process by itself.
    """

    alone: processes.ProcessUsage
    waiting: processes.ProcessUsage
    spare: processes.ProcessUsage
    warmed: processes.ProcessUsage


@dataclass(eq=False)
class FunctionTemplate:
    """Forks instances of one version; without a usable template `fork` gives none.

    A fork copies the tables of all its pages, twice until it has the right parent. That is most of
    the time from the order of an instance to its first call, and need not be spent while somebody
    waits: a spare is made in advance, and becomes the next instance.

    `refused` is why the version has no template any more; empty while it may have one.
    `bad_examples` is why its example calls are not made again.
    """

    orders: LaunchOrders
    place: ProcessPlace
    _: KW_ONLY
    start_s: float
    has_examples: bool
    refused: str = ""

    def __post_init__(self) -> None:
        self.bad_examples = ""
        self.memory_bytes = 0
        self.used_s = time.monotonic()
        self.warm = False
        self._run: TemplateRun | None = None
        self._spare: TemplateRun | None = None
        self._keepers: set[TemplateKeeper] = set()  # those of earlier templates too
        # Why the template becomes the instance that it is asked for, and whether the next will too.
        self._obstacle, self._is_for_good = "", False
        self._failures = 0
        self._idle_cpu_s: float | None = None
        self._forked_at_look = -1  # its orders before the last look at its memory; -1 during one
        self._closed = False
        self._one_at_a_time = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._warmed: TemplateRun | None = None  # the fork that makes the example calls
        self._sparing: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks(log, f"a template of {self.place.function}")

    @property
    def alive(self) -> bool:
        return self._run is not None

    @property
    def busy(self) -> bool:
        """Whether it starts, forks, or makes its example calls."""
        tasks = (self._starting, self._warming)
        return self._one_at_a_time.locked() or any(t is not None and not t.done() for t in tasks)

    @property
    def text(self) -> str:
        """Its state, for people."""
        if self.refused:
            return f"none: {self.refused}"
        if self._run is None:
            return "starts" if self.busy else "none until an instance starts"
        if self.bad_examples:
            return f"imported, and not warm: {self.bad_examples}"
        return "warm" if self.warm else "imported"

    async def fork(self, name: str, listener: int) -> InstanceProcess | None:
        """An instance of this name that serves this socket; None if it must be started anew."""
        # A cancelled fork must not leave a process behind that nobody knows.
        forking = asyncio.ensure_future(self._fork_in_turn(name, listener))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_end_unwanted)
            raise

    def fork_ended_up(self, *, ready: bool) -> None:
        """A fork can be called; if not, it has ended, and the next instance is started anew."""
        if ready:
            self._failures = 0
        elif self._run is not None:
            self._fail(self._run, "forked an instance that never became ready")

    def enforce(self, limit_bytes: int | None, usage: TemplateUsage) -> None:
        """Note what its processes use; end one that exceeds its limit, or computes unasked."""
        waiting = self._without_copies(usage)
        beyond_bytes = max(0, usage.spare.own_bytes - waiting.own_bytes)
        self.memory_bytes = waiting.own_bytes + usage.warmed.own_bytes + beyond_bytes
        if limit_bytes is not None and usage.warmed.own_bytes > limit_bytes:
            assert self._warming is not None, "its task is there as long as the process"
            self._warming.cancel()
            self._refuse_examples(f"its calls {_took(usage.warmed, limit_bytes)}")
        spare_is_large = limit_bytes is not None and usage.spare.own_bytes > limit_bytes
        if spare_is_large or usage.spare.cpu_s > _MOST_IDLE_CPU_S:
            self._drop_spare()
        if self._run is None:
            return
        if limit_bytes is not None and waiting.own_bytes > limit_bytes:
            self._fail(self._run, _took(waiting, limit_bytes))
        elif self.busy or self._idle_cpu_s is None:
            self._idle_cpu_s = usage.waiting.cpu_s
        elif usage.waiting.cpu_s - self._idle_cpu_s > _MOST_IDLE_CPU_S:
            why = f"computed for {_MOST_IDLE_CPU_S:g} s although nothing was asked of it"
            self._fail(self._run, why)

    def usage(self, sessions: Mapping[int, Sequence[int]]) -> TemplateUsage:
        """The resources of its processes; `sessions` has process ids by the session's leader."""
        runs = (self._run, self._spare, self._warmed)
        pids = [() if run is None else sessions.get(run.process.pid, ()) for run in runs]
        alone = () if runs[0] is None else (runs[0].process.pid,)
        return TemplateUsage(*map(processes.usage, (alone, *pids)))

    def give_up(self, why: str) -> None:
        """End the process; the next instance that starts brings another one."""
        if self._run is not None:
            self._note(f"was ended: {why}")
            self._drop()

    def renew(self, why: str) -> None:
        """End what has imported the handler or does so: what it has read then has changed."""
        for task in (self._starting, self._warming):
            if task is not None:
                task.cancel()
        if self.bad_examples:
            self.bad_examples = ""
            self.place.changed()
        self.give_up(why)

    async def close(self) -> None:
        """End all processes for good; the instances have ended before."""
        self._closed = True
        for task in (self._starting, self._warming):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        async with self._one_at_a_time:
            self._drop()
        await self._tasks.wait()
        await asyncio.gather(*(keeper.close() for keeper in self._keepers))

    # -- inside --------------------------------------------------------------------------------

    def _without_copies(self, usage: TemplateUsage) -> processes.ProcessUsage:
        """What waits for orders: its session, if nothing was ordered since the look before."""
        run, before = self._run, self._forked_at_look
        self._forked_at_look = -1 if run is None or run.forking else run.forked
        quiet = run is not None and not run.forking and before == run.forked
        return usage.waiting if quiet else usage.alone

    async def _fork_in_turn(self, name: str, listener: int) -> InstanceProcess | None:
        try:
            await self._ensure()
            async with self._one_at_a_time:
                run = self._run
                try:
                    process = await self._spare_as(name, listener)
                    if process is None and run is not None:
                        process = await run.fork(name, listener)
                        if process is run.process:
                            await self._become_instance(run)
                except OSError as error:
                    self._fail(run, str(error))
                    return None
            if process is not None:
                process.is_warm = self.warm
            return process
        finally:
            self.used_s = time.monotonic()
            self._spare_soon()

    async def _become_instance(self, run: TemplateRun) -> None:
        self._run = None
        self._drop_spare()
        why = self._obstacle or "it became an instance itself"
        self._failures += 1
        if self._is_for_good or self._failures >= _MOST_FAILURES:
            self.refused = why  # at once: another fork that comes now starts no template for it
            self._note(f"of this version is none: {why}")
        await run.release()

    def _spare_soon(self) -> None:
        """Have a spare a moment after the last call of this method."""
        if self._spare is None and not self._closed:
            self._stop_sparing()
            self._sparing = self._tasks.start(self._make_spare())

    async def _make_spare(self) -> None:
        """Nobody waits for it: the template's next order may come meanwhile."""
        await asyncio.sleep(_QUIET_S)
        run = self._run
        if run is None or self._obstacle or self._warmed is not None:  # another one is warmed
            return
        try:
            self._spare = await run.fork_run("spare")
        except OSError as error:
            self._fail(run, str(error))
        else:
            self._spare.watch(self._ended)

    async def _spare_as(self, name: str, listener: int) -> InstanceProcess | None:
        """The spare as an instance of this name that serves this socket; None without a spare.

        OSError if the spare lives and does not do as ordered.
        """
        run, self._spare = self._spare, None
        if run is None:
            return None
        process = None
        try:
            process = await run.fork(name, listener)
        except OSError:
            ended, _ = await asyncio.wait({run.process.exited}, timeout=_NOTICE_S)
            if not ended:
                raise
        finally:
            if process is run.process:
                await run.release()
            else:
                self._end(run)
        return process

    def _drop_spare(self) -> None:
        self._stop_sparing()
        run, self._spare = self._spare, None
        self._end(run)

    def _stop_sparing(self) -> None:
        if self._sparing is not None and self._sparing is not asyncio.current_task():
            self._sparing.cancel()
        self._sparing = None

    async def _ensure(self) -> None:
        """Whoever is cancelled meanwhile stops nothing."""
        if self._run is not None or self.refused or self._closed:
            return
        if self._starting is None or self._starting.done():
            self._starting = self._tasks.start(self._start())
        await asyncio.wait([self._starting])

    async def _start(self) -> None:
        run = None
        try:
            run = await TemplateRun.start(self.orders, self.place, self._keepers)
            report = await run.report("imported", "failed", within_s=self.start_s)
        except OSError as error:
            self._end(run)
            self._fail(None, str(error))
            return
        except BaseException:
            self._end(run)
            raise
        self._obstacle, self._is_for_good = report.why, report.state == "imported"
        self._fork_from(run, warm=False)
        if self.has_examples and not report.why and not self.bad_examples:
            self._warming = self._tasks.start(self._make_examples())

    async def _make_examples(self) -> None:
        """Have a fork make the example calls, and take the template's place if they went well."""
        run = None
        try:
            async with self._one_at_a_time:
                before = self._run
                if before is None:
                    return
                run = self._warmed = await before.fork_run("warm")
            report = await run.report("warmed", "failed", within_s=_WARM_S)
            if report.state == "failed":
                raise TemplateBroken(report.why)
            async with self._one_at_a_time:
                if self._run is before:
                    self._drop()
                    self._fork_from(run, warm=True)
                    run = None
                    self.place.changed()
        except OSError as error:
            if run is None:
                self._note(f"is not warm: {error}")
            else:
                self._refuse_examples(str(error))
        finally:
            self._warmed = None
            self._end(run)
            self._spare_soon()

    def _refuse_examples(self, why: str) -> None:
        """Make the calls no more: the file is a part of this version, and so is its mistake."""
        self.bad_examples = why
        self._note(f"is not warm: {why}; the calls are not made again")
        self.place.changed()

    def _fork_from(self, run: TemplateRun, *, warm: bool) -> None:
        self._run, self.warm, self._idle_cpu_s = run, warm, None
        self._forked_at_look = -1
        run.watch(self._ended)

    def _ended(self, run: TemplateRun, why: str) -> None:
        """Called when one that waits for orders does anything else."""
        if run is self._spare:
            self._drop_spare()
        elif run is self._run:
            self._fail(run, why)

    def _fail(self, run: TemplateRun | None, why: str) -> None:
        if run is not self._run:
            return  # it has failed already
        self._failures += 1
        self._drop()
        if self._failures >= _MOST_FAILURES:
            self.refused = f"{why}, as others before it"
        self._note(f"{why}; instances start without it")

    def _drop(self) -> None:
        self._drop_spare()
        run, self._run = self._run, None
        self.memory_bytes = 0
        self._end(run)

    def _end(self, run: TemplateRun | None) -> None:
        if run is not None:
            self._tasks.start(run.end())

    def _note(self, text: str) -> None:
        self.place.log.write(f"{self.place.function}-template", f"the template {text}")
        log.debug("%s: the template %s", self.place.function, text)


def _took(usage: processes.ProcessUsage, limit_bytes: int) -> str:
    used, most = usage.own_bytes >> 20, limit_bytes >> 20
    return f"took {used} MiB of memory, the limit of an instance is {most} MiB"


def _end_unwanted(forking: asyncio.Future[InstanceProcess | None]) -> None:
    if forking.cancelled() or forking.exception() is not None:
        return
    process = forking.result()
    if process is not None:
        processes.kill_session(process.pid)
        process.send_signal(signal.SIGKILL)
        os.close(process.output)


def enforce_bounds(
    templates: Collection[tuple[FunctionTemplate, bool]], *, most_bytes: int, idle_s: float
) -> None:
    """End templates that wait for too long; then the least recently used while all take too much.

    The flags say which have instances. The next instance of such a function is started anew.
    """
    now_s = time.monotonic()
    for template, has_instances in templates:
        if has_instances:
            template.used_s = now_s
        elif now_s - template.used_s > idle_s and not template.busy:
            template.give_up(f"its function was idle for {idle_s:g} s")
    living = [pair for pair in templates if pair[0].alive and not pair[0].busy]
    used_bytes = sum(template.memory_bytes for template, _ in living)
    for template, _ in sorted(living, key=lambda pair: (pair[1], pair[0].used_s)):
        if used_bytes <= most_bytes:
            return
        used_bytes -= template.memory_bytes
        template.give_up(f"all templates took more than {most_bytes >> 20} MiB of memory")
