"""The worker's side of CUDA, over stand-ins that keep the driver's rules."""

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_manager.call_errors import ContextLost, OutOfMemory
from gpu_manager.cuda.context import (
    LEAST_CONTEXT_BYTES,
    MOST_CONTEXT_BYTES,
    MOST_PINNED_BYTES,
    USUAL_CONTEXT_BYTES,
    CudaContext,
    DriverAccount,
    context_bytes,
    read_account,
)
from gpu_manager.cuda.libraries import READ_ONLY, CudaRuntime, loaded_runtime
from gpu_manager.cuda.staged_copy import StagingBuffers
from gpu_manager.devices.image_file import ImageFile
from gpu_manager.devices.worker_device import DeviceImage
from gpu_manager.emulated.cpu_arithmetic import CpuArithmetic
from tests.kit.fakes.fake_cuda import MIB, FakeBlock, FakeRuntimeLibrary, FakeTorchCuda
from tests.kit.fakes.fake_nvml import GIB, FakeGpu, FakeNvml

CPU = torch.device("cpu")


def context(
    cuda: FakeTorchCuda,
    library: FakeRuntimeLibrary | None = None,
    account: Callable[[str], Any] | None = None,
) -> CudaContext:
    """A context whose tensors lie on the CPU."""
    return CudaContext(  # the stand-in's account has what is read of the real one
        "GPU-a",
        CPU,
        cuda,
        CudaRuntime(library or FakeRuntimeLibrary()),
        account or (lambda _: cuda.account(os.getpid())),
        lambda: cuda.log.append("clear_workspaces"),
    )


# -- memory of the context ------------------------------------------------------------------------


def test_overhead_has_the_whole_context_when_the_first_question_makes_it() -> None:
    cuda = FakeTorchCuda(context_bytes=500 * MIB)
    device = context(cuda)

    device.warm()

    assert device.overhead_bytes() == 500 * MIB
    cuda.reserved_bytes = 40 * MIB
    assert device.used_bytes() == 540 * MIB


def test_overhead_is_of_the_whole_gpu_when_the_driver_names_no_process() -> None:
    cuda = FakeTorchCuda(context_bytes=500 * MIB)
    cuda.others_bytes = 900 * MIB
    device = context(cuda, account=lambda _: cuda.account())

    device.warm()

    assert device.overhead_bytes() == 500 * MIB


def account(used: int | None = None, **by_process: int) -> DriverAccount:
    return DriverAccount(used, {int(pid[1:]): size for pid, size in by_process.items()})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (account(GIB, p7=5), account(2 * GIB, p7=5, p9=6 * MIB), 6 * MIB),
        (account(GIB, p7=5), account(2 * GIB, p7=5, p8=4 * MIB, p9=6 * MIB), GIB),
        (
            account(GIB),
            account(3 * GIB + 1),
            MOST_CONTEXT_BYTES,
        ),  # another one loaded a model meanwhile
        (account(3 * GIB), account(GIB), LEAST_CONTEXT_BYTES),  # or left
        (account(), account(), USUAL_CONTEXT_BYTES),
        (account(GIB, p3=1), account(9 * GIB, p3=77), 77),
    ],
)
def test_context_is_found_in_the_drivers_account(
    before: DriverAccount, after: DriverAccount, expected: int
) -> None:
    assert context_bytes(before, after, pid=3) == expected


