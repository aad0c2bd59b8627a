"""What the scheduler reads back: records in the datastore, recordings, bodies of HTTP requests."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from cache_manager.model.ids import ModelId, Tier
from cache_manager.model.request_rates import IdleGaps
from hunt.parsers.parser_target import InputForm, Target
from scheduler import recording
from scheduler.features.billing import bill
from scheduler.features.tenants.quotas import owner_terms
from scheduler.model import events
from scheduler.model.errors import BadRecording, BadValue, MalformedRequest
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.profiles import Profile
from scheduler.model.values import Configuration, LeaseId, SlotId, StandingTerms
from scheduler.recording import Beginning, RecordedStep
from scheduler.service.http import lease_routes
from scheduler.service.leadership.election import LeaderInfo, decoded
from scheduler.store import stored_records
from scheduler.store.stored_records import PolicyChoice
from scheduler.wire import model_records
from scheduler.wire.codec import encoded
from tests.kit.cores.builders import request

_RECORD = "1.5 MB, etcd's own bound on a value"
_WRITER = "schedulers, other programs with rights in etcd"
_ROW = ["f", "m", "t4", *range(1, 7)]

T = TypeVar("T")


def targets() -> list[Target]:
    """All of this file."""
    return [*_records(), *_recordings(), *_bodies()]


def _record(
    name: str,
    parse: Callable[[bytes], T],
    encode: Callable[[T], Any],
    *seeds: Any,
    reads: str = "scheduler/store/stored_records.py",
) -> Target:
    return Target(
        name, parse, (BadValue,), lambda: [encoded(each) for each in seeds],
        InputForm.JSON, (reads,), _WRITER, _RECORD,
        encode=lambda found: encoded(encode(found)),
    )  # fmt: skip


def _same(record: T) -> T:
    return record


def _records() -> list[Target]:
    listed = stored_records.ListedModel(ModelId("a"), 5, pinned=True)
    lru = stored_records.GpuOrder((listed, listed), 3)
    choice = PolicyChoice("lalbo3", {"limit": 25.0}, "administrator")
    terms = OwnerTerms(2.0, 3, 10.0, 60.0, 1 << 30, 4, 5)
    leader = LeaderInfo("a", "http://h:1", 3, "id", "pid")
    used = {"rows": [_ROW], "parts": [[7, 8, 9, 10]], "gpus": [["t4", 1, 2, 3, 4]]}
    return [
        _record("stored-lru-list", stored_records.gpu_order, _same, lru),
        _record(
            "stored-profile",
            lambda data: _record_of(stored_records.stored_model(data)),
            _same,
            model_records.model_record(_profile(), 7200),
        ),
        _record("stored-policy", stored_records.policy_choice, _same, choice),
        _record(
            "stored-terms",
            owner_terms,
            _same,
            terms,
            reads="scheduler/features/tenants/quotas.py",
        ),
        _record(
            "stored-use",
            bill.use_bucket,
            bill.use_record,
            used,
            reads="scheduler/features/billing/bill.py",
        ),
        _record(
            "stored-leader",
            decoded,
            _same,
            leader,
            reads="scheduler/service/leadership/election.py",
        ),
    ]


def _record_of(stored: stored_records.StoredModel) -> model_records.ModelRecord:
    return model_records.model_record(stored.profile, stored.used_unix_s)


def _profile() -> Profile:
    found = Profile(1 << 30)
    found.measured_bytes = 5
    found.load_s = {Tier.HOST: 1.5}
    found.measured_loads = {Tier.HOST}
    found.keep_run((4, "t4"), 0.25)
    found.measured_runs.add((4, "t4"))
    found.keep_configured((Configuration(2, 3, 1), "t4"), 0.5)
    found.usual_run_s = 0.3
    found.features = {"flops": 1e9}
    found.gaps = IdleGaps.of([(3, 1.5), (7, 0.25)])
    return found


def _recordings() -> list[Target]:
    beginning = Beginning(
        recording.VERSION, "lalbo3", "lru", {"limit": 25.0}, 100, LeaseId(5), 1 << 34,
        {ModelId("bert"): model_records.model_record(_profile(), 0)},
        StandingTerms(30.0, 10), "fixed:10",
    )  # fmt: skip
    steps = (
        events.RequestArrived(request("r1", deadline_s=4.0)),
        events.PolicySet("lb", {"limit": 3}),
        events.SlotFreed(SlotId("g0"), LeaseId(1)),
    )
    lines = [recording.beginning_line(beginning)]
    lines += [recording.step_line(1.5, event, []) for event in steps]

    def encode(found: Beginning | RecordedStep) -> bytes:
        if isinstance(found, Beginning):
            return recording.beginning_line(found).encode()
        return encoded(found)

    return [
        Target(
            "recording-line", lambda data: recording.parsed(data.decode()),
            (BadRecording, UnicodeDecodeError), lambda: [line.encode() for line in lines],
            InputForm.JSON, ("scheduler/recording.py",), "people, with files of live runs",
            "a line of a file that a person named", encode=encode,
        ),
    ]  # fmt: skip


def _bodies() -> list[Target]:
    asked = {
        "request": "r1", "function": "openfaas-fn/f", "models": ["a", "b"], "batch": 4,
        "deadline_in_s": 3.5, "waited_s": 0.5, "priority": -3, "application": "a", "stage": "s",
        "slo_s": 1.0, "near": "n0", "registered_only": True, "max_wait_s": 2, "exit_rule": "never",
    }  # fmt: skip
    bodies: list[tuple[str, Callable[[bytes], Any], object]] = [
        ("body-acquire", lambda data: lease_routes.acquire(data, 100.0), asked),
        ("body-request", lease_routes.request, {"request": "r1"}),
        ("body-release", lease_routes.release, {"lease": 3, "may_return": True, "request": "r"}),
        ("body-presence", lease_routes.presence, {"caller": "c", "leases": [1, 2]}),
    ]
    return [
        Target(
            name, parse, (MalformedRequest,), lambda seed=seed: [json.dumps(seed).encode()],  # type: ignore[misc] # bound now
            InputForm.JSON, ("scheduler/service/http/lease_routes.py",),
            "programs with the caller's token", "1 MiB, by the server's bound on bodies",
        )
        for name, parse, seed in bodies
    ]  # fmt: skip
