"""The order of turns: which held-back request is next.

Start-time fair queueing (SFQ) in two levels, and a bounded look ahead, as MQFQ has it: a namespace
is charged, by its weight, for what its requests take, in advance by estimate; its next request has
its turn at the namespace's virtual time. The clock of all is the least turn of what waits. So a
namespace that returns from idleness begins at the clock: it has saved nothing.
"""

from scheduler.cluster.request_queue import Pending, Standing
from scheduler.cluster.state import ClusterState
from scheduler.features.tenants.limits import PausedCalls
from scheduler.features.tenants.owners import (
    FunctionOwner,
    Lineup,
    OwnerTable,
    TenantSpace,
    Turn,
    estimate_s,
)

# Requests that have the same turn to the microsecond keep their order of arrival.
_SEQ_STEP = 1 << 40
# Of a request that goes before others: at most so many seconds.
MOST_HEAD_S = 10.0
_PRIORITY_S = 1.0  # for each step of priority

AHEAD = "its namespace was ahead of its share"
ITS_TURN = "others had their turn"
LEASES = "its quota of leases"
RESIDENT = "its quota of resident bytes"
GPU_TIME = "its quota of GPU time"


class TurnOrder:
    """Holds requests back until it is their turn, and no longer.

    With `lead_s` those may be placed whose turn is at most so much later than the first turn, in
    seconds of the whole cluster's work. Without, all may be, whom no quota holds back.
    """

    def __init__(self, cluster: ClusterState, owners: OwnerTable) -> None:
        self.lead_s = 0.0
        self.virtual_s = 0.0
        self.turns: dict[str, Turn] = {}
        # Those whose first request has no room within a quota of resident bytes.
        self.stuck: dict[FunctionOwner, None] = {}
        self.paused = PausedCalls(cluster, owners)
        self._cluster = cluster
        self._owners = owners
        self._spaces: Lineup[tuple[float, int], TenantSpace] = Lineup()
        self._early: dict[FunctionOwner, None] = {}  # whose first request has a head start
        self._pace = 0.0  # at which these are listed

    # -- what waits -----------------------------------------------------------------------------

    def turn(self, pending: Pending) -> Turn:
        """The turn of an accepted request, made when it is first asked for."""
        turn, function = self.turns.get(pending.id), pending.request.function
        if turn is None:
            owner = self._owners.of(function)
            priority = owner.terms.priority + owner.space.terms.priority
            head_s = head_start_s(pending, priority, self._cluster.now)
            turn = self.turns[pending.id] = Turn(pending, owner, head_s)
        elif not turn.queued:  # its owner may have been forgotten meanwhile
            turn.owner = self._owners.of(function)
        return turn

    def queue(self, turn: Turn) -> None:
        """From now on the request waits."""
        turn.charge_s = estimate_s(turn.pending.bundle, self._cluster)
        turn.queued = True
        self._owners.count(turn.owner, waiting=1, queued_s=turn.charge_s)

    def unqueue(self, turn: Turn) -> None:
        """It waits no more; what it was charged in advance is given back."""
        self.withdraw(turn)
        if turn.owner.space.resumed:
            self.paused.waits_no_more(turn)
        turn.queued = False
        self._owners.count(turn.owner, waiting=-1, queued_s=-turn.charge_s)

    def expose(self, turn: Turn) -> None:
        """Policies see the request from now on, and it is charged by estimate."""
        turn.exposed = True
        turn.owner.exposed += 1
        turn.owner.space.exposed += 1
        self.charge(turn.owner, turn.charge_s)

    def withdraw(self, turn: Turn) -> None:
        """Policies see it no more, if they did."""
        if turn.exposed:
            turn.exposed = False
            turn.owner.exposed -= 1
            turn.owner.space.exposed -= 1
            self.charge(turn.owner, -turn.charge_s)

    # -- held back ------------------------------------------------------------------------------

    def hold(self, turn: Turn) -> None:
        """Hold a request back, at its place by arrival among those of its function."""
        pending, owner = turn.pending, turn.owner
        if pending.seq < 0:  # it goes before all others
            turn.arrival = pending.seq
        turn.held = True
        self._cluster.held += 1
        pending.standing = Standing.HELD
        pending.at = pending.lease = None
        turn.since_s = self._cluster.now
        if pending.pauses:
            pending.held_for = GPU_TIME
            self.paused.add(turn)
            return
        head = int(turn.head_s * 1e6) * _SEQ_STEP if self.lead_s else 0
        owner.turns.put(turn, turn.arrival - head)
        pending.held_for = self._why(owner)
        self.list(owner)

    def let_go(self, turn: Turn) -> None:
        self._leave(turn)
        self.list(turn.owner)

    def _leave(self, turn: Turn) -> None:
        self._cluster.held -= 1
        turn.held = False
        turn.pending.held_s += self._cluster.now - turn.since_s
        if not self.paused.remove(turn):
            turn.owner.turns.drop(turn)

    def resume(self) -> bool:
        """Let calls go on for which a quota of GPU time has room now; whether there were any."""
        due = self.paused.due()
        for turn in due:
            self.let_go(turn)
            turn.pending.pauses = False
            self.hold(turn)
            turn.pending.held_for = GPU_TIME
        return bool(due)

    def list(self, owner: FunctionOwner) -> None:
        """List a function, and its namespace, where their turns are by now."""
        space = owner.space
        if not (owner.turns.keys or space.turns.keys):
            return
        first = None if owner in self.stuck or owner.at_its_leases else owner.turns.first()
        if first is not None and first.head_s:
            self._early[owner] = None
        else:
            self._early.pop(owner, None)
        if first is None:
            space.turns.drop(owner)
        else:
            if owner not in space.turns.keys:
                owner.virtual_s = max(owner.virtual_s, space.turn_s)
            space.turns.put(owner, (owner.virtual_s - self._head_s(first), owner.number))
        self._list_space(space)

    def _list_space(self, space: TenantSpace) -> None:
        owner = None if space.at_its_leases else space.turns.first()
        first = None if owner is None else owner.turns.first()
        if first is None:
            self._spaces.drop(space)
            return
        if space not in self._spaces.keys:
            space.virtual_s = max(space.virtual_s, self.virtual_s)
        self._spaces.put(space, (space.virtual_s - self._head_s(first), space.number))

    def _why(self, owner: FunctionOwner) -> str:
        if owner in self.stuck:
            return RESIDENT
        if owner.at_its_leases or owner.space.at_its_leases:
            return LEASES
        return AHEAD if owner.space.virtual_s > self.virtual_s else ITS_TURN

    # -- turns ----------------------------------------------------------------------------------

    def next(self, *, spare: bool = False) -> Turn | None:
        """The next request that may be placed; with `spare` also where its turn is too late."""
        self._follow_pace()
        space = self._spaces.first()
        if space is None:
            return None
        if self.lead_s and not spare:
            turn_s, _ = self._spaces.keys[space]
            self.virtual_s = self._clock_s(turn_s)
            if turn_s > self.virtual_s + self.lead_s * self._pace:
                return None
        owner = space.turns.first()
        assert owner is not None
        return owner.turns.first()

    def comes_at_once(self, turn: Turn) -> bool:
        """Whether it is the turn of a new request, while no other one is held back."""
        owner, space = turn.owner, turn.owner.space
        if turn.pending.pauses or owner in self.stuck or owner.at_its_leases or space.at_its_leases:
            return False
        owner.virtual_s = max(owner.virtual_s, space.turn_s)
        space.virtual_s = max(space.virtual_s, self.virtual_s)
        if self.lead_s:
            self._follow_pace()
            turn_s = space.virtual_s - self._head_s(turn)
            clock_s = self._clock_s(turn_s)
            if turn_s > clock_s + self.lead_s * self._pace:
                return False
            self.virtual_s = clock_s
        return True

    def take(self, turn: Turn) -> None:
        """It is the turn of this request, the next one: give it its rank, and charge for it."""
        owner, space, pending = turn.owner, turn.owner.space, turn.pending
        cluster = self._cluster
        if turn.held:
            self._leave(turn)
        space.turn_s = max(space.turn_s, owner.virtual_s)
        turn.tag_s = max(0.0, space.virtual_s - self._head_s(turn))
        if self.lead_s:
            if turn.arrival >= 0:
                pending.seq = int(turn.tag_s * 1e6) * _SEQ_STEP + turn.arrival % _SEQ_STEP
            pending.number = cluster.accepted - 1 - cluster.waiting.count - cluster.held
        else:
            pending.seq = turn.arrival
        cluster.latest_seq = max(cluster.latest_seq, pending.seq)
        self.expose(turn)

    def charge(self, owner: FunctionOwner, seconds: float) -> None:
        """Charge so many seconds more, or fewer, and list the owner where its turn is then."""
        owner.virtual_s += seconds / owner.weight
        owner.space.virtual_s += seconds / owner.space.weight
        self.list(owner)

    def is_ahead(self, space: TenantSpace) -> bool:
        """Whether a namespace is too far ahead for a further turn."""
        return space.virtual_s > self.virtual_s + self.lead_s * self.pace()

    def pace(self) -> float:
        """By how much the virtual time advances in a second, with all slots at work."""
        return max(1, self._cluster.active_slots) / max(self._owners.busy.weight, 1e-6)

    def _follow_pace(self) -> None:
        """If the pace has changed, sort the turns that depend on it again."""
        pace = self.pace()
        if pace != self._pace:
            self._pace = pace
            for owner in list(self._early):
                self.list(owner)

    def _head_s(self, turn: Turn) -> float:
        return turn.head_s * self._pace if self.lead_s and turn.head_s else 0.0

    def _clock_s(self, next_s: float) -> float:
        """The clock is at the first turn of what waits, and never goes back."""
        cluster = self._cluster
        if cluster.waiting.count:
            first = cluster.waiting.first(max(0, len(cluster.sizes) - 1))
            turn = None if first is None else self.turns.get(first.id)
            next_s = min(next_s, turn.tag_s) if turn is not None else next_s
        return max(self.virtual_s, next_s)


def head_start_s(pending: Pending, priority: int, now: float) -> float:
    """By how many seconds a request goes before others that came at the same time.

    By its priority, and by how little is left of its time; bounded, so that nobody starves.
    """
    request = pending.request
    left_s = MOST_HEAD_S
    if request.deadline_s is not None:
        left_s = request.deadline_s - now
    if request.slo_s is not None:
        left_s = min(left_s, pending.arrived_s + request.slo_s - now)
    urgent_s = max(0.0, MOST_HEAD_S - max(0.0, left_s))
    head_s = (request.priority + priority) * _PRIORITY_S + urgent_s
    return max(-MOST_HEAD_S, min(MOST_HEAD_S, head_s))
