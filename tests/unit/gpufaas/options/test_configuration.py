"""Settings from the file, the environment and flags."""

from pathlib import Path

import pytest

from gpufaas.commands.scheduler import etcd_settings
from gpufaas.errors import CommandError
from gpufaas.options.configuration import read_settings
from scheduler.model.errors import BadParameter, UnknownPolicy
from scheduler.settings import Etcd, Settings
from tests.kit.outcomes import instead_of

FILE = """
policy = "netgain"
[parameters]
patience = 7
[scheduler]
listen = "0.0.0.0:80"
largest_gpu_bytes = "24GiB"
attach_grace_s = 2
[etcd]
endpoints = ["http://a:2379", "http://b:2379"]
"""


def written(folder: Path, text: str) -> str:
    path = folder / "gpufaas.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_settings_have_their_defaults_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_settings(None, {}, {"policy": None}).of_scheduler == Settings()


def test_file_changes_only_the_settings_that_it_names(tmp_path: Path) -> None:
    settings = read_settings(written(tmp_path, FILE), {}, {})
    assert (settings.policy, settings.parameters, settings.eviction) == (
        "netgain",
        {"patience": 7},
        "lru",
    )
    assert settings.scheduler.listen == "0.0.0.0:80"
    assert settings.scheduler.largest_gpu_bytes == 24 << 30
    assert settings.scheduler.attach_grace_s == 2.0
    assert settings.etcd.endpoints == ("http://a:2379", "http://b:2379")


def test_file_is_found_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 'policy = "lb"')
    monkeypatch.chdir(tmp_path)
    assert read_settings(None, {}, {}).policy == "lb"


def test_environment_goes_before_the_file_and_flags_before_both(tmp_path: Path) -> None:
    environment = {
        "GPUFAAS_CONFIG": written(tmp_path, FILE),
        "GPUFAAS_POLICY": "lalbo3",
        "GPUFAAS_PARAMETERS": "o3_limit=3",
        "GPUFAAS_SCHEDULER_LISTEN": "127.0.0.1:1",
        "GPUFAAS_SCHEDULER_MAX_WAITING": "5",
        "GPUFAAS_ETCD_START": "yes",
        "GPUFAAS_ENABLED": "1",
    }
    flags = {"scheduler.listen": "127.0.0.1:2", "etcd.endpoints": "http://c:1, http://d:2"}
    settings = read_settings(None, environment, flags)
    assert (settings.policy, settings.parameters) == ("lalbo3", {"o3_limit": 3})
    assert (settings.scheduler.listen, settings.scheduler.max_waiting) == ("127.0.0.1:2", 5)
    assert settings.etcd.start
    assert settings.etcd.endpoints == ("http://c:1", "http://d:2")


NONSENSE = (
    ("polcy = 'lb'", "unknown key 'polcy'"),
    ("[scheduler]\nport = 1", r"\[scheduler\]: unknown key 'port'; known: listen"),
    ("[schedule]\n", "unknown key 'schedule'"),
    ("scheduler = 1", "scheduler is a table"),
    ("policy = 3", "policy = 3: a text is expected"),
    ("[scheduler]\nmax_waiting = 'many'", "max_waiting = 'many'"),
    ("[scheduler]\nmax_waiting = -1", "may not be negative"),
    ("[scheduler]\nmax_waiting = true", "a whole number is expected"),
    ("[scheduler]\nattach_grace_s = nan", "may not be negative"),
    ("[etcd]\nstart = 'perhaps'", "true or false"),
    ("[scheduler]\nlisten = '7700'", "HOST:PORT is expected"),
    ("[scheduler]\nlisten = 'host:99999'", "HOST:PORT is expected"),
    ("[node]\nprepare = 'later'", "prepare = 'later': start or first-use is expected"),
    ("policy = ", "gpufaas.toml: "),
    ("[etcd]\ncert = 'c.pem'", "cert and key go together"),
    ("[etcd]\nuser = 'gpufaas'", "user and password_file go together"),
    ("[etcd]\nca = 'ca.pem'", "ca: for endpoints, and none is named"),
    ("[etcd]\nstart = true\nuser = 'u'\npassword_file = 'p'", "user: for endpoints"),
    ("[etcd]\nendpoints = ['http://a:1']\nca = 'ca.pem'", "begin with https://"),
    ("[etcd]\nmodels_keep_days = -1", "may not be negative"),
)


def test_start_is_stopped_when_the_file_makes_no_sense(tmp_path: Path) -> None:
    wrong = []
    for text, says in NONSENSE:
        file = written(tmp_path, text)
        if taken := instead_of(CommandError, read_settings, file, {}, {}, match=says):
            wrong.append((text, taken))
    assert wrong == []


ENTRY = ("ca", "cert", "key", "user", "password_file")


def entry_files(folder: Path) -> dict[str, str]:
    """What lets us in, as files; the user is a name."""
    for name in ENTRY:
        (folder / name).write_text(f"of {name}\n", encoding="utf-8")
    return {name: str(folder / name) for name in ENTRY} | {"user": "gpufaas"}


