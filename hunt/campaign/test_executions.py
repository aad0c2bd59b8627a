"""What functions noted of the calls that they begin, as rounds see it."""

from pathlib import Path

from hunt.campaign.campaign_functions import Executions, executions_file


def test_executions_are_those_since_the_last_look_with_their_number_in_all(tmp_path: Path) -> None:
    with executions_file(tmp_path).open("a") as noted:
        executions = Executions(tmp_path)
        noted.write("sync-1\nplain-2\nsync-3")
        noted.flush()
        assert executions.look() == {"sync-1": 1, "plain-2": 1}
        noted.write("4\nsync-1\n")
        noted.flush()
        assert executions.look() == {"sync-34": 1, "sync-1": 2}
        assert executions.look() == {}
