"""What strangers send is refused under `python -O` too: the product's asserts guard none of it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Where the tests of attacks are, and the words in their names.
_WHERE = """
    common gpu_manager/data gpu_manager/server gpu_manager/wire gpu_manager/test_credentials.py
    gpu_manager/worker/calls gpu_manager/worker/program gpu_manager/worker/test_orders.py
    gateway_ext/openfaas gateway_ext/runtime gateway_ext/test_hostile_requests.py
    gateway_ext/test_refusals.py gateway_ext/jobs/test_addresses.py
    gateway_ext/workflows/test_workflow_file.py scheduler/wire scheduler/service/nodes
    scheduler/service/http/test_hostile_requests.py torch_shim/wire torch_shim/data
    torch_shim/remote""".split()  # noqa: SIM905 - reads better
_HUNT = ("hunt/parsers/test_parser_contracts.py", "hunt/fuzz")
_WORDS = """refused refuses hostile forged stranger lies garbage malformed invalid wrong bad_ absurd
    too_ not_allowed as_sent unseen writes""".split()  # noqa: SIM905 - as above
_FEWEST = 500  # tests that there are; without a word that their names have, some are missing

_PLANTED = """
from common.addresses import UnixAddress

def test_product_has_no_asserts():
    assert UnixAddress("@abstract").path.name == "@abstract"

def test_tests_have_theirs():
    assert UnixAddress("@abstract").path.name == "another"
"""


def optimised(*arguments: str) -> str:
    """What pytest says in the end about these tests of an optimised product."""
    plugin = "-p", "tests.kit.optimised_product", "-p", "no:cacheprovider"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "-n", "0", "-q", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout[-4000:] + done.stderr[-2000:]


def test_asserts_of_the_product_are_gone_and_those_of_tests_stay(tmp_path: Path) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text(_PLANTED)
    said = optimised("-c", str(ROOT / "pyproject.toml"), str(planted))
    assert "1 failed, 1 passed" in said, said
    assert "test_tests_have_theirs" in said


def test_attacks_are_refused_when_the_product_runs_without_asserts() -> None:
    said = optimised(*(f"tests/unit/{each}" for each in _WHERE), *_HUNT, "-k", " or ".join(_WORDS))
    last = said.strip().splitlines()[-1]
    assert "failed" not in last, said
    assert "error" not in last, said
    passed = re.search(r"(\d+) passed", last)
    assert passed is not None, said
    assert int(passed[1]) > _FEWEST