def entered(files: dict[str, str]) -> Etcd:
    """An etcd of two endpoints that requires all of these."""
    return Etcd(
        endpoints=("https://a:1", "https://b:1"),
        ca=files["ca"],
        cert=files["cert"],
        key=files["key"],
        user=files["user"],
        password_file=files["password_file"],
    )


def test_credentials_for_etcd_come_from_the_file_the_environment_or_flags_alike(
    tmp_path: Path,
) -> None:
    files = entry_files(tmp_path)
    endpoint = "https://a:2379"
    lines = "\n".join(f"{name} = '{value}'" for name, value in files.items())
    of_file = read_settings(
        written(tmp_path, f"[etcd]\nendpoints = ['{endpoint}']\n{lines}"), {}, {}
    )
    variables = {f"GPUFAAS_ETCD_{name.upper()}": value for name, value in files.items()}
    empty = written(tmp_path, "")
    of_environment = read_settings(empty, {"GPUFAAS_ETCD_ENDPOINTS": endpoint, **variables}, {})
    flags = {f"etcd.{name}": value for name, value in files.items()}
    of_flags = read_settings(empty, {}, {"etcd.endpoints": endpoint, **flags})
    assert of_file.etcd == of_environment.etcd == of_flags.etcd
    assert of_file.etcd.cert == str(tmp_path / "cert")


def test_entry_to_etcd_reaches_its_client(tmp_path: Path) -> None:
    files = entry_files(tmp_path)
    found = etcd_settings(entered(files))
    assert found.endpoints == ("https://a:1", "https://b:1")
    assert (found.user, found.password) == ("gpufaas", "of password_file")
    assert found.ca_file == tmp_path / "ca"
    assert (found.cert_file, found.key_file) == (tmp_path / "cert", tmp_path / "key")


@pytest.mark.parametrize("missing", [name for name in ENTRY if name != "user"])
def test_start_is_stopped_when_a_file_that_lets_us_in_is_missing(
    tmp_path: Path, missing: str
) -> None:
    files = entry_files(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(CommandError, match=missing):
        etcd_settings(entered(files))


def test_start_is_stopped_when_a_variable_of_ours_is_unknown() -> None:
    with pytest.raises(CommandError, match=r"GPUFAAS_SCHEDULER_PORT.*unknown key 'port'"):
        read_settings(None, {"GPUFAAS_SCHEDULER_PORT": "1"}, {})


def test_start_is_stopped_when_a_file_that_was_named_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file"):
        read_settings(str(tmp_path / "other.toml"), {}, {})


def test_start_is_stopped_when_there_is_no_such_policy_or_parameter() -> None:
    with pytest.raises(UnknownPolicy):
        read_settings(None, {}, {"policy": "best"})
    with pytest.raises(BadParameter):
        read_settings(None, {}, {"policy": "lb", "parameters": "o3_limit=3"})


@pytest.mark.parametrize("table", ["gateway", "scheduler"])
def test_address_is_refused_with_its_option_or_its_key(table: str) -> None:
    with pytest.raises(CommandError, match=r"^--listen: not an address"):
        read_settings(None, {}, {f"{table}.listen": "127.0.0.1"})
    variable = {f"GPUFAAS_{table.upper()}_LISTEN": "127.0.0.1"}
    with pytest.raises(CommandError, match=rf"^\[{table}\] listen: not an address"):
        read_settings(None, variable, {f"{table}.listen": None})


def test_service_links_of_kubernetes_are_passed_over() -> None:
    links = {
        "GPUFAAS_SCHEDULER_SERVICE_HOST": "10.0.0.7",
        "GPUFAAS_SCHEDULER_SERVICE_PORT": "7700",
        "GPUFAAS_SCHEDULER_SERVICE_PORT_HTTP": "7700",
        "GPUFAAS_GATEWAY_PORT": "tcp://10.0.0.8:8080",
        "GPUFAAS_GATEWAY_PORT_8080_TCP": "tcp://10.0.0.8:8080",
        "GPUFAAS_GATEWAY_PORT_8080_TCP_ADDR": "10.0.0.8",
        "GPUFAAS_GATEWAY_PORT_8080_TCP_PROTO": "tcp",
    }
    assert read_settings(None, links, {}) == read_settings(None, {}, {})


def test_prices_are_read_from_the_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "gpufaas.toml"
    file.write_text('[billing]\ncurrency = "EUR"\ngpu_types = { H200 = 2.5 }\n', encoding="utf-8")
    environment = {"GPUFAAS_BILLING_GPU_SECOND": "0.5"}
    billing = read_settings(str(file), environment, {}).of_scheduler.billing
    assert (billing.currency, billing.gpu_types, billing.gpu_second) == ("EUR", {"H200": 2.5}, 0.5)


def test_bill_that_would_be_written_all_the_time_is_refused() -> None:
    with pytest.raises(CommandError, match="write_s"):
        read_settings(None, {"GPUFAAS_BILLING_WRITE_S": "0"}, {})
