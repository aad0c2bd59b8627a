"""What `gpufaas bill` asks for and prints."""

import csv
import io
import json
from typing import Any

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.commands.bill import bill_csv, bill_text, seconds_ago
from gpufaas.errors import CommandError
from tests.kit.network.answering import answering

GIB_HOUR = (1 << 30) * 3600 * 1_000_000


def amounts(gpu_us: int, cost: float | None = None) -> dict[str, Any]:
    return {
        "gpu_us": gpu_us, "computing_us": 7_000, "loading_us": 500_000,
        "kept_us": gpu_us - 507_000, "kept_from_others_us": 0, "waiting_us": 1_000,
        "used_byte_us": GIB_HOUR, "idle_byte_us": 2 * GIB_HOUR,
        "context_byte_us": 0, "host_byte_us": GIB_HOUR // 2, "disk_byte_us": 0, "cost": cost,
    }  # fmt: skip


def a_bill(cost: float | None = None, currency: str = "") -> dict[str, Any]:
    return {
        "by": "function", "from_unix_s": 0, "to_unix_s": 7200.5, "currency": currency,
        "rows": [
            {"name": "team/f", "used": amounts(90_000_000, cost)},
            {"name": "", "used": amounts(0, cost)},
        ],
        "total": amounts(90_000_000, cost),
        "gpus": {
            "gpu_us": 7_200_000_000, "idle_gpu_us": 7_110_000_000, "byte_us": 16 * GIB_HOUR,
            "unused_byte_us": 10 * GIB_HOUR,
        },
    }  # fmt: skip


def test_bill_is_a_table_with_a_total_and_what_nobody_used() -> None:
    lines = bill_text(a_bill()).splitlines()
    assert lines[0] == "1970-01-01 00:00 to 1970-01-01 02:00 UTC; memory in GiB hours"
    assert lines[1].split() == [
        "FUNCTION", "COMPUTING", "LOADING", "KEPT", "WAITING",
        "USED", "IDLE", "CONTEXT", "HOST", "DISK",
    ]  # fmt: skip
    assert lines[2].split() == [
        "team/f", "0.007", "s", "0.500", "s", "1.5", "min", "0.001", "s",
        "1.0000", "2.0000", "0.0000", "0.5000", "0.0000",
    ]  # fmt: skip
    assert lines[3].startswith("(nobody)")
    assert lines[4].startswith("total")
    assert lines[5] == (
        "GPUs: 2.00 h, of which idle 1.98 h; memory 16.0000, of which unused 10.0000"
    )


def test_bill_has_a_column_of_costs_when_there_are_prices() -> None:
    lines = bill_text(a_bill(0.5, "EUR")).splitlines()
    assert lines[1].endswith("COST EUR")
    assert lines[2].endswith("0.5000")


def test_csv_has_whole_numbers() -> None:
    rows = list(csv.DictReader(io.StringIO(bill_csv(a_bill(0.5, "EUR")))))
    assert [row["function"] for row in rows] == ["team/f", ""]
    assert rows[0]["used_byte_us"] == str(GIB_HOUR)
    assert (rows[0]["gpu_us"], rows[0]["computing_us"]) == ("90000000", "7000")
    assert (rows[0]["cost"], rows[0]["currency"]) == ("0.5", "EUR")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("24h", 86_400), ("1.5d", 129_600), ("30s", 30)]
)
def test_time_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert seconds_ago(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "24", "-1h", "nanh", "infd", "yesterday"])
def test_time_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="--since"):
        seconds_ago(text)


def test_command_asks_the_scheduler_and_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUFAAS_TOKEN", "t")
    with answering(200, a_bill()) as (url, asked):
        status = main(["bill", "--by", "namespace", "--since", "2h", "--json", "--scheduler", url])
    assert status == 0
    assert "by=namespace&last_s=7200" in asked[0]
    assert json.loads(capsys.readouterr().out) == a_bill()


def test_command_refuses_an_unknown_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bill", "--by", "planet"])
    assert ended.value.code == EXIT_BAD_USE
    assert "planet" in capsys.readouterr().err
