"""The part of a deployment that is not forwarded: its file, and answers completed with it."""

import hashlib
import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment, FunctionId, Resources
from gateway_ext.providers.disk import put_file


@dataclass(frozen=True, slots=True)
class Extras:
    """The part of one deployment that stays with this gateway.

    `injected` names the variables that were added, `replaced` has the function's own variables of
    the same names, and `digest` differs when other variables would be added today.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    limits_gpu: str = ""
    requests_gpu: str = ""
    injected: tuple[str, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""


NOTHING = Extras()
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    msgspec.ValidationError,
)


def parted(
    wanted: Deployment, strip: Collection[str], injected: Mapping[str, str]
) -> tuple[Deployment, Extras]:
    """Split a deployment: keys that begin with one of `strip`, and amounts of GPUs, stay here."""
    prefixes = tuple(strip)
    environment = wanted.environment
    extras = Extras(
        labels=_beginning(wanted.labels, prefixes),
        annotations=_beginning(wanted.annotations, prefixes),
        limits_gpu=wanted.limits.gpu if wanted.limits else "",
        requests_gpu=wanted.requests.gpu if wanted.requests else "",
        injected=tuple(sorted(injected)),
        replaced={name: environment[name] for name in sorted(injected) if name in environment},
        digest=digest(injected),
    )
    forwarded = replace(
        wanted,
        labels=_without(wanted.labels, extras.labels),
        annotations=_without(wanted.annotations, extras.annotations),
        limits=_with_gpu(wanted.limits, ""),
        requests=_with_gpu(wanted.requests, ""),
        environment={**environment, **injected},
    )
    return forwarded, extras


def merged(forwarded: Deployment, extras: Extras) -> Deployment:
    """The inverse of `parted`: the deployment as it was sent to this gateway."""
    own = _without(forwarded.environment, dict.fromkeys(extras.injected, ""))
    return replace(
        forwarded,
        labels={**forwarded.labels, **extras.labels},
        annotations={**forwarded.annotations, **extras.annotations},
        limits=_with_gpu(forwarded.limits, extras.limits_gpu),
        requests=_with_gpu(forwarded.requests, extras.requests_gpu),
        environment={**own, **extras.replaced},
    )


def digest(injected: Mapping[str, str]) -> str:
    """A digest of the injected variables, which hides the credentials in them."""
    if not injected:
        return ""
    return hashlib.sha256(json.dumps(sorted(injected.items())).encode()).hexdigest()


def _beginning(values: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, value in values.items() if key.startswith(prefixes)}


def _without(values: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in values.items() if key not in others}


def _with_gpu(amounts: Resources | None, gpu: str) -> Resources | None:
    completed = replace(amounts or Resources(), gpu=gpu)
    return completed if completed != Resources() else None


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
    extras = {}
    try:
        for entry in json.loads(path.read_bytes())["functions"]:
            names = [entry.pop("namespace"), entry.pop("name")]
            extras[msgspec.convert(names, FunctionId)] = msgspec.convert(entry, Extras)
    except FileNotFoundError:
        return {}
    except _DAMAGE as error:
        raise ProviderFailed(f"{path} is damaged: {error}; move it away to continue") from error
    return extras


def _write(path: Path, extras: dict[FunctionId, Extras]) -> None:
    functions = [
        {"namespace": id_.namespace, "name": id_.name, **_filled_fields(extras[id_])}
        for id_ in sorted(extras)
    ]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    put_file(path, json.dumps({"functions": functions}, indent=1).encode(), 0o600)


def _filled_fields(extras: Extras) -> dict[str, object]:
    return {name: value for name, value in asdict(extras).items() if value}
