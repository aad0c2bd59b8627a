"""Settings from `gpufaas.toml`, `GPUFAAS_*` and flags: later ones win, unknown ones stop the start.

A key of the file is `policy`, or `listen` in the table `[scheduler]`; in the environment these are
`GPUFAAS_POLICY` and `GPUFAAS_SCHEDULER_LISTEN`.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from cache_manager import eviction, exits
from common import numerals
from common.addresses import host_and_port
from common.errors import BadAddress, BadSize
from common.gpu_wishes import PROCESS, RUNTIMES
from common.numerals import parse_size
from gateway_ext.settings import GatewaySettings
from gpufaas.errors import CommandError
from gpufaas.log_format import FORMATS
from scheduler import policies
from scheduler.settings import Billing, Etcd, Serving, Settings

_FILE = "gpufaas.toml"
_SYSTEM_FILE = Path("/etc/gpufaas") / _FILE
_PREFIX = "GPUFAAS"
_SERVICE_LINK = re.compile(
    r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP)(_PROTO|_PORT|_ADDR)?$"
)

_Settings = TypeVar("_Settings")


# Workers import torch at the node's start, or for the first function that uses a GPU.
PREPARE_CHOICES = AT_START, FIRST_USE = "start", "first-use"


@dataclass(frozen=True, slots=True)
class StackNode:
    """The node of `gpufaas up`; the fields are options of `gpufaas gpu-manager`."""

    devices: str = "auto"
    gpu_memory: str = ""
    store_memory: str = ""
    host_eviction: str = "lru"
    gpu_overlap: int = 1
    gpu_concurrency: int = 1
    gpu_slots: int = 1
    gpu_vcpus: str = ""
    spare_contexts: str = ""
    runtime: str = PROCESS
    emulate_load: str = "0"
    emulate_run: str = "0"
    emulate_disk: str = "0"
    emulate_pcie: str = "0"
    emulate_context: str = "0"
    spill: str = ""
    prepare: str = FIRST_USE
    metrics: str = "127.0.0.1:7701"


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Traces of calls: how many the gateway keeps, and the collector to which they are sent.

    `endpoint` is the collector's URL (OTLP over HTTP), or empty; each line of `headers_file` is
    `Name: value`. `ratio` is the share of calls without a trace context that are sent.
    """

    endpoint: str = ""
    headers_file: str = ""
    ratio: float = 1.0
    keep: int = 2_000


@dataclass(frozen=True, slots=True)
class AllSettings:
    """All settings of the file; every command takes its tables."""

    policy: str = "lalbo3"
    eviction: str = "lru"
    exit_rule: str = "never"
    log_format: str = "text"
    parameters: Mapping[str, float] = field(default_factory=dict)
    scheduler: Serving = field(default_factory=Serving)
    etcd: Etcd = field(default_factory=Etcd)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    node: StackNode = field(default_factory=StackNode)
    tracing: TraceSettings = field(default_factory=TraceSettings)
    billing: Billing = field(default_factory=Billing)

    @property
    def of_scheduler(self) -> Settings:
        return Settings(
            self.policy,
            self.eviction,
            self.exit_rule,
            self.parameters,
            self.scheduler,
            self.etcd,
            self.billing,
        )