def test_account_is_read_without_cuda_when_there_is_a_driver_or_none() -> None:
    gpu = FakeGpu("MIG-a", used_bytes=3 * GIB, processes=((5, 70), (6, None)))
    assert read_account("MIG-a", FakeNvml(gpu)) == DriverAccount(3 * GIB, {5: 70})
    missing = FakeNvml(init_error=FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert read_account("MIG-a", missing) == DriverAccount()


# -- pinning and copying --------------------------------------------------------------------------


def test_refused_pin_leaves_no_error_for_the_next_launch() -> None:
    library = FakeRuntimeLibrary()
    runtime = CudaRuntime(library)

    assert not runtime.pin(1 << 20, 4096, READ_ONLY)

    library.check_launch()
    runtime.unpin(77)
    library.check_launch()


def test_runtime_is_the_library_that_torch_has_loaded() -> None:
    found = loaded_runtime()
    if torch.version.cuda is None:
        assert not found.pin(0, 4096)
        return
    found.pin(1, 4096)  # without a driver it fails, and the error is taken back
    assert found.clear_error() in {0, 35}  # 35: asking itself needs a driver


@pytest.mark.parametrize("refuses", [False, True])
def test_image_arrives_whole_when_it_is_staged_in_pieces(*, refuses: bool) -> None:
    cuda, library = FakeTorchCuda(), FakeRuntimeLibrary(refuses=refuses)
    content = os.urandom(3 * MIB + 17)
    descriptor = os.memfd_create("image")
    os.write(descriptor, content)
    target = torch.zeros(len(content), dtype=torch.uint8)

    staging = StagingBuffers(cuda, CudaRuntime(library), piece_bytes=MIB)
    assert staging.pinned is not refuses
    staging.copy(descriptor, len(content), target)

    assert target.numpy().tobytes() == content
    # The third piece waits for the first one's copy, as both use one buffer; the fourth likewise.
    assert (cuda.log.count("record"), cuda.log.count("wait")) == (4, 2)
    assert cuda.streams[-1].waited_for == [0]
    assert cuda.streams[-1].waits == 1
    staging.close()
    assert library.pinned == {}
    library.check_launch()
    os.close(descriptor)


def test_image_that_ends_early_is_an_error_and_no_copy_is_under_way() -> None:
    cuda, library = FakeTorchCuda(), FakeRuntimeLibrary()
    descriptor = os.memfd_create("image")
    os.write(descriptor, b"short")
    staging = StagingBuffers(cuda, CudaRuntime(library), piece_bytes=4096)

    with pytest.raises(OSError, match="ends at 5"):
        staging.copy(descriptor, 4096, torch.zeros(4096, dtype=torch.uint8))

    staging.close()
    assert library.pinned == {}
    os.close(descriptor)


def test_loaded_image_holds_no_pinned_memory() -> None:
    cuda, library = FakeTorchCuda(), FakeRuntimeLibrary()
    device = context(cuda, library)
    device.warm()
    assert len(library.pinned) == 2  # made while nobody waits
    descriptor = os.memfd_create("image")
    os.write(descriptor, bytes(range(200)))

    first, second = device.load(ImageFile("d", [[0, 64], [128, 8]], 200, descriptor))

    assert bytes(first) == bytes(range(64))
    assert bytes(second) == bytes(range(128, 136))
    assert library.pinned == {}


def test_next_image_is_loaded_and_nothing_stays_pinned_when_a_device_was_cleared() -> None:
    cuda, library = FakeTorchCuda(context_bytes=500 * MIB), FakeRuntimeLibrary()
    device = context(cuda, library)
    device.warm()
    for content in (bytes(range(200)), bytes(reversed(range(200)))):
        descriptor = os.memfd_create("image")
        os.write(descriptor, content)
        file = ImageFile("d", [[0, 64], [128, 8]], 200, descriptor)
        image = DeviceImage(file, device)
        device.limit(600 * MIB)
        assert cuda.fraction < 1.0
        cuda.reserved_bytes = 90 * MIB
        storage = image.storage(128, 8)
        assert storage is not None
        assert bytes(storage) == content[128:136]
        cuda.log.clear()

        assert image.close()
        device.clear()

        assert cuda.log == ["clear_workspaces", "empty_cache"]  # or the workspaces would stay
        assert cuda.fraction == 1.0
        assert device.used_bytes() == 500 * MIB
        assert library.pinned == {}
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_image_is_not_let_go_while_something_refers_to_its_memory() -> None:
    descriptor = os.memfd_create("image")
    os.write(descriptor, bytes(64))
    image = DeviceImage(ImageFile("d", [[0, 64]], 64, descriptor), CpuArithmetic())
    storage = image.storage(0, 64)
    assert not image.close()
    assert storage is not None
    assert bytes(storage) == bytes(64)  # it can be read still


def test_image_is_copied_while_the_libraries_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, library = FakeTorchCuda(context_bytes=500 * MIB), FakeRuntimeLibrary()
    device = context(cuda, library)
    opening, copied = threading.Event(), threading.Event()

    def open_libraries(_: torch.device) -> None:
        opening.set()
        assert copied.wait()

    monkeypatch.setattr("gpu_manager.cuda.context.use_libraries", open_libraries)
    warming = threading.Thread(target=device.warm)
    warming.start()
    assert opening.wait()
    descriptor = os.memfd_create("image")
    os.write(descriptor, bytes(range(64)))

    device.wait_for_copies()
    (only,) = device.load(ImageFile("d", [[0, 64]], 64, descriptor))
    copied.set()
    warming.join()

    assert bytes(only) == bytes(range(64))
    assert device.overhead_bytes() == 500 * MIB
    assert library.pinned == {}


def test_nobody_waits_for_a_context_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> None:
        raise RuntimeError("no such GPU")

    cuda = FakeTorchCuda()
    monkeypatch.setattr(cuda, "set_device", fail)
    device = context(cuda)

    with pytest.raises(RuntimeError, match="no such GPU"):
        device.warm()

    device.wait_for_copies()


def test_area_is_unpinned_when_dropped_and_not_pinned_when_too_large() -> None:
    cuda, library = FakeTorchCuda(), FakeRuntimeLibrary()
    device = context(cuda, library)
    area = memoryview(mmap.mmap(-1, 1 << 20))

    unshare = device.share(area)
    assert list(library.pinned.values()) == [1 << 20]
    assert device.share(area) is None  # pinned already
    library.check_launch()
    assert unshare is not None
    unshare()
    assert library.pinned == {}

    huge = memoryview(mmap.mmap(-1, MOST_PINNED_BYTES + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE))
    assert device.share(huge) is None
    assert device.share(area) is not None


# -- faults ---------------------------------------------------------------------------------------


def failing(text: str, kind: type[RuntimeError] = RuntimeError) -> Callable[[], None]:
    def work() -> None:
        raise kind(text)

    return work


def test_error_of_an_operator_stays_its_own_when_the_context_is_sound() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        context(FakeTorchCuda()).run(failing("shapes do not match"), measure=False)


@pytest.mark.parametrize(
    ("fault", "of_program"),
    [
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", True),
        ("CUDA error: uncorrectable ECC error encountered", False),
    ],
)
def test_context_is_lost_when_every_call_fails_from_now_on(fault: str, *, of_program: bool) -> None:
    cuda = FakeTorchCuda()
    device = context(cuda)

    def work() -> None:
        cuda.fault = fault
        raise RuntimeError(fault)

    with pytest.raises(ContextLost) as lost:
        device.run(work, measure=False)
    assert lost.value.of_program is of_program


def test_lack_of_memory_names_the_bytes_that_are_needed() -> None:
    cuda = FakeTorchCuda(context_bytes=500 * MIB)
    device = context(cuda)
    device.warm()
    cuda.reserved_bytes = 100 * MIB

    with pytest.raises(OutOfMemory) as short:
        device.run(failing("Tried to allocate 300.00 MiB.", torch.OutOfMemoryError), measure=True)
    assert short.value.need_bytes == 900 * MIB


@pytest.mark.parametrize("nvml", ["closed", "missing"])
def test_lack_of_memory_is_told_when_the_worker_has_no_rights_any_more(nvml: str) -> None:
    cuda = FakeTorchCuda()
    cuda.nvml = nvml
    device = context(cuda)
    device.warm()
    assert device.overhead_bytes() == cuda.context_bytes
    device.limit(2048 * MIB)
    cuda.has_rights = False

    with pytest.raises(OutOfMemory) as short:
        device.run(lambda: cuda.caching_allocator_alloc(9000 * MIB), measure=True)

    assert short.value.need_bytes >= 2048 * MIB
    opened = nvml == "closed"  # while the worker had the rights to
    assert isinstance(short.value.__cause__, torch.OutOfMemoryError) is opened
    assert cuda.fraction == 1548 / 8192


def test_context_cannot_be_made_when_the_first_shortage_shows_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> int:
        raise RuntimeError("CUDA error: unspecified launch failure")

    cuda = FakeTorchCuda()
    monkeypatch.setattr(cuda, "caching_allocator_alloc", fail)
    with pytest.raises(RuntimeError, match="launch failure"):
        context(cuda).warm()


def test_image_lacks_memory_when_torch_cannot_say_who_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = context(FakeTorchCuda())
    descriptor = os.memfd_create("image")
    os.ftruncate(descriptor, 64)
    file = ImageFile("d", [[0, 64]], 64, descriptor)

    def refuse(*_: Any, **_more: Any) -> None:
        raise RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        device.load(file)
    file.close()


def test_memory_of_a_call_that_lacks_more_is_free_when_room_is_made() -> None:
    cuda = FakeTorchCuda()
    device = context(cuda)

    def work() -> None:
        half_way = cuda.take(700 * MIB)
        cuda.caching_allocator_alloc(cuda.total_bytes + half_way.size_bytes)

    with pytest.raises(OutOfMemory) as short:
        device.run(work, measure=False)
    assert not cuda.blocks
    assert short.value.__cause__ is not None  # it is there still, as in a second attempt


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_memory_of_an_emulated_call_that_lacks_more_is_free_when_room_is_made(
    kind: type[Exception],
) -> None:
    blocks: weakref.WeakSet[FakeBlock] = weakref.WeakSet()

    def work() -> None:
        half_way = FakeBlock(None, 0, 700 * MIB)
        blocks.add(half_way)
        raise kind("can't allocate memory: you tried to allocate 4096 bytes")

    with pytest.raises(OutOfMemory) as short:
        CpuArithmetic().run(work, measure=False)
    assert not blocks
    assert short.value.__cause__ is not None
