"""A live run as lines of JSON: a core's initial state, its events, a digest of each answer.

Pure: the caller owns the file. A leader's term begins with a line of its own, so that one file may
hold several terms.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

from msgspec import json
from msgspec.structs import replace

from cache_manager.model.ids import ModelId, Tier
from cache_manager.model.request_rates import IdleGaps
from scheduler.core.core import Core, make_core
from scheduler.estimates.profiles import Profile
from scheduler.model.actions import Action, Dispatch, EnqueueLocally
from scheduler.model.errors import BadRecording, BadValue
from scheduler.model.events import Event
from scheduler.model.values import (
    Configuration,
    CoreSettings,
    LeaseId,
    Number,
    StandingTerms,
    Value,
)
from scheduler.wire.codec import encoded, read

VERSION = 2
_DIGEST_BYTES = 8


class RecordedProfile(Value, frozen=True):
    """A model's profile as an earlier leader left it."""

    model: ModelId
    memory_bytes: int
    measured_bytes: int
    load_s: Mapping[Tier, Number]
    run_s: tuple[tuple[int, str, Number], ...]
    measured_loads: tuple[Tier, ...]
    measured_runs: tuple[tuple[int, str], ...]
    features: Mapping[str, Number]
    usual_run_s: Number | None
    configured_s: tuple[tuple[Configuration, str, Number], ...] = ()


class Beginning(Value, frozen=True):
    """Everything besides the events that a core's decisions depend on."""

    version: int
    policy: str
    eviction: str
    parameters: Mapping[str, Number] = MappingProxyType({})
    max_waiting: int | None = None
    first_lease: LeaseId = LeaseId(1)
    largest_gpu_bytes: int = 0
    profiles: tuple[RecordedProfile, ...] = ()
    standing: StandingTerms | None = None
    exit_rule: str = "never"
    gaps: Mapping[ModelId, tuple[tuple[int, Number], ...]] = MappingProxyType({})

    def core(
        self, policy: str | None = None, parameters: Mapping[str, float] | None = None
    ) -> Core:
        """A fresh core with this initial state; with the recorded policy, if none is named."""
        settings = CoreSettings(
            max_waiting=self.max_waiting,
            first_lease=self.first_lease,
            largest_gpu_bytes=self.largest_gpu_bytes,
            standing=self.standing,
            exit_rule=self.exit_rule,
        )
        chosen = self.parameters if policy is None else parameters
        core = make_core(policy or self.policy, self.eviction, chosen, settings)
        for recorded_profile in self.profiles:
            core.cluster.profiles.restore(recorded_profile.model, _profile(recorded_profile))
        for model, counts in self.gaps.items():
            core.placer.idle.remember(model, IdleGaps.of(counts))
        return core


class RecordedStep(NamedTuple):
    """One event, when the core took it in, and the digest of the resulting actions."""

    at_s: Number
    event: Event
    digest: str


_LINES: json.Decoder[Beginning | RecordedStep] = json.Decoder(Beginning | RecordedStep)


def recorded_profile(model: ModelId, profile: Profile) -> RecordedProfile:
    return RecordedProfile(
        model,
        profile.memory_bytes,
        profile.measured_bytes,
        dict(profile.load_s),
        tuple((*key, run_s) for key, run_s in profile.run_s.items()),
        tuple(sorted(profile.measured_loads)),
        tuple(sorted(profile.measured_runs)),
        dict(profile.features),
        profile.usual_run_s,
        tuple((*key, run_s) for key, run_s in profile.configured_s.items()),
    )


def digest(actions: Iterable[Action]) -> str:
    """A hash of the actions without their explanations."""
    bare = [_bare(action) for action in actions]
    return blake2b(encoded(bare), digest_size=_DIGEST_BYTES).hexdigest() if bare else ""


def beginning_line(beginning: Beginning) -> str:
    return encoded(beginning).decode()


def step_line(at_s: float, event: Event, actions: Sequence[Action]) -> str:
    return encoded(RecordedStep(at_s, event, digest(actions))).decode()


def parsed(line: str) -> Beginning | RecordedStep:
    """BadRecording if this is no line of a recording."""
    try:
        recorded = read(_LINES, line.encode())
    except (UnicodeEncodeError, BadValue) as error:
        raise BadRecording(f"no line of a recording: {error}") from error
    if isinstance(recorded, Beginning) and recorded.version != VERSION:
        raise BadRecording(f"version {recorded.version}; this is version {VERSION}")
    return recorded


def _bare(action: Action) -> Action:
    if isinstance(action, Dispatch | EnqueueLocally) and action.explanation is not None:
        return replace(action, explanation=None)
    return action


def _profile(recorded_profile: RecordedProfile) -> Profile:
    profile = Profile(recorded_profile.memory_bytes)
    profile.measured_bytes = recorded_profile.measured_bytes
    profile.load_s = dict(recorded_profile.load_s)
    profile.run_s = {(batch, kind): run_s for batch, kind, run_s in recorded_profile.run_s}
    profile.measured_loads = set(recorded_profile.measured_loads)
    profile.measured_runs = set(recorded_profile.measured_runs)
    profile.features = dict(recorded_profile.features)
    profile.usual_run_s = recorded_profile.usual_run_s
    profile.configured_s = {
        (configuration, kind): run_s for configuration, kind, run_s in recorded_profile.configured_s
    }
    return profile
