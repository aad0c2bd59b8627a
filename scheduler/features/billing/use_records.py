"""The hours and days of the bill as they are stored: read back, and written where they changed."""

import asyncio
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from logging import Logger
from typing import Annotated

from msgspec import Meta, Struct, json

from cache_manager.model.ids import ModelId
from common.numerals import natural
from scheduler.features.billing.charges import LOADING
from scheduler.features.billing.use_buckets import (
    DAY_S,
    HOUR_S,
    Period,
    UseBucket,
    UseBuckets,
    UseKey,
)
from scheduler.model.errors import BadValue, DatastoreError, Fenced, StoreUnavailable
from scheduler.store.datastore import Fence, Store
from scheduler.wire.codec import encoded, read

BILLS = "bills/"
_ALL_FAIL = (Fenced, StoreUnavailable)
_KINDS = {"hour": HOUR_S, "day": DAY_S}
_DIGITS = 12  # of seconds since 1970
_NAMES = {length_s: kind for kind, length_s in _KINDS.items()}


async def read_use(store: Store, buckets: UseBuckets, log: Logger) -> None:
    """Read what earlier leaders counted; a bad record is logged and left out."""
    for key, value in (await store.list(BILLS)).values.items():
        try:
            buckets.of[_period(key)] = use_bucket(value)
            await asyncio.sleep(0)  # each may take milliseconds
        except BadValue as error:
            log.warning("ignoring %s in the datastore: %s", key, error)


async def write_use(store: Store, buckets: UseBuckets, fence: Fence) -> int:
    """Write the changed hours and days, and delete those that are gone; returns the bytes.

    What could not be written stays changed. A day and the hours that became part of it are written
    together, so that nothing is counted twice or lost; each other hour by itself, as a datastore
    takes so many bytes at once. What it refuses does not hold up the rest.
    """
    written, tried = 0, set[Period]()
    refused: DatastoreError | None = None
    while batch := _next_batch(buckets, tried):
        tried.update(batch)
        puts = {
            use_key(period): encoded(use_record(buckets.of[period]))
            for period in batch
            if period in buckets.of
        }
        deletes = [use_key(period) for period in batch if period not in buckets.of]
        for period in batch:
            del buckets.changed[period]  # what changes while it is written is written again
        try:
            await store.write(puts, deletes, fence)
        except BaseException as error:
            buckets.changed.update(dict.fromkeys(batch))
            if not isinstance(error, DatastoreError) or isinstance(error, _ALL_FAIL):
                raise
            refused = error
        else:
            written += sum(map(len, puts.values()))
    if refused is not None:
        raise refused
    return written


async def mark_lost(store: Store, buckets: UseBuckets) -> None:
    """Have all that the datastore does not have any more written again."""
    there = (await store.list(BILLS)).values
    buckets.changed.update(
        dict.fromkeys(period for period in buckets.of if use_key(period) not in there)
    )


def _next_batch(buckets: UseBuckets, tried: AbstractSet[Period]) -> Sequence[Period]:
    """What is written at once with the first changed period that was not tried yet."""
    first = min((period for period in buckets.changed if period not in tried), default=None)
    if first is None:
        return ()
    mine = _together(buckets, first)
    return [period for period in buckets.changed if _together(buckets, period) == mine]


def _together(buckets: UseBuckets, period: Period) -> Period:
    """The day, for a day and the hours that became part of it; the hour, for one that is kept."""
    if period.length_s == HOUR_S and period in buckets.of:
        return period
    return Period(DAY_S, period.begin_unix_s // DAY_S * DAY_S)


def use_key(period: Period) -> str:
    return f"{BILLS}{_NAMES[period.length_s]}/{period.begin_unix_s}"


_Whole = Annotated[int, Meta(ge=0)]
_Four = tuple[_Whole, _Whole, _Whole, _Whole]


class UseRecord(Struct, frozen=True):
    """An hour or a day: microseconds, and bytes times microseconds, in whole numbers.

    A row begins with a function, a model and a type of GPU; `parts` has the rest of each row.
    """

    rows: tuple[tuple[str, ModelId, str, _Whole, _Whole, _Whole, _Whole, _Whole, _Whole], ...]
    parts: tuple[_Four, ...]
    gpus: tuple[tuple[str, _Whole, _Whole, _Whole, _Whole], ...]


_RECORDS = json.Decoder(UseRecord)


def use_record(bucket: UseBucket) -> Mapping[str, object]:
    """What a UseRecord is read from."""
    return {
        "rows": [[*key, *amounts[:LOADING]] for key, amounts in bucket.rows.items()],
        "parts": [amounts[LOADING:] for amounts in bucket.rows.values()],
        "gpus": [[gpu_type, *amounts] for gpu_type, amounts in bucket.gpus.items()],
    }


def use_bucket(value: bytes) -> UseBucket:
    record = read(_RECORDS, value)
    if len(record.rows) != len(record.parts):
        raise BadValue(f"{len(record.rows)} rows and {len(record.parts)} parts")
    bucket = UseBucket()
    for (function, model, gpu_type, *amounts), rest in zip(record.rows, record.parts, strict=True):
        bucket.rows[UseKey(function, model, gpu_type)] = [*amounts, *rest]
    for gpu_type, *amounts in record.gpus:
        bucket.gpus[gpu_type] = amounts
    return bucket


def _period(key: str) -> Period:
    kind, _, begin = key.removeprefix(BILLS).partition("/")
    begin_unix_s = natural(begin, _DIGITS)
    if kind not in _KINDS or begin_unix_s is None:
        raise BadValue("neither an hour nor a day")
    return Period(_KINDS[kind], begin_unix_s)
