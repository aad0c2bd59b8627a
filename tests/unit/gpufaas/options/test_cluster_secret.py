"""Where commands look for the cluster's secret."""

from pathlib import Path

from gpufaas.options.shared import cluster_secret, default_secret_file


def test_secret_file_is_the_one_that_schedulers_use() -> None:
    environment = {"GPUFAAS_STATE": "/state", "GPUFAAS_SCHEDULER_SECRET_FILE": "/run/secrets/it"}
    assert default_secret_file(environment) == Path("/run/secrets/it")
    assert default_secret_file({"GPUFAAS_STATE": "/state"}) == Path("/state/secret")


def test_commands_read_the_secret_of_the_environment_unless_another_is_named(
    tmp_path: Path,
) -> None:
    files = [tmp_path / name for name in ("one", "other")]
    for file in files:
        file.write_bytes(file.name.encode() * 16)
        file.chmod(0o400)
    environment = {"GPUFAAS_SCHEDULER_SECRET_FILE": str(files[0])}
    assert cluster_secret(None, environment) == files[0].read_bytes()
    assert cluster_secret(str(files[1]), environment) == files[1].read_bytes()
