"""Several models of one process on a real card: their memory by the driver, their numbers."""

import os
import threading
import time
from collections.abc import Iterator
from statistics import median

import pytest
import torch

from gpu_manager.cuda.context import CudaContext, CudaStream, read_account
from gpu_manager.devices.image_file import ImageFile
from gpu_manager.devices.worker_device import DeviceImage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MIB = 1 << 20
_MODEL_BYTES = 256 * MIB


@pytest.fixture
def parts(uuid: str) -> Iterator[list[CudaStream]]:
    whole = CudaContext(uuid)
    whole.warm()
    made = [whole.part(number) for number in range(1, 5)]
    found = [part for part in made if isinstance(part, CudaStream)]
    yield found
    for part in found:
        part.clear()


def loaded(part: CudaStream, content: bytes) -> DeviceImage:
    descriptor = os.memfd_create("image")
    os.write(descriptor, content)
    return DeviceImage(ImageFile("d", [[0, len(content)]], len(content), descriptor), part)


def milliseconds(spans: list[tuple[float, float]]) -> str:
    took = [1000 * (end - begin) for begin, end in spans]
    return f"{len(took)}, {median(took):.2f} to {max(took):.2f} ms" if took else "none"


def taken_bytes(uuid: str) -> int:
    torch.cuda.synchronize()
    return read_account(uuid).used_bytes or 0


def test_models_take_their_weights_and_give_them_back_to_the_driver(
    uuid: str, parts: list[CudaStream]
) -> None:
    before = taken_bytes(uuid)
    content = os.urandom(_MODEL_BYTES)
    images = [loaded(part, content) for part in parts]
    assert abs(taken_bytes(uuid) - before - len(parts) * _MODEL_BYTES) < 128 * MIB
    assert all(abs(part.used_bytes() - _MODEL_BYTES) < 32 * MIB for part in parts)
    for image, part in zip(images, parts, strict=True):
        assert image.close()
        part.release()
        assert part.used_bytes() < 32 * MIB
    assert abs(taken_bytes(uuid) - before) < 64 * MIB


def test_activations_of_one_model_are_given_back_while_another_keeps_its_own(
    uuid: str, parts: list[CudaStream]
) -> None:
    first, second = parts[:2]
    kept, _ = first.run(lambda: torch.ones(64 * MIB // 4, device="cuda"), measure=False)
    _, peak_bytes = second.run(
        lambda: float(torch.ones(512 * MIB // 4, device="cuda").sum()), measure=True
    )
    assert peak_bytes >= 512 * MIB
    before = taken_bytes(uuid)
    second.release()
    assert before - taken_bytes(uuid) > 400 * MIB
    assert first.used_bytes() >= 64 * MIB
    assert float(kept.sum()) == 64 * MIB // 4


def test_models_that_compute_at_the_same_time_have_the_right_numbers(
    parts: list[CudaStream],
) -> None:
    wrong: list[int] = []

    def compute(number: int, part: CudaStream) -> None:
        part.adopt_thread()
        generator = torch.Generator().manual_seed(number)
        matrix = torch.randn(1024, 1024, generator=generator, dtype=torch.float64)
        expected = matrix @ matrix
        for _ in range(20):
            there, _ = part.run(lambda: matrix.cuda() @ matrix.cuda(), measure=False)
            if not torch.allclose(there.cpu(), expected):
                wrong.append(number)
            del there
            part.after_call()

    threads = [threading.Thread(target=compute, args=pair) for pair in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_go_on_while_another_model_gives_memory_back(
    parts: list[CudaStream], capsys: pytest.CaptureFixture[str]
) -> None:
    """Says how long a call is held up: what is freed waits for everything that the GPU does."""
    giving, busy, calling = parts[:3]
    matrix, large = torch.ones(512, 512, device="cuda"), torch.ones(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    over, calls, wrong = threading.Event(), list[tuple[float, float]](), list[float]()

    def compute() -> None:
        busy.adopt_thread()
        while not over.is_set():
            busy.run(lambda: float((large @ large)[0, 0]), measure=False)

    def call() -> None:
        calling.adopt_thread()
        while not over.is_set():
            begun_s = time.perf_counter()
            found, _ = calling.run(lambda: float((matrix @ matrix)[0, 0]), measure=False)
            calls.append((begun_s, time.perf_counter()))
            wrong.extend([found] if found != 512 else [])

    threads = [threading.Thread(target=each, daemon=True) for each in (compute, call)]
    for thread in threads:
        thread.start()
    releases = []
    try:
        for _ in range(20):
            giving.run(lambda: torch.ones(256 * MIB // 4, device="cuda"), measure=False)
            time.sleep(0.05)
            begun_s = time.perf_counter()
            giving.release()
            releases.append((begun_s, time.perf_counter()))
    finally:
        over.set()
        for thread in threads:
            thread.join()

    beside = [any(a < end and begin < b for begin, end in releases) for a, b in calls]
    held_up = milliseconds([call for call, is_held in zip(calls, beside, strict=True) if is_held])
    usual = milliseconds([call for call, is_held in zip(calls, beside, strict=True) if not is_held])
    with capsys.disabled():
        print(  # noqa: T201 - what this is for
            f"\ncalls: {usual}; beside a release: {held_up}; releases: {milliseconds(releases)}"
        )
    assert not wrong
    assert calls
    assert giving.used_bytes() < 32 * MIB
