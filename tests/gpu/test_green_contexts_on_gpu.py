"""Shares of a real card's multiprocessors: their numbers, and how much longer calls take."""

import os
import threading
import time
from collections.abc import Iterator
from statistics import median

import pytest
import torch

from gpu_manager.call_errors import OutOfMemory, ShareRefused
from gpu_manager.cuda.context import CudaContext, CudaStream
from gpu_manager.devices.image_file import ImageFile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
_SIZE, _PRODUCTS = 4096, 8


@pytest.fixture
def whole(uuid: str) -> Iterator[CudaContext]:
    made = CudaContext(uuid)
    made.warm()
    try:
        made.sms.partitions.give_back(made.sms.partitions.take(0.25))
    except ShareRefused as error:
        pytest.skip(f"needs green contexts: {error}")
    yield made
    torch.cuda.synchronize()


def part(whole: CudaContext, number: int, share: float) -> CudaStream:
    found = whole.part(number)
    assert isinstance(found, CudaStream)
    found.use_share(share)
    return found


def products_s(of: CudaStream, matrix: torch.Tensor) -> float:
    """Seconds of matrix products that fill the whole card, the median of five times."""

    def work() -> None:
        for _ in range(_PRODUCTS):
            matrix @ matrix

    took = []
    for _ in range(6):
        begun_s = time.perf_counter()
        of.run(work, measure=False)
        took.append(time.perf_counter() - begun_s)
    return median(took[1:])


# The driver's documents do not say whether a stream of a green context and an event of the usual
# context belong together. If they do not, no model with a share can be loaded.
def test_event_of_the_usual_context_is_recorded_on_a_share(whole: CudaContext) -> None:
    quarter = part(whole, 1, 0.25)
    quarter.adopt_thread()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch gives it no types
    try:
        event.record()
        event.synchronize()
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
        quarter.clear()


def test_image_arrives_whole_on_a_share(whole: CudaContext) -> None:
    quarter = part(whole, 1, 0.25)
    content = os.urandom((40 << 20) + 12)  # two pieces
    descriptor = os.memfd_create("image")
    os.write(descriptor, content)
    image = ImageFile("d", [[0, len(content)]], len(content), descriptor)
    quarter.adopt_thread()
    try:
        (storage,) = quarter.load(image)
        there = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        assert there.cpu().numpy().tobytes() == content
        del storage, there
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
        quarter.clear()
        image.close()


def test_a_quarter_of_the_card_takes_about_four_times_as_long(whole: CudaContext) -> None:
    matrix = torch.ones(_SIZE, _SIZE, device="cuda")
    all_of_it, quarter = part(whole, 1, 1.0), part(whole, 2, 0.25)
    times = products_s(quarter, matrix) / products_s(all_of_it, matrix)
    assert 2.5 < times < 6.0
    quarter.clear()
    all_of_it.clear()


def test_numbers_on_a_share_are_those_of_the_whole_card(whole: CudaContext) -> None:
    matrix = torch.randn(512, 512, dtype=torch.float64)
    expected = matrix @ matrix
    for share in (0.1, 0.5):
        it = part(whole, 1, share)
        found, _ = it.run(lambda: matrix.cuda() @ matrix.cuda(), measure=False)
        torch.testing.assert_close(found.cpu(), expected)
        del found
        it.clear()


def test_models_of_different_multiprocessors_hardly_slow_each_other(whole: CudaContext) -> None:
    matrix = torch.ones(_SIZE, _SIZE, device="cuda")
    first, second = part(whole, 1, 0.4), part(whole, 2, 0.4)
    alone_s = products_s(first, matrix)
    together: list[float] = []

    def measure(it: CudaStream) -> None:
        together.append(products_s(it, matrix))

    threads = [threading.Thread(target=measure, args=(it,)) for it in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(together) < 1.5 * alone_s
    first.clear()
    second.clear()


def test_joint_limit_of_a_process_is_refused_as_that_of_others(whole: CudaContext) -> None:
    first, second = part(whole, 1, 1.0), part(whole, 2, 1.0)
    for each in (first, second):
        each.limit(1 << 30)
    whole.limit_together(torch.cuda.memory_reserved() + (640 << 20))
    try:
        held, _ = first.run(
            lambda: torch.ones(400 << 20, dtype=torch.uint8, device="cuda"), measure=False
        )
        with pytest.raises(OutOfMemory) as short:
            second.run(
                lambda: torch.ones(400 << 20, dtype=torch.uint8, device="cuda"), measure=False
            )
        assert short.value.by_others
        del held
        first.release()
        second.run(lambda: torch.ones(400 << 20, dtype=torch.uint8, device="cuda"), measure=False)
    finally:
        whole.limit_together(whole.total_bytes)
