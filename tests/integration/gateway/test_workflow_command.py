"""`gpufaas workflow` against a gateway."""

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest

from gpufaas.cli import main
from tests.kit.fakes.fake_function import echoes, says
from tests.kit.worlds.gateway_world import PASSWORD, USER
from tests.kit.worlds.workflow_world import WorkflowWorld, says_json, workflow_world

FILE = """
workflow: w
slo_ms: 60000
stages:
  first: {function: a, retries: 1}
  last: {function: b, after: first, when: status == 200}
"""


class Command:
    """Runs the command, and keeps what it printed."""

    def __init__(
        self, flows: WorkflowWorld, folder: Path, capture: pytest.CaptureFixture[str]
    ) -> None:
        url = flows.world.gateway.url.replace("://", f"://{USER}:{PASSWORD.replace(' ', '%20')}@")
        self._options = ["--gateway", url]
        self._capture = capture
        self.file = folder / "flow.yml"
        self.file.write_text(FILE)

    async def run(self, line: str) -> tuple[int, str, str]:
        """The exit code, the output, and the errors."""
        words = ["workflow", *shlex.split(line), *self._options]
        code = await asyncio.to_thread(main, words)
        shown = self._capture.readouterr()
        return code, shown.out, shown.err


async def test_workflow_is_deployed_called_shown_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = {"a": says_json(b'{"x": 1}'), "b": echoes}
    async with workflow_world(tmp_path, functions) as flows:
        command = Command(flows, tmp_path, capsys)
        code, out, _ = await command.run(f"deploy {command.file}")
        assert (code, out.splitlines()[0].split(";")[0]) == (0, "deployed w.openfaas-fn")
        assert "gpufaas workflow invoke w.openfaas-fn --body @FILE" in out
        assert f"{flows.world.gateway.url}/workflow/w.openfaas-fn" in out
        assert PASSWORD not in out
        code, out, _ = await command.run("list")
        assert (code, out.splitlines()[1].split()) == (0, ["w", "openfaas-fn", "2", "60000", "ms"])
        assert await command.run("""invoke w --body '{"n": 2}'""") == (0, '{"x": 1}', "")
        assert flows.got["a"][0].header("content-type") == "application/json"
        assert flows.bodies("a") == [b'{"n": 2}']
        with monkeypatch.context() as terminal:
            terminal.setattr(sys.stdout, "isatty", lambda: True)
            assert await command.run("invoke w --body '{}'") == (0, '{"x": 1}\n', "")
        flows.got["a"].pop()
        code, out, _ = await command.run("invoke w --async -n openfaas-fn")
        assert (code, len(out)) == (0, 37)
        code, out, _ = await command.run("get w")
        assert code == 0
        assert "when status == 200" in out
        assert "%" in out
        code, out, _ = await command.run("logs w")
        assert "  first: after " in out
        assert ", SLO met" in out
        assert json.loads((await command.run("logs w --json"))[1])["runs"]
        assert await command.run("remove w") == (0, "removed w\n", "")
        code, _, err = await command.run("get w")
        assert (code, "workflow w is not deployed" in err) == (2, True)


async def test_bad_file_is_reported_with_its_name_and_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with workflow_world(tmp_path, {"a": says()}) as flows:
        command = Command(flows, tmp_path, capsys)
        code, _, err = await command.run(f"deploy {command.file}")
        assert code == 2
        assert f"{command.file}:6: last: function: function b is not deployed" in err
        code, _, err = await command.run(f"deploy {tmp_path}/none.yml")
        assert (code, "No such file" in err) == (2, True)


async def test_failed_call_says_which_stage_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with workflow_world(tmp_path, {"a": says(b"no", 422), "b": says()}) as flows:
        command = Command(flows, tmp_path, capsys)
        await command.run(f"deploy {command.file}")
        code, out, err = await command.run("invoke w --body hello --content-type text/plain")
        assert (code, out) == (1, "no")
        assert err == "w answered 422, from the stage first\n"
        (tmp_path / "body").write_bytes(b"from a file")
        await command.run(f"invoke w --body @{tmp_path}/body")
        assert [one.header("content-type") for one in flows.got["a"]] == [
            "text/plain",
            "application/octet-stream",
        ]
        assert flows.bodies("a")[1] == b"from a file"
