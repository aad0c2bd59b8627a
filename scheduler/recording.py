"""A live run as lines of JSON: what a core began with, its events, a digest of each answer.

Pure: whoever records or replays owns the file. A leader's term begins with a line of its own, so
that one file may hold several.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

from cache_manager.model import ModelId, Tier
from scheduler.actions import Action, Dispatch, EnqueueLocally
from scheduler.codec import Codec
from scheduler.core import Core, make_core
from scheduler.errors import BadRecording, BadValue
from scheduler.events import Event
from scheduler.model import CoreSettings, LeaseId
from scheduler.profiles import Profile

VERSION = 1
_DIGEST_BYTES = 8


class Known(NamedTuple):
    """A model's profile as an earlier leader left it."""

    model: ModelId
    memory_bytes: int
    measured_bytes: int
    load_s: Mapping[Tier, float]
    run_s: Mapping[tuple[int, str], float]
    measured_loads: tuple[Tier, ...]
    measured_runs: tuple[tuple[int, str], ...]
    features: Mapping[str, float]
    usual_run_s: float | None


class Beginning(NamedTuple):
    """All that decides what a fresh core will do with the events that follow."""

    version: int
    policy: str
    eviction: str
    parameters: Mapping[str, float] = MappingProxyType({})
    max_waiting: int | None = None
    first_lease: LeaseId = LeaseId(1)
    largest_gpu_bytes: int = 0
    profiles: tuple[Known, ...] = ()

    def core(
        self, policy: str | None = None, parameters: Mapping[str, float] | None = None
    ) -> Core:
        """A fresh core that begins so; by another policy, if one is named."""
        settings = CoreSettings(
            max_waiting=self.max_waiting,
            first_lease=self.first_lease,
            largest_gpu_bytes=self.largest_gpu_bytes,
        )
        chosen = self.parameters if policy is None else parameters
        core = make_core(policy or self.policy, self.eviction, chosen, settings)
        for known in self.profiles:
            core.cluster.profiles.restore(known.model, _profile(known))
        return core


class Step(NamedTuple):
    """One event, when the core took it in, and the digest of what it answered."""

    at_s: float
    event: Event
    digest: str


_BEGINNINGS: Codec[Beginning] = Codec(Beginning)
_EVENTS: Codec[Event] = Codec(Event)
_ACTIONS: Codec[Action] = Codec(Action)


def known(model: ModelId, profile: Profile) -> Known:
    """A profile as it is recorded."""
    return Known(
        model,
        profile.memory_bytes,
        profile.measured_bytes,
        dict(profile.load_s),
        dict(profile.run_s),
        tuple(sorted(profile.measured_loads)),
        tuple(sorted(profile.measured_runs)),
        dict(profile.features),
        profile.usual_run_s,
    )


def digest(actions: Iterable[Action]) -> str:
    """The same for the same actions; explanations do not count, for who watches changes nothing."""
    plain = [_ACTIONS.to_plain(_bare(action)) for action in actions]
    if not plain:
        return ""
    return blake2b(_line(plain).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def beginning_line(beginning: Beginning) -> str:
    """The line with which a term begins."""
    return _line({"begins": _BEGINNINGS.to_plain(beginning)})


def step_line(at_s: float, event: Event, actions: Sequence[Action]) -> str:
    """The line of one event."""
    return _line([at_s, _EVENTS.to_plain(event), digest(actions)])


def parsed(line: str) -> Beginning | Step:
    """What a line says; BadRecording where it is none of ours."""
    try:
        found = json.loads(line)
        if isinstance(found, dict):
            beginning = _BEGINNINGS.from_plain(found["begins"])
            if beginning.version != VERSION:
                raise BadRecording(f"version {beginning.version}; this is version {VERSION}")
            return beginning
        at_s, event, answer = found
        return Step(float(at_s), _EVENTS.from_plain(event), str(answer))
    except (ValueError, TypeError, KeyError, BadValue) as error:
        raise BadRecording(f"no line of a recording: {error}") from error


def _bare(action: Action) -> Action:
    if isinstance(action, Dispatch | EnqueueLocally) and action.explanation is not None:
        return action._replace(explanation=None)
    return action


def _profile(known: Known) -> Profile:
    profile = Profile(known.memory_bytes)
    profile.measured_bytes = known.measured_bytes
    profile.load_s = dict(known.load_s)
    profile.run_s = dict(known.run_s)
    profile.measured_loads = set(known.measured_loads)
    profile.measured_runs = set(known.measured_runs)
    profile.features = dict(known.features)
    profile.usual_run_s = known.usual_run_s
    return profile


def _line(plain: Any) -> str:
    return json.dumps(plain, separators=(",", ":"), sort_keys=True)
