"""Which devices a node has: real GPUs through NVML, slices of them, or emulated ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml  # type: ignore[import-untyped]  # NVIDIA gives it no types
import pytest

from cache_manager.model.ids import NodeId
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.devices.host_memory import available_bytes
from gpu_manager.errors import BadSetting, NoDriver
from gpu_manager.node.host_gpus import check_named, choose_devices, closed_device_files
from tests.kit.fakes.fake_nvml import GIB, FakeGpu, FakeNvml

NODE = NodeId("n1")
NO_DRIVER = FakeNvml(init_error=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
XID, ECC = FakeNvml.nvmlEventTypeXidCriticalError, FakeNvml.nvmlEventTypeDoubleBitEccError


def three_gpus() -> FakeNvml:
    return FakeNvml(*(FakeGpu(f"GPU-{letter}") for letter in "abc"))


def partitioned() -> FakeNvml:
    slices = {
        number: FakeGpu(f"MIG-{number}", "NVIDIA H200 MIG 1g.18gb", 18 * GIB, instance=7 + number)
        for number in (0, 2)
    }
    return FakeNvml(FakeGpu("GPU-a", partitioned=True, slices=slices), FakeGpu("GPU-b"))


@contextmanager
def chosen(
    choice: str,
    nvml: FakeNvml = NO_DRIVER,
    memory_bytes: int | None = None,
    visible: str | None = None,
) -> Iterator[list[GpuDevice]]:
    """The devices, and afterwards nobody listens to them."""
    devices = choose_devices(choice, NODE, memory_bytes, visible, nvml)
    try:
        yield devices
    finally:
        for device in devices:
            device.close()
        assert nvml.open_event_sets == 0


def test_stand_in_has_no_name_that_the_real_library_lacks() -> None:
    names = [name for name in vars(FakeNvml) if name.lower()[:4] == "nvml"]
    constants = [name for name in names if name.startswith(("NVML_", "nvmlEventType"))]

    assert constants
    assert [name for name in names if not hasattr(pynvml, name)] == []
    wrong = [
        (name, getattr(FakeNvml, name), getattr(pynvml, name))
        for name in constants
        if getattr(pynvml, name) != getattr(FakeNvml, name)
    ]
    assert wrong == []


def ids(devices: list[GpuDevice]) -> list[str]:
    return [device.id for device in devices]


def test_emulated_gpus_are_as_many_and_as_large_as_asked_for() -> None:
    with chosen("cpu:3", memory_bytes=GIB) as devices:
        assert ids(devices) == ["n1/cpu:0", "n1/cpu:1", "n1/cpu:2"]
        for device in devices:
            assert (device.memory_bytes, device.device_bytes) == (GIB, GIB)
            assert (device.kind, device.worker_device) == ("cpu", "cpu")
            assert device.used_bytes() is None
            assert device.utilisation() is None
            assert device.health() == ()


def test_emulated_gpus_share_half_of_the_free_memory_when_no_size_is_given() -> None:
    with chosen("cpu:2") as devices:
        total = sum(device.memory_bytes for device in devices)
    assert 0 < total <= max(available_bytes() * 0.6, 2 * 256 << 20)


@pytest.mark.parametrize("choice", ["cpu", "cpu:1", "auto"])
def test_one_gpu_is_emulated_when_there_is_no_driver(choice: str) -> None:
    with chosen(choice) as devices:
        assert ids(devices) == ["n1/cpu:0"]


def test_auto_takes_every_gpu_that_nvml_finds() -> None:
    with chosen("auto", three_gpus()) as devices:
        assert ids(devices) == ["n1/cuda:0", "n1/cuda:1", "n1/cuda:2"]
        first = devices[0]
        assert (first.kind, first.name, first.gpu_type) == ("cuda", "NVIDIA H200", "h200")
        assert first.memory_bytes == first.device_bytes == 139 * GIB
        assert first.worker_device == "cuda:GPU-a"
        assert first.used_bytes() == 2 * GIB
        assert first.utilisation() == 0.4


def test_auto_emulates_when_nvml_finds_no_gpu() -> None:
    with chosen("auto", FakeNvml()) as devices:
        assert ids(devices) == ["n1/cpu:0"]


def test_gpus_are_picked_by_number() -> None:
    with chosen("cuda:2,0", three_gpus(), memory_bytes=20 * GIB) as devices:
        assert ids(devices) == ["n1/cuda:0", "n1/cuda:2"]
        assert [device.memory_bytes for device in devices] == [20 * GIB] * 2
        assert [device.device_bytes for device in devices] == [139 * GIB] * 2


def test_slices_are_devices_of_their_own_when_a_gpu_is_partitioned() -> None:
    with chosen("cuda", partitioned()) as devices:
        assert ids(devices) == ["n1/cuda:0.0", "n1/cuda:0.2", "n1/cuda:1"]
        first = devices[0]
        assert first.gpu_type == "h200-mig-1g.18gb"
        assert first.memory_bytes == 17 * GIB
        assert first.worker_device == "cuda:MIG-0"
        assert first.utilisation() is None
        assert devices[2].utilisation() == 0.4


def test_gpu_that_cannot_be_partitioned_is_a_device() -> None:
    with chosen("cuda", FakeNvml(FakeGpu("GPU-a", partitioned=None))) as devices:
        assert ids(devices) == ["n1/cuda:0"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", ["n1/cuda:1"]),
        ("2,0", ["n1/cuda:2", "n1/cuda:0"]),
        ("\N{ARABIC-INDIC DIGIT ONE}", ["n1/cpu:0"]),
        ("GPU-b", ["n1/cuda:1"]),
        ("0,7,1", ["n1/cuda:0"]),
        ("0,0", ["n1/cuda:0"]),
        ("", ["n1/cpu:0"]),
        ("-1", ["n1/cpu:0"]),
        (None, ["n1/cuda:0", "n1/cuda:1", "n1/cuda:2"]),
    ],
)
def test_gpus_are_confined_to_those_that_cuda_would_show(
    visible: str | None, expected: list[str]
) -> None:
    with chosen("auto", three_gpus(), visible=visible) as devices:
        assert ids(devices) == expected


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("gpu", "use auto"),
        ("", "use auto"),
        ("cpu:0", "N from 1"),
        ("cpu:x", "N from 1"),
        ("cpu:99999", "N from 1"),
        ("cuda:", "use numbers"),
        ("cuda:a", "use numbers"),
        ("cuda:" + "9" * 5_000, "use numbers"),
        ("cpu:" + "9" * 5_000, "N from 1"),
        ("cuda:3", "no GPU 3; there are 0, 1, 2"),
    ],
)
def test_choice_is_refused_when_it_cannot_be_had(choice: str, why: str) -> None:
    with pytest.raises(BadSetting, match=why):
        choose_devices(choice, NODE, nvml=three_gpus())


def test_named_gpus_are_checked_before_anything_is_started() -> None:
    check_named("cuda:0,2", "0,2", three_gpus())
    with pytest.raises(BadSetting, match="no GPU 1; there are 0, 2"):
        check_named("cuda:1", "0,2", three_gpus())
    with pytest.raises(NoDriver):
        check_named("cuda", None, NO_DRIVER)


def test_choice_is_refused_when_it_wants_more_memory_than_there_is() -> None:
    with pytest.raises(BadSetting, match="139 GiB of memory, not 200 GiB"):
        choose_devices("cuda", NODE, 200 * GIB, nvml=three_gpus())


def test_cuda_is_refused_when_no_gpu_may_be_used() -> None:
    with pytest.raises(BadSetting, match="usable"):
        choose_devices("cuda", NODE, visible="", nvml=three_gpus())


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND, "libnvidia-ml.so.1 is missing"),
        (FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (99, "does not answer"),
    ],
)
def test_cuda_says_what_is_missing_when_there_is_no_driver(error: int, why: str) -> None:
    with pytest.raises(NoDriver, match=why):
        choose_devices("cuda", NODE, nvml=FakeNvml(init_error=error))


def test_gpu_is_left_out_when_it_is_lost_at_the_start() -> None:
    nvml = three_gpus()
    nvml.gpus[1].lost = True
    with chosen("cuda", nvml) as devices:
        assert ids(devices) == ["n1/cuda:0", "n1/cuda:2"]


def test_gpu_reports_its_loss_when_it_is_asked_afterwards() -> None:
    nvml = three_gpus()
    with chosen("cuda", nvml) as devices:
        nvml.gpus[1].lost = True
        assert devices[1].used_bytes() is None
        assert [(event.gpu, event.fatal) for event in devices[1].health()] == [("n1/cuda:1", True)]
        assert devices[1].health() == ()
        assert devices[0].health() == ()


def test_errors_are_told_to_the_gpu_that_had_them() -> None:
    nvml = three_gpus()
    with chosen("cuda:0,1", nvml) as devices:
        nvml.say(nvml.gpus[0], XID, 79)
        nvml.say(nvml.gpus[1], XID, 31)
        nvml.say(nvml.gpus[1], ECC)
        nvml.say(nvml.gpus[2], XID, 79)
        assert [(event.what, event.fatal) for event in devices[0].health()] == [("Xid 79", True)]
        assert [(event.what, event.fatal) for event in devices[1].health()] == [
            ("Xid 31", False),
            ("uncorrectable ECC error", True),
        ]


def test_error_of_one_slice_leaves_the_others_alone() -> None:
    nvml = partitioned()
    with chosen("cuda:0", nvml) as devices:
        nvml.say(nvml.gpus[0], XID, 95, instance=9)
        assert [len(device.health()) for device in devices] == [0, 1]
        nvml.say(nvml.gpus[0], XID, 79)
        assert [len(device.health()) for device in devices] == [1, 1]


def test_gpus_work_unwatched_when_the_driver_cannot_report_health() -> None:
    with chosen("cuda", FakeNvml(FakeGpu("GPU-a"), watchable=False)) as devices:
        assert devices[0].health() == ()
        assert devices[0].used_bytes() == 2 * GIB


def test_memory_is_read_the_old_way_when_the_driver_is_old() -> None:
    nvml = FakeNvml(FakeGpu("GPU-a"))
    nvml.old_driver = True
    with chosen("cuda", nvml) as devices:
        assert devices[0].memory_bytes == 140 * GIB
        assert devices[0].used_bytes() == 3 * GIB


def test_processes_are_told_with_what_they_use_where_that_is_known() -> None:
    nvml = FakeNvml(FakeGpu("GPU-a", processes=((12, GIB), (13, None))))
    with chosen("cuda", nvml) as devices:
        assert devices[0].process_bytes() == {12: GIB}


def machine(root: Path, **files: str) -> Path:
    """A file system with these files; in the names, two underscores stand for a slash."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:  800 kB\n")
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_available_memory_is_the_machines_when_nothing_limits_it(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, memory_dot_max="max\n")) == 800 * 1024


