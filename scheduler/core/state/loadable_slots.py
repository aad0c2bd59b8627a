"""The slots beside whose runs a load could begin, for policies that overlap loads and runs."""

from collections.abc import Iterable

from scheduler.core.state.rankings import SlotRanking
from scheduler.core.state.slots import Slot


class LoadableSlots:
    """The loadable slots of each size class, the least used first.

    Kept only after a policy has asked for it, so that policies that do not ask pay nothing; until
    then nothing is `running`.
    """

    def __init__(self) -> None:
        self.running = False
        self.rankings: list[SlotRanking] = []

    def start(self, slots: Iterable[Slot], size_classes: int) -> None:
        """Begin to follow these slots, which are all there are; also after sizes have changed."""
        self.running = True
        self.rankings = [SlotRanking(of_loads=True) for _ in range(size_classes)]
        for slot in slots:
            if slot.loadable:
                self.rankings[slot.gpu.size_class].add(slot)

    def stop(self) -> None:
        """Forget everything, until a policy asks again."""
        self.running = False
        self.rankings = []

    def settle(self, slot: Slot, slots: int) -> bool:
        """Follow a change of one of so many slots; False if a new start is due, to drop entries."""
        if not self.running or not slot.loadable:
            return True
        ranking = self.rankings[slot.gpu.size_class]
        ranking.add(slot)
        return not ranking.overgrown(slots)

    def has_any(self) -> bool:
        """Whether there is one."""
        return any(ranking.first_idle() is not None for ranking in self.rankings)
