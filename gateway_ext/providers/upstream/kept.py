"""Our part of every deployment, in one small file that is replaced as a whole."""

import json
import os
import threading
from pathlib import Path

from gateway_ext.errors import BadRequest, ProviderFailed
from gateway_ext.fields import Fields
from gateway_ext.model import FunctionId
from gateway_ext.providers.upstream.extras import NOTHING, Extras, extras_json, extras_of


class Kept:
    """Extras by function; what was set is on disk when the call returns.

    Writing waits for the disk, so it is done in threads, one after another.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = threading.Lock()
        self._extras = _read(path)

    def __getitem__(self, function: FunctionId) -> Extras:
        return self._extras.get(function, NOTHING)

    def functions(self) -> list[FunctionId]:
        """Those of which something is kept."""
        return sorted(self._extras)

    def put(self, function: FunctionId, extras: Extras) -> None:
        """Keep this for the function, and nothing where that is nothing."""
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
        sent = Fields.of(path.read_bytes())
        found = {}
        for each in sent.many("functions"):
            fields = Fields(each)
            function = FunctionId(fields.required("namespace"), fields.required("name"))
            found[function] = extras_of(fields)
    except FileNotFoundError:
        return {}
    except (BadRequest, AttributeError) as error:
        raise ProviderFailed(f"{path} is damaged: {error}; move it away to go on") from error
    return found


def _write(path: Path, extras: dict[FunctionId, Extras]) -> None:
    functions = [
        {"namespace": id_.namespace, "name": id_.name, **extras_json(extras[id_])}
        for id_ in sorted(extras)
    ]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        json.dump({"functions": functions}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