def test_available_memory_is_what_the_control_group_leaves(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        memory_dot_max="500000\n",
        memory_dot_current="300000\n",
        memory_dot_stat="anon 1\ninactive_file 100000\n",
    )
    assert available_bytes(root) == 300000


def test_available_memory_is_read_from_an_old_control_group(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        memory__memory_dot_limit_in_bytes="500000\n",
        memory__memory_dot_usage_in_bytes="600000\n",
        memory__memory_dot_stat="total_inactive_file 20000\n",
    )
    assert available_bytes(root) == 0


@pytest.mark.parametrize(
    ("mode", "name"), [(1, "Exclusive_Thread"), (2, "Prohibited"), (3, "Exclusive_Process")]
)
@pytest.mark.parametrize("choice", ["auto", "cuda", "cuda:0"])
def test_gpu_is_refused_when_only_one_process_may_use_it(choice: str, mode: int, name: str) -> None:
    nvml = FakeNvml(FakeGpu("GPU-a", compute_mode=mode))
    with pytest.raises(BadSetting, match=f"{name}.*nvidia-smi -i 0 -c DEFAULT"):
        choose_devices(choice, NODE, nvml=nvml)


def test_gpu_is_used_when_another_one_is_exclusive_or_it_has_no_mode() -> None:
    nvml = FakeNvml(FakeGpu("GPU-a", compute_mode=3), FakeGpu("GPU-b", compute_mode=None))
    with chosen("cuda:1", nvml) as devices:
        assert ids(devices) == ["n1/cuda:1"]
    with chosen("cuda", nvml, visible="GPU-b") as devices:
        assert ids(devices) == ["n1/cuda:1"]


def test_device_files_are_named_when_workers_users_cannot_open_them(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name, mode in (
        ("nvidia0", 0o666),
        ("nvidia1", 0o660),
        ("nvidiactl", 0o600),
        ("nvidia-uvm", 0o666),
        ("nvidia-modeset", 0o600),
    ):
        (tmp_path / "dev" / name).touch()
        (tmp_path / "dev" / name).chmod(mode)
    assert [path.name for path in closed_device_files(tmp_path)] == ["nvidia1", "nvidiactl"]
