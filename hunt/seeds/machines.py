"""The machines of a simulation: starts, kills, stops and freezes the programs on them."""

from collections.abc import Coroutine
from typing import Any, Protocol

from hunt.seeds.surroundings import Surroundings
from tests.kit.simulation.simulated_loop import SimulatedProgram


class Runnable(Protocol):
    """A program that can be started again and again."""

    name: str

    def run(self) -> Coroutine[Any, Any, None]:
        """Run until cancelled."""
        ...


class Machine:
    """One program's place: `life` is its present run, if it runs."""

    def __init__(self, around: Surroundings, host: str, program: Runnable) -> None:
        self.host = host
        self.program = program
        self.life: SimulatedProgram | None = None
        self.buried: list[SimulatedProgram] = []
        self._around = around
        self._skew_s = 0.0
        self._starts = 0
        self._ends = False  # it was asked to
        self._starts_again = False

    @property
    def name(self) -> str:
        return self.program.name

    def start(self) -> None:
        """Start it, unless it runs; one that is about to end is started again then."""
        if self.life is not None:
            self._starts_again = self._ends
            return
        self._ends = self._starts_again = False
        around = self._around
        self._starts += 1
        offset_s = around.chance.uniform(0.0, 1e6)
        life = SimulatedProgram(around.loop, self.host, self._life_name(), offset_s)
        life.skew_s = self._skew_s
        life.at_death += [lambda: around.network.lose(life), self._died]
        self.life = life
        around.journal.note(f"{self.name} starts")
        task = life.start(self.program.run(), life.name)
        task.add_done_callback(lambda _: life.kill())

    def kill(self) -> None:
        """As by SIGKILL."""
        self._starts_again = False
        if self.life is not None:
            self.life.kill()

    def stop(self) -> None:
        """As by SIGTERM: the program ends by itself, in order."""
        if self.life is not None:
            self._ends = True
            self.life.end()

    def freeze(self) -> None:
        """As by SIGSTOP."""
        if self.life is not None:
            self.life.freeze()

    def thaw(self) -> None:
        """As by SIGCONT."""
        if self.life is not None and self.life.frozen:
            self.life.thaw()

    def set_clock(self, skew_s: float) -> None:
        """Set the wall clock of the host wrong."""
        self._skew_s = skew_s
        if self.life is not None:
            self.life.skew_s = skew_s

    def _life_name(self) -> str:
        return self.name if self._starts == 1 else f"{self.name}/{self._starts}"

    def _died(self) -> None:
        assert self.life is not None, "it lived"
        self.buried.append(self.life)
        self.life = None
        died = getattr(self.program, "died", None)
        if died is not None:
            died()
        self._around.journal.note(f"{self.name} is gone")
        if self._starts_again:
            self.start()
