"""The extras of all deployments, in one file that is replaced as a whole."""

import json
import threading
from pathlib import Path

from gateway_ext.bounded_json import MOST_OF_PROVIDERS
from gateway_ext.errors import BadRequest, ProviderFailed, TooLarge
from gateway_ext.model import FunctionId
from gateway_ext.openfaas.json_fields import Fields
from gateway_ext.providers.atomic_file import put
from gateway_ext.providers.upstream.deployment_extras import NOTHING, Extras, extras_json, extras_of


class ExtrasFile:
    """Extras by function; a change is on disk when `put` returns.

    `put` waits for the disk, so it is called in threads; a lock orders the writes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = threading.Lock()
        self._extras = _read(path)

    def __getitem__(self, function: FunctionId) -> Extras:
        return self._extras.get(function, NOTHING)

    def functions(self) -> list[FunctionId]:
        """Functions that have extras."""
        return sorted(self._extras)

    def put(self, function: FunctionId, extras: Extras) -> None:
        """Store the extras of a function; empty extras delete its entry."""
        with self._writing:
            if self[function] == extras:
                return
            changed = dict(self._extras)
            changed.pop(function, None)
            if extras != NOTHING:
                changed[function] = extras
            _write(self._path, changed)
            self._extras = changed


def _read(path: Path) -> dict[FunctionId, Extras]:
    try:
        sent = Fields.of(path.read_bytes(), MOST_OF_PROVIDERS)
        found = {}
        for each in sent.many("functions"):
            fields = Fields(each)
            function = FunctionId(fields.required("namespace"), fields.required("name"))
            found[function] = extras_of(fields)
    except FileNotFoundError:
        return {}
    except (BadRequest, TooLarge, AttributeError) as error:
        raise ProviderFailed(f"{path} is damaged: {error}; move it away to continue") from error
    return found


def _write(path: Path, extras: dict[FunctionId, Extras]) -> None:
    functions = [
        {"namespace": id_.namespace, "name": id_.name, **extras_json(extras[id_])}
        for id_ in sorted(extras)
    ]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    put(path, json.dumps({"functions": functions}, indent=1).encode(), 0o600)
