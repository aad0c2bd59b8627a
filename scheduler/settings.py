"""The settings of a scheduler: one frozen value, built at the entry point."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.model.values import StandingTerms

_DAY_S = 86_400.0
# For how many calls a lease may be kept: enough that the time ends it first.
_STANDING_CALLS = 10_000
# How long it may be kept while others wait: decision 24 has what it costs them.
_STANDING_SLICE_S = 0.03


@dataclass(frozen=True, slots=True)
class Serving:
    """How one scheduler serves; `advertise` is the URL under which others reach it.

    Requests wait `attach_grace_s` for the first GPU after a start, since GPU managers need a moment
    to attach; later requests are refused at once while there is no GPU. Decisions are explained
    with their candidates while there are at most `explain_slots` slots, since an explanation reads
    every slot. `record` names a file to which every event is appended, for a replay. At most
    `metric_names` GPUs, models and functions each have metrics of their own. Metrics name functions
    and models of every tenant: they need credentials, unless `metrics_auth` is off. While nobody
    else waits, a gateway may keep a lease for `standing_s` (0: for one call, as the thesis has it).
    """

    listen: str = "127.0.0.1:7700"
    advertise: str = ""
    name: str = ""
    secret_file: str = ""
    log_level: str = "info"
    max_waiting: int = 10_000
    largest_gpu_bytes: int = 0
    attach_grace_s: float = 5.0
    history: int = 2_000
    explain_slots: int = 64
    record: str = ""
    metrics_auth: bool = True
    metric_names: int = 1_000
    standing_s: float = 5.0

    @property
    def standing(self) -> StandingTerms | None:
        if self.standing_s <= 0.0:
            return None
        return StandingTerms(self.standing_s, _STANDING_CALLS, _STANDING_SLICE_S)


@dataclass(frozen=True, slots=True)
class Etcd:
    """Where the state is kept: at these endpoints, in an etcd child process, or only in memory.

    `ca`, `cert` and `key` are PEM files for https endpoints; the password's file holds only the
    password. The profile of a model that was not used for `models_keep_days` is deleted
    (0: never).
    """

    endpoints: tuple[str, ...] = ()
    start: bool = False
    data_dir: str = ""
    prefix: str = "/gpufaas/"
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""
    models_keep_days: float = 30.0

    @property
    def models_keep_s(self) -> float:
        """The same in seconds; 0 days mean for ever."""
        return self.models_keep_days * _DAY_S if self.models_keep_days else math.inf


@dataclass(frozen=True, slots=True)
class Billing:
    """How the bill is kept, and the prices, in `currency`; without prices no cost is shown.

    Hours are kept for two days, then their days for `keep_days`. What was counted is written
    every `write_s`; a crash loses what was counted since. Prices are for one second of a slot (not
    while it was kept and nobody waited), and
    for one GiB for one second: in GPU memory `used` by a lease or `idle`, an empty process's
    (`context`), in a node's memory (`host`) or on its `disk`. `gpu_types` has factors for the
    prices of GPUs of these types.
    """

    write_s: float = 5.0
    keep_days: float = 90.0
    currency: str = ""
    gpu_second: float = 0.0
    used_gib_second: float = 0.0
    idle_gib_second: float = 0.0
    context_gib_second: float = 0.0
    host_gib_second: float = 0.0
    disk_gib_second: float = 0.0
    gpu_types: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """One scheduler; its tables and keys are those of `gpufaas.toml`.

    Models that must make room leave by the rule `eviction`, idle ones in time by `exit_rule`.
    """

    policy: str = "lalbo3"
    eviction: str = "lru"
    exit_rule: str = "never"
    parameters: Mapping[str, float] = field(default_factory=dict)
    scheduler: Serving = field(default_factory=Serving)
    etcd: Etcd = field(default_factory=Etcd)
    billing: Billing = field(default_factory=Billing)
