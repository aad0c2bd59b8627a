"""Puts a core together: its policy, its eviction rule, and the features that are its layers."""

from collections.abc import Mapping

from cache_manager import eviction
from cache_manager.eviction.eviction_rule import EvictionRule
from scheduler import policies
from scheduler.core.core import Core
from scheduler.features.neighbours import Neighbours
from scheduler.features.staged_exit import StagedExit
from scheduler.features.standing_leases import StandingLeases
from scheduler.features.tenants.tenancy import Tenancy
from scheduler.model.values import CoreSettings
from scheduler.policies.placement_policy import Policy

# Each is told what happens in this order; one that is left out leaves nothing behind.
_LAYERS = (StandingLeases, StagedExit, Neighbours, Tenancy)


def make_core(
    policy: str,
    eviction_rule: str = "lru",
    parameters: Mapping[str, float] | None = None,
    settings: CoreSettings | None = None,
) -> Core:
    """A core by the names that a configuration uses."""
    return compose(
        policies.make(policy, parameters),
        eviction.make(eviction_rule),
        settings,
        policy_name=policy,
    )


def compose(
    policy: Policy,
    rule: EvictionRule,
    settings: CoreSettings | None = None,
    *,
    policy_name: str = "",
) -> Core:
    """A core with all features that a cluster may use."""
    settings = settings or CoreSettings()
    core = Core(policy, rule, settings, policy_name=policy_name)
    for layer in _LAYERS:
        core.add(layer(core.lifecycle, settings))
    return core
