"""What a feature may hook into: a layer overrides what it needs, and the rest does nothing."""

from collections.abc import Callable, Mapping
from typing import Any

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.cluster.request_queue import Bundle, Pending
from scheduler.cluster.slots import ActiveLease, Gpu, Slot
from scheduler.model.actions import Finish
from scheduler.model.events import Event, RunFinished
from scheduler.model.values import LeaseUse, StandingTerms
from scheduler.policies.placement_policy import Policy

# What one kind of event does, and whether the policy runs after it.
Handler = tuple[Callable[[Any], None], bool]


class Layer:
    """One feature, as the core sees it: the core asks it, and tells it what happens.

    It is made with the core's `Lifecycle`, and switches itself on there.
    """

    # -- said whether it is on or off -------------------------------------------------------------

    def handlers(self) -> dict[type[Event], Handler]:
        """The events that it alone handles."""
        return {}

    def policy_set(self, policy: Policy) -> None:
        """This policy is in force from now on; also said once at the beginning."""

    # -- events -----------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether the policy has to run after this event, whatever the event is."""
        return False

    def after_event(self) -> None:
        """The event is dealt with: do what it has made due."""

    # -- which requests come in, and which of them the policy sees --------------------------------

    def refusal(self, pending: Pending, *, promised: bool) -> Finish | None:
        """Why this request may not come in; it may have been `promised` a lease before."""
        return None

    def wait_s(self, function: str) -> float | None:
        """How long a new request of this function should wait; None: as long as any other."""
        return None

    def accepted(self, pending: Pending) -> None: ...

    def holds_back(self, pending: Pending) -> bool:
        """Whether it keeps a request that is to wait from the policy for now."""
        return False

    def let_go(self, pending: Pending) -> None:
        """A request that was held back is so no longer."""

    def expose(self) -> None:
        """The policy is about to decide: let it see what was held back long enough."""

    def expose_more(self) -> bool:
        """The policy has decided: whether it sees others now, and decides once more."""
        return False

    def waits(self, pending: Pending) -> None:
        """A request enters the global queue."""

    def waits_no_more(self, pending: Pending) -> None: ...

    def gpus_return(self) -> None:
        """A GPU is offered after a time without any."""

    def finished(self, pending: Pending) -> None:
        """A request has ended."""

    # -- leases -----------------------------------------------------------------------------------

    def allows(self, chosen: tuple[Pending, ...], bundle: Bundle, slot: Slot) -> bool:
        """Whether these may have a lease there, or without requests a prefetch may begin.

        If not, the layer has taken them out of their queue.
        """
        return True

    def granted(self, lease: ActiveLease) -> None:
        """A lease begins, for its requests or as a prefetch."""

    def placed(self, function: str, count: int) -> None:
        """So many requests of one function have what they asked for."""

    def stands(self, lease: ActiveLease) -> StandingTerms | None:
        """The terms on which the caller of a new lease may keep it."""
        return None

    def may_be_kept(self, lease: ActiveLease) -> bool:
        return True

    def adopted(self, lease: ActiveLease) -> None:
        """A lease of an earlier leader is in force."""

    def rejoined(self, lease: ActiveLease, pending: Pending) -> None:
        """This request has an adopted lease."""

    def loaded(self, lease: ActiveLease, *, joins: bool) -> None:
        """What a lease is for is there; it `joins` the slot's runs if it was beside them."""

    def stands_aside(self, lease: ActiveLease) -> None:
        """A lease has no part in its slot's runs until what it loads is there."""

    def called(self, lease: ActiveLease, use: LeaseUse, began_s: float, ended_s: float) -> None:
        """A call ran under a lease that is kept, for so long without any other one."""

    def calls_reported(self, lease: ActiveLease, function: str, run_s: float) -> None:
        """Its caller has reported calls of this function, each of which should take so long."""

    def computed(self, lease: ActiveLease, computed_s: float) -> None:
        """Calls ran for so long, since it was last said, under a lease of an own process."""

    def kept(self, lease: ActiveLease, since_s: float) -> None:
        """No call has run under a lease since then."""

    def needed(self, slot: Slot, pending: Pending | None) -> None:
        """A slot takes no further request, or this one waits for it."""

    def given_back(self, lease: ActiveLease, *, tell: bool) -> None:
        """A lease ends soon; `tell` its caller, unless the caller itself gave it back."""

    def ended(self, lease: ActiveLease) -> None:
        """A lease is over, and its models are in use by others alone."""

    def ran_alone(self, slot: Slot, event: RunFinished) -> bool:
        """Whether a run had its GPU to itself, and shows how long such a run takes alone."""
        return True

    # -- models -----------------------------------------------------------------------------------

    def found(self, gpu: Gpu, model: ModelId) -> None:
        """A node has a model, or the process that it left, that was not counted there."""

    def stored(self, node: NodeId, model: ModelId, tier: Tier) -> None:
        """A node's store has a model there."""

    def store_reported(self, node: NodeId, stored: Mapping[ModelId, Tier]) -> None:
        """This is all that a node's store has."""

    def leaves_s(self, node: NodeId, gpu: GpuId | None, model: ModelId) -> float | None:
        """When an idle model may leave this GPU, or without one the node's store; None: never."""
        return None

    def forgotten(self, model: ModelId) -> None:
        """Nothing needs this model, and no node has it."""


# What a layer hears of, or is asked, while it is on.
HOOKS = [name for name in vars(Layer) if name[0] != "_" and name not in {"handlers", "policy_set"}]
