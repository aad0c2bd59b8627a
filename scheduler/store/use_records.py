"""The hours and days of the bill as they are stored: read back, and written where they changed."""

import json
from logging import Logger

from cache_manager.model.ids import ModelId
from scheduler.core.billing.charges import CHARGES
from scheduler.core.billing.use_buckets import (
    DAY_S,
    HOUR_S,
    Period,
    UseBucket,
    UseBuckets,
    UseKey,
)
from scheduler.store.datastore import Fence, Store
from scheduler.store.stored_records import UNREADABLE, BadRecord, StoredRecord, encoded

BILLS = "bills/"
_KINDS = {"hour": HOUR_S, "day": DAY_S}
_DIGITS = 12  # of seconds since 1970
_NAMES = {length_s: kind for kind, length_s in _KINDS.items()}


async def read_use(store: Store, buckets: UseBuckets, log: Logger) -> None:
    """Read what earlier leaders counted; a bad record is logged and left out."""
    for key, value in (await store.list(BILLS)).values.items():
        try:
            buckets.of[_period(key)] = use_bucket(value)
        except BadRecord as error:
            log.warning("ignoring %s in the datastore: %s", key, error)


async def write_use(store: Store, buckets: UseBuckets, fence: Fence) -> int:
    """Write the changed hours and days, and delete those that are gone; returns the bytes.

    What could not be written stays changed. An hour and its day are written together, so that
    nothing is counted twice or lost when an hour becomes part of its day.
    """
    changed = list(buckets.changed)
    puts = {
        use_key(period): encoded(use_record(buckets.of[period]))
        for period in changed
        if period in buckets.of
    }
    deletes = [use_key(period) for period in changed if period not in buckets.of]
    written = 0
    for day in sorted({period.begin_unix_s // DAY_S for period in changed}):
        mine = {use_key(each) for each in changed if each.begin_unix_s // DAY_S == day}
        batch = {key: value for key, value in puts.items() if key in mine}
        await store.write(batch, [key for key in deletes if key in mine], fence)
        written += sum(map(len, batch.values()))
        for period in changed:
            if period.begin_unix_s // DAY_S == day:
                del buckets.changed[period]
    return written


def use_key(period: Period) -> str:
    """The key of an hour or a day."""
    return f"{BILLS}{_NAMES[period.length_s]}/{period.begin_unix_s}"


def use_record(bucket: UseBucket) -> StoredRecord:
    """An hour or a day: microseconds, and bytes times microseconds, in whole numbers."""
    return {
        "rows": [[*key, *amounts] for key, amounts in bucket.rows.items()],
        "gpus": [[gpu_type, *amounts] for gpu_type, amounts in bucket.gpus.items()],
    }


def use_bucket(value: bytes) -> UseBucket:
    """An hour or a day as it was stored."""
    bucket = UseBucket()
    try:
        found = json.loads(value)
        for function, model, gpu_type, *amounts in found["rows"]:
            key = UseKey(str(function), ModelId(str(model)), str(gpu_type))
            bucket.rows[key] = _whole(amounts, CHARGES)
        for gpu_type, *amounts in found["gpus"]:
            bucket.gpus[str(gpu_type)] = _whole(amounts, 4)
    except UNREADABLE as error:
        raise BadRecord(str(error)) from error
    return bucket


def _period(key: str) -> Period:
    kind, _, begin = key.removeprefix(BILLS).partition("/")
    if kind not in _KINDS or not (begin.isascii() and begin.isdecimal()) or len(begin) > _DIGITS:
        raise BadRecord("neither an hour nor a day")
    return Period(_KINDS[kind], int(begin))


def _whole(amounts: list[object], count: int) -> list[int]:
    if len(amounts) != count or not all(type(each) is int and each >= 0 for each in amounts):
        raise BadRecord(f"{count} whole numbers are expected")
    return [int(str(each)) for each in amounts]