def read_settings(
    config: str | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> AllSettings:
    """All settings; CommandError names the wrong key and its source.

    Flags of a table have dotted keys (`scheduler.listen`); the value None means that a flag is
    absent. Others, as `config`, are no settings.
    """
    settings = AllSettings()
    path = settings_file(config, environment)
    if path is not None:
        settings = _with(settings, _parsed(path), str(path))
    settings = _with_environment(settings, environment)
    keys = {field.name for field in fields(settings)}
    given = {
        key: value
        for key, value in flags.items()
        if value is not None and (key in keys or "." in key)
    }
    for key, value in given.items():
        table, _, name = key.rpartition(".")
        settings = _with(settings, {table: {name: value}} if table else {name: value}, "the flags")
    return _checked(settings, given)


def _checked(settings: AllSettings, flags: Mapping[str, object]) -> AllSettings:
    policies.make(settings.policy, settings.parameters)
    eviction.make(settings.eviction)
    exits.make(settings.exit_rule)
    eviction.make(settings.node.host_eviction)
    for key, choices in (("prepare", PREPARE_CHOICES), ("runtime", RUNTIMES)):
        value = getattr(settings.node, key)
        if value not in choices:
            raise CommandError(f"[node] {key} = {value!r}: {' or '.join(choices)} is expected")
    for table, listen in (
        ("scheduler", settings.scheduler.listen), ("gateway", settings.gateway.listen),
    ):  # fmt: skip
        _check_address("--listen" if f"{table}.listen" in flags else f"[{table}] listen", listen)
    if settings.node.metrics:
        _check_address("[node] metrics", settings.node.metrics)
    _check_etcd(settings.etcd)
    if settings.log_format not in FORMATS:
        wanted = " or ".join(FORMATS)
        raise CommandError(f"log_format = {settings.log_format!r}: {wanted} is expected")
    if settings.billing.write_s <= 0:
        raise CommandError("[billing] write_s: above 0")
    if settings.tracing.ratio > 1:
        raise CommandError("[tracing] ratio: from 0 to 1")
    return settings


def _check_address(key: str, address: str) -> None:
    try:
        host_and_port(address)
    except BadAddress as error:
        raise CommandError(f"{key}: {error}") from error


def _check_etcd(etcd: Etcd) -> None:
    """Refuse incomplete credentials, and credentials that would not be used."""
    if bool(etcd.cert) != bool(etcd.key):
        raise CommandError("[etcd] cert and key go together")
    if bool(etcd.user) != bool(etcd.password_file):
        raise CommandError("[etcd] user and password_file go together")
    credentials = [name for name in ("ca", "cert", "key", "user") if getattr(etcd, name)]
    if credentials and (etcd.start or not etcd.endpoints):
        raise CommandError(f"[etcd] {', '.join(credentials)}: for endpoints, and none is named")
    private = all(endpoint.startswith("https://") for endpoint in etcd.endpoints)
    if {"ca", "cert"} & set(credentials) and not private:
        raise CommandError("[etcd] ca, cert and key are for endpoints that begin with https://")


def settings_file(config: str | None, environment: Mapping[str, str]) -> Path | None:
    """The named file, or the first default file that exists."""
    named = config or environment.get(f"{_PREFIX}_CONFIG")
    if named:
        return Path(named)
    return next((path for path in (Path(_FILE), _SYSTEM_FILE) if path.is_file()), None)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number without end
        raise CommandError(f"{path}: {error}") from error


def _with(settings: _Settings, table: Mapping[str, object], where: str) -> _Settings:
    assert is_dataclass(settings), "settings are dataclasses"
    assert not isinstance(settings, type), "settings are instances"
    kinds = get_type_hints(type(settings))
    keys = [field.name for field in fields(settings)]
    changed: dict[str, object] = {}
    for name, value in table.items():
        if name not in keys:
            raise CommandError(f"{where}: unknown key {name!r}; known: {', '.join(keys)}")
        now = getattr(settings, name)
        if is_dataclass(now) and not isinstance(now, type):
            if not isinstance(value, Mapping):
                raise CommandError(f"{where}: {name} is a table")
            changed[name] = _with(now, value, f"{where}, [{name}]")
        else:
            changed[name] = _value(kinds[name], name, value, where)
    return replace(settings, **changed)


def _with_environment(settings: AllSettings, environment: Mapping[str, str]) -> AllSettings:
    """The settings, changed by variables; unknown ones are refused only within a table's prefix.

    Other variables with our prefix belong to the shim.
    """
    for setting in fields(settings):
        now = getattr(settings, setting.name)
        variable = f"{_PREFIX}_{setting.name.upper()}"
        if not is_dataclass(now):
            text = environment.get(variable)
            if text is not None:
                settings = _with(settings, {setting.name: text}, variable)
            continue
        for name, text in sorted(environment.items()):
            # Kubernetes sets such variables for a service that has a table's name.
            is_link = _SERVICE_LINK.search(name) or text.startswith(("tcp://", "udp://"))
            if name.startswith(f"{variable}_") and not is_link:
                key = name.removeprefix(f"{variable}_").lower()
                settings = _with(settings, {setting.name: {key: text}}, name)
    return settings


# -- values -------------------------------------------------------------------------------------


def _value(kind: object, name: str, value: object, where: str) -> object:
    """The value with its field's type; the environment and flags give text for every type."""
    read = _READERS[kind]
    try:
        if name.endswith("_bytes") and isinstance(value, str):
            return parse_size(value)
        made = read(value)
        if isinstance(made, int | float) and not 0 <= made < float("inf"):
            raise ValueError("it may not be negative")
    except (ValueError, TypeError, OverflowError, BadSize) as error:
        raise CommandError(f"{where}: {name} = {value!r}: {error}") from error
    return made


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is expected")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError("a whole number is expected")
    return numerals.whole(value) if isinstance(value, str) else value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError("a number is expected")
    return numerals.number(value) if isinstance(value, str) else float(value)


def _truth(value: object) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    truth = value if isinstance(value, bool) else words.get(str(value).lower())
    if truth is None:
        raise TypeError("true or false is expected")
    return truth


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list | tuple):
        raise TypeError("a list of texts is expected")
    return tuple(_text(item) for item in value)


def numbers(value: object) -> dict[str, float]:
    """A table of numbers, or `name=number,name=number`."""
    if isinstance(value, str):
        pairs = [part.partition("=") for part in _texts(value)]
        return {name.strip(): _as_written(number) for name, _, number in pairs}
    if not isinstance(value, Mapping):
        raise TypeError("a table of numbers is expected")
    return {_text(name): number for name, number in value.items()}


def _as_written(number: str) -> float:
    try:
        return numerals.whole(number.strip())
    except ValueError:
        return numerals.number(number.strip())


_READERS: Mapping[object, Callable[[object], object]] = {
    str: _text,
    int: _whole,
    float: _number,
    bool: _truth,
    tuple[str, ...]: _texts,
    Mapping[str, float]: numbers,
}
