"""The terms that operators set, as they are stored: one key an owner."""

import json

from scheduler.model.errors import BadValue
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.terms_bounds import check_terms
from scheduler.store.stored_records import UNREADABLE, BadRecord, StoredRecord, key
from scheduler.wire.codec import Codec

TERMS = "terms/"
_TERMS: Codec[OwnerTerms] = Codec(OwnerTerms)


def terms_key(owner: str) -> str:
    """The key of an owner's terms."""
    return key(TERMS, owner)


def terms_record(terms: OwnerTerms) -> StoredRecord:
    """The terms, without those that are as usual."""
    record: StoredRecord = _TERMS.to_plain(terms)
    return record


def owner_terms(value: bytes) -> OwnerTerms:
    """Terms as they were stored."""
    try:
        return check_terms(_TERMS.from_plain(json.loads(value)))
    except (*UNREADABLE, BadValue) as error:
        raise BadRecord(str(error)) from error
