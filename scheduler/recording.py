"""A live run as lines of JSON: a core's initial state, its events, a digest of each answer.

Pure: the caller owns the file. A leader's term begins with a line of its own, so that one file may
hold several terms.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct, json
from msgspec.structs import replace

from cache_manager.model.ids import ModelId
from scheduler.composition import make_core
from scheduler.core.core import Core
from scheduler.features.staged_exit import StagedExit
from scheduler.model.actions import Action, Dispatch, EnqueueLocally
from scheduler.model.errors import BadRecording, BadValue
from scheduler.model.events import Event
from scheduler.model.values import CoreSettings, LeaseId, Number, RequestId, StandingTerms, Value
from scheduler.wire.codec import encoded, read
from scheduler.wire.model_records import ModelRecord, profile_of

VERSION = 2
_DIGEST_BYTES = 8


class Beginning(Value, frozen=True):
    """Everything besides the events that a core's decisions depend on."""

    version: int
    policy: str
    eviction: str
    parameters: Mapping[str, Number] = MappingProxyType({})
    max_waiting: int | None = None
    first_lease: LeaseId = LeaseId(1)
    largest_gpu_bytes: int = 0
    models: Mapping[ModelId, ModelRecord] = MappingProxyType({})
    standing: StandingTerms | None = None
    exit_rule: str = "never"

    def core(
        self,
        policy: str | None = None,
        parameters: Mapping[str, float] | None = None,
        explain: Container[RequestId] = frozenset(),
    ) -> Core:
        """A fresh core with this initial state; with the recorded policy, if none is named."""
        settings = CoreSettings(
            max_waiting=self.max_waiting,
            explain=explain,
            first_lease=self.first_lease,
            largest_gpu_bytes=self.largest_gpu_bytes,
            standing=self.standing,
            exit_rule=self.exit_rule,
        )
        chosen = self.parameters if policy is None else parameters
        core = make_core(policy or self.policy, self.eviction, chosen, settings)
        for model, record in self.models.items():
            profile, gaps = profile_of(record)
            core.cluster.profiles.restore(model, profile)
            if gaps.total:
                core.layer(StagedExit).remember(model, gaps)
        return core


class RecordedStep(NamedTuple):
    """One event, when the core took it in, and the digest of the resulting actions."""

    at_s: Number
    event: Event
    digest: str


class _Versioned(Struct):
    """What the beginnings of all versions have; the first version had it one level below."""

    version: int = VERSION
    begins: "_Versioned | None" = None


_LINES: json.Decoder[Beginning | RecordedStep] = json.Decoder(Beginning | RecordedStep)
_VERSIONED: json.Decoder[_Versioned] = json.Decoder(_Versioned)


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
        if isinstance(recorded, Beginning):
            for record in recorded.models.values():
                profile_of(record)  # else only the core that is made of it would refuse it
    except UnicodeEncodeError as error:
        raise BadRecording(f"no line of a recording: {error}") from error
    except BadValue as error:
        _check_version(line)
        raise BadRecording(f"no line of a recording: {error}") from error
    if isinstance(recorded, Beginning):
        _check_version(line)
    return recorded


def _check_version(line: str) -> None:
    """BadRecording if this is the beginning of another version, which may have other fields."""
    with suppress(BadValue):
        begins = read(_VERSIONED, line.encode())
        version = (begins.begins or begins).version
        if version != VERSION:
            raise BadRecording(f"version {version}; this is version {VERSION}")


def _bare(action: Action) -> Action:
    if isinstance(action, Dispatch | EnqueueLocally) and action.explanation is not None:
        return replace(action, explanation=None)
    return action
