"""The index of records with late, repeated and missing messages; leases of gateways."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from gateway_ext.errors import BadRequest, QueueFailed
from gateway_ext.jobs.queue import JobTally, QueueLimits
from gateway_ext.jobs.values import CallResult, JobKind, JobNumber, call_lane
from gateway_ext.model import FunctionId
from gateway_ext.shared_jobs.bodies import CALL_HEAD, RESULT_HEAD, encode_head
from gateway_ext.shared_jobs.index import JobIndex
from gateway_ext.shared_jobs.records import (
    JobRecord,
    RecordState,
    StoredParts,
    decode,
    encode,
    key_of,
)
from gateway_ext.shared_jobs.session import (
    GatewayIdentity,
    GatewayPresence,
    beat,
)
from gateway_ext.shared_jobs.settings import JetStreamSettings, check, servers_in
from tests.kit.worlds.job_world import ECHO, call

ME, OTHER = "me.1", "other.1"
LANE = call_lane(ECHO)
CALL, DEAD = "x.jobs.call.k1", "x.jobs.dead.1"


class Living:
    def __init__(self) -> None:
        self.sessions = {ME, OTHER}

    def __call__(self, session: str) -> bool:
        return session in self.sessions


def record(
    state: RecordState = RecordState.WAITING, number: int = 1, **others: object
) -> JobRecord:
    fields: dict[str, object] = {
        "number": JobNumber(number),
        "function": ECHO,
        "call_id": f"c{number}",
        "queued_at_s": 1.0,
        "call": StoredParts(number, (), 10),
        "state": state,
        "lane": LANE,
        "due_at_s": 1.0,
    }
    return JobRecord(**{**fields, **others})  # type: ignore[arg-type] # as named


def index(living: Living | None = None) -> JobIndex:
    return JobIndex(JobTally(QueueLimits()), ME, living or Living())


def test_record_comes_back_as_it_was_written() -> None:
    one = record(
        RecordState.CLAIMED, owner=ME, result=StoredParts(7, (5, 6), 900), why="é", failed=True
    )
    assert decode(encode(one)) == one


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b'{"v":9}'])
def test_content_that_is_not_a_record_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode(content)


def test_record_of_another_version_or_with_a_time_without_end_is_refused_by_its_field() -> None:
    with pytest.raises(ValueError, match=r"Invalid value 1 - at `\$.v`"):
        decode(encode(record()).replace(b'"v":2', b'"v":1'))
    with pytest.raises(ValueError, match=r"at `\$.due_at_s`"):
        decode(encode(record()).replace(b'"due_at_s":1.0', b'"due_at_s":1e13'))


def test_call_and_result_come_back_with_what_stands_in_their_parts() -> None:
    one = call(callback_url="http://there/")
    assert CALL_HEAD.decode(encode_head((one, b"\nbody\n"))) == (one, b"\nbody\n")
    result = CallResult(500, [(b"a", b"\xff")], 1.5, "failed")
    assert RESULT_HEAD.decode(encode_head((result, b""))) == (result, b"")
    for decoding in (CALL_HEAD.decode, RESULT_HEAD.decode):
        with pytest.raises(ValueError, match=r"\w"):
            decoding(b"{}\n")


def test_keys_of_two_calls_differ_where_their_names_only_look_alike() -> None:
    assert key_of(FunctionId("team", "echo"), "a") != key_of(FunctionId("team", "echoa"), "")
    assert key_of(FunctionId("team", "echo"), "a") == key_of(FunctionId("team", "echo"), "a")


def test_older_message_changes_nothing_and_a_mark_keeps_it_from_coming_to_life() -> None:
    one = index()
    one.apply(CALL, 5, record(RecordState.CLAIMED, owner=OTHER))
    one.apply(CALL, 4, record())
    assert one.heads(JobKind.CALL) == []
    one.apply(CALL, 6, record(RecordState.GONE, ended=ME))
    one.apply(CALL, 5, record(RecordState.CLAIMED, owner=OTHER))
    assert one.alive(CALL) is None
    assert (one.mark_of(CALL), one.marks) == (6, [(CALL, 6, ME)])
    assert one.tally.calls == {}
    one.apply(CALL, 7, record(number=2))
    assert one.mark_of(CALL) == 0
    assert one.tally.calls == {ECHO: 1}


def test_of_a_job_that_is_gone_no_record_is_kept() -> None:
    jobs, gone = index(), record(RecordState.GONE, ended=ME)
    held = sys.getrefcount(gone)
    jobs.apply(CALL, 2, gone)

    assert jobs.marks == [(CALL, 2, ME)]
    assert jobs.mark_of(CALL) == 2
    assert sys.getrefcount(gone) == held
    jobs.begin_reading()
    jobs.apply(CALL, 2, gone)
    jobs.end_reading()
    assert jobs.marks == [(CALL, 2, ME)]
    assert jobs.mark_of(CALL) == 2


def test_only_a_full_reading_finds_records_that_newer_ones_should_have_replaced() -> None:
    one = index()
    one.apply(CALL, 5, record())
    one.apply(CALL, 6, record(RecordState.CLAIMED, owner=OTHER))
    assert one.outdated == []
    one.begin_reading()
    one.apply(CALL, 5, record())
    one.apply(CALL, 6, record(RecordState.CLAIMED, owner=OTHER))
    one.apply(CALL, 7, record(RecordState.GONE, ended=OTHER))
    one.apply(CALL, 8, record(number=2))
    one.end_reading()
    one.apply(CALL, 9, record(RecordState.GONE, number=2, ended=OTHER))
    assert one.outdated == [(CALL, 5), (CALL, 6), (CALL, 7)]
    one.clear()
    assert one.outdated == []


def test_job_is_taken_once_and_again_when_it_was_let_go() -> None:
    one, notified = index(), []
    one.watchers.append(lambda: notified.append(1))
    one.apply(CALL, 1, record())
    assert len(notified) == 1
    taken = one.take(LANE, 5.0)
    assert taken is not None
    assert one.take(LANE, 5.0) is None
    # A claim of ours was written without an acknowledgement: no gateway works on the job.
    one.apply(CALL, 2, record(RecordState.CLAIMED, owner=ME))
    assert one.take(LANE, 5.0) is None
    one.release(CALL)
    again = one.take(LANE, 5.0)
    assert again is not None
    assert again.seq == 2


def test_claims_of_a_session_are_offered_when_it_is_dead() -> None:
    living = Living()
    one = index(living)
    one.apply(CALL, 1, record(RecordState.CLAIMED, owner=OTHER))
    assert one.heads(JobKind.CALL) == []
    assert one.claimers() == [OTHER]
    living.sessions.remove(OTHER)
    assert one.release_claims(OTHER) == 1
    assert one.heads(JobKind.CALL) == [(LANE, 1.0)]


def test_look_from_the_beginning_drops_what_is_not_there_any_more() -> None:
    one = index()
    one.apply(CALL, 1, record())
    one.apply("x.jobs.call.k2", 2, record(number=2))
    one.apply("x.jobs.dead.3", 3, record(RecordState.DEAD, number=3))
    one.begin_reading()
    one.apply("x.jobs.call.k2", 2, record(number=2))
    one.end_reading()
    assert one.alive(CALL) is None
    assert one.alive("x.jobs.call.k2") is not None
    assert one.tally.calls == {ECHO: 1}
    assert one.tally.dead == 0


def test_servers_that_lost_what_they_had_are_believed_at_the_next_look() -> None:
    one = index()
    one.apply(CALL, 9, record(RecordState.CLAIMED, owner=OTHER))
    one.apply("x.jobs.call.k2", 8, record(RecordState.GONE, number=2))
    one.begin_reading()
    one.apply(CALL, 3, record())
    one.apply("x.jobs.call.k2", 4, record(number=2))
    one.apply(
        CALL, 2, record(RecordState.CLAIMED, owner=OTHER)
    )  # late, already known from this reading
    one.end_reading()
    assert one.seq_of(CALL) == 3
    assert one.tally.calls == {ECHO: 2}
    assert one.heads(JobKind.CALL) == [(LANE, 1.0)]


def test_mark_that_a_look_did_not_see_is_forgotten() -> None:
    one = index()
    one.apply(CALL, 5, record(RecordState.GONE))
    one.apply(DEAD, 6, record(RecordState.GONE))
    one.begin_reading()
    one.apply(DEAD, 6, record(RecordState.GONE))
    one.end_reading()
    assert (one.mark_of(CALL), one.mark_of(DEAD)) == (0, 6)


def test_letter_that_moves_is_counted_once_and_seen_as_half_until_it_has() -> None:
    one = index()
    one.apply(CALL, 1, record(RecordState.CLAIMED, owner=ME))
    one.apply(CALL, 2, record(RecordState.DEAD, died_at_s=9.0))
    assert (one.tally.calls, one.tally.dead) == ({}, 1)
    assert [entry.subject for entry in one.halves()] == [CALL]
    one.apply(DEAD, 3, record(RecordState.DEAD, died_at_s=9.0))
    one.apply(CALL, 4, record(RecordState.GONE))
    assert one.halves() == []
    assert (one.tally.dead, [each.number for each in one.dead_after(0, 5)]) == (1, [1])


def test_letter_that_was_replayed_and_still_stands_is_a_half() -> None:
    one = index()
    one.apply(DEAD, 1, record(RecordState.DEAD))
    one.apply(CALL, 2, record())
    assert [entry.subject for entry in one.halves()] == [DEAD]
    one.apply(DEAD, 3, record(RecordState.GONE))
    assert one.halves() == []
    assert (one.tally.calls, one.tally.dead) == ({ECHO: 1}, 0)


def test_stream_that_is_another_one_is_read_again() -> None:
    one = index()
    one.apply(CALL, 100, record())
    one.passed(100)
    one.clear()
    one.apply(CALL, 1, record())
    assert one.tally.calls == {ECHO: 1}
    assert one.position == 0


def test_session_is_dead_when_it_was_silent_for_its_lease_or_closed_or_was_followed() -> None:
    now = [0.0]
    presence = GatewayPresence(10.0, lambda: now[0])
    assert not presence.lives("a.1")
    presence.receive("a", 1, beat("a.1"), 100.0)
    presence.receive("b", 2, beat("b.1"), 100.0)
    presence.receive("c", 3, beat("c.1"), 100.0)
    presence.receive("b", 4, beat(""), 101.0)
    presence.receive("c", 5, beat("c.2"), 101.0)
    assert [presence.lives(one) for one in ("a.1", "b.1", "c.1", "c.2")] == [
        True,
        False,
        False,
        True,
    ]
    assert presence.newly_dead(["a.1", "b.1", "c.1"]) == ["b.1", "c.1"]
    assert presence.newly_dead(["a.1", "b.1", "c.1"]) == []
    now[0] = 11.0
    assert presence.newly_dead(["a.1", "b.1"]) == ["a.1"]


def test_leases_start_again_after_a_time_without_a_connection() -> None:
    now = [0.0]
    presence = GatewayPresence(10.0, lambda: now[0])
    presence.receive("a", 1, beat("a.1"), 100.0)
    now[0] = 60.0
    presence.restart_leases()
    assert presence.lives("a.1")


def test_gateways_that_are_long_gone_are_forgotten_by_the_servers_clock() -> None:
    presence = GatewayPresence(10.0, lambda: 0.0)
    presence.receive("a", 1, beat("a.1"), 100.0)
    presence.receive("b", 2, beat("b.1"), 100.0 + 25 * 3600)
    assert presence.old() == [("a", 1)]
    presence.forget("a")
    assert presence.old() == []


def test_gateway_keeps_its_name_and_has_a_new_session_each_time(tmp_path: Path) -> None:
    first = GatewayIdentity(tmp_path)
    with pytest.raises(QueueFailed, match="another gateway"):
        GatewayIdentity(tmp_path)
    first.close()
    second = GatewayIdentity(tmp_path)
    second.close()
    second.close()
    assert first.gateway == second.gateway
    assert first.session != second.session
    assert json.loads(beat(first.session))["session"] == first.session


@pytest.mark.parametrize(
    "text",
    ["", "http://x:1", "nats://", "nats://user:pass@host:4222", "nats://a:1,b:2", "redis://x"],
)
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="queue"):
        servers_in(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefix": "a.b"},
        {"prefix": ""},
        {"replicas": 0},
        {"user": "somebody"},
        {"ca_file": "/nowhere"},
        {"cert_file": "/nowhere"},
    ],
)
def test_invalid_setting_is_refused(wrong: dict[str, object]) -> None:
    settings = JetStreamSettings(servers_in("nats://a:1, tls://b:2"))
    check(settings)
    with pytest.raises(BadRequest, match="queue"):
        check(dataclasses.replace(settings, **wrong))  # type: ignore[arg-type] # as named
