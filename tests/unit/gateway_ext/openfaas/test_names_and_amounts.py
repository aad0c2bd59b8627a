"""Names, durations and quantities as people write them."""

import pytest

from gateway_ext.errors import BadRequest
from gateway_ext.model import FunctionId
from gateway_ext.openfaas import quantities, valid_names


@pytest.mark.parametrize(
    ("name", "namespace", "found"),
    [
        ("f", "", FunctionId("openfaas-fn", "f")),
        ("f", "team", FunctionId("team", "f")),
        ("f.team", "", FunctionId("team", "f")),
        ("f.team", "team", FunctionId("team", "f")),
        ("My_fn-2", "", FunctionId("openfaas-fn", "My_fn-2")),
    ],
)
def test_a_function_is_found_by_how_it_is_named(
    name: str, namespace: str, found: FunctionId
) -> None:
    assert valid_names.function_id(name, namespace) == found


@pytest.mark.parametrize(
    ("name", "namespace"),
    [("", ""), ("f.", ""), (".f", ""), ("f.a.b", ""), ("f.a", "b"), ("a/b", ""), ("f", "a.b"),
     ("-f", ""), ("é", ""), ("f\n", ""), ("f" * 64, ""), ("..", "")],
)  # fmt: skip
def test_what_names_no_function_is_refused(name: str, namespace: str) -> None:
    with pytest.raises(BadRequest):
        valid_names.function_id(name, namespace)


def test_a_new_function_may_have_no_dot_and_is_refused_with_the_reason() -> None:
    with pytest.raises(BadRequest, match=r"'f\.x' may not contain a dot: in NAME\.NAMESPACE"):
        valid_names.new_function_id("f.x")


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "a/b", "a\0"])
def test_a_secret_is_named_by_no_path(name: str) -> None:
    with pytest.raises(BadRequest):
        valid_names.secret_name(name)


def test_a_secret_may_have_dots() -> None:
    assert valid_names.secret_name("tls.key") == "tls.key"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("1m30s", 90), ("250ms", 0.25), ("1h", 3600), ("1.5h", 5400),
     ("2h45m0.5s", 9900.5), ("10µs", 1e-5), ("10μs", 1e-5), ("0", 0), (" 5s ", 5)],
)  # fmt: skip
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert quantities.seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "5 s", "-5s", "1d", "1h-5m", "5sx", "1e3", "9" * 400, "9" * 60_000 + "m30s"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|too long"):
        quantities.seconds(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [("128Mi", 128 << 20), ("2GiB", 2 << 30), ("1.5GB", 1_500_000_000), ("1G", 10**9),
     ("512m", 512 << 20), ("1g", 1 << 30), ("100k", 100_000), ("100Ki", 102_400), ("1000", 1000),
     ("129e6", 129_000_000), ("1.5E3", 1500), ("1Pi", 1 << 50), ("1E", 10**18), ("1Ei", 1 << 60)],
)  # fmt: skip
def test_memory_is_read(text: str, found: int) -> None:
    assert quantities.memory_bytes(text) == found


@pytest.mark.parametrize(
    "text",
    ["", "Mi", "1X", "-1Gi", "0", "1 Gi B", "9" * 400 + "Gi", "2Ei", "1e99", "1e6Mi", "\uff11Mi",
     "9" * 32],
)  # fmt: skip
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"memory|byte"):
        quantities.memory_bytes(text)


@pytest.mark.parametrize(
    ("text", "found"), [("250m", 0.25), ("2", 2.0), ("0.5", 0.5), ("250000u", 0.25), ("1n", 1e-9)]
)
def test_cores_are_read(text: str, found: float) -> None:
    assert quantities.cpus(text) == found


@pytest.mark.parametrize("text", ["", "m", "0", "two", "1M", "0m", "\uff12", "9" * 9, "9" * 400])
def test_what_is_no_amount_of_cores_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"processor|above 0"):
        quantities.cpus(text)


@pytest.mark.parametrize(
    ("amount_bytes", "text"),
    [(16 << 30, "16 GiB"), (16_900_000_000, "15.7 GiB"), (512 << 20, "512 MiB"), (1536, "1.5 KiB"),
     (7, "7 B")],
)  # fmt: skip
def test_an_amount_of_memory_is_shown(amount_bytes: int, text: str) -> None:
    assert quantities.shown(amount_bytes) == text
