"""The pool in a process of its own, since torch keeps it once it is installed."""

import os
import textwrap
from collections.abc import Iterator

import pytest

from gpu_manager.emulated.memory_pool import PoolNotBuilt, pool_library
from tests.kit.programs.snippets import Snippet, snippets

pytestmark = pytest.mark.group("memory_pool", seconds=140)

_BEGIN = """
import random, threading
from pathlib import Path
from gpu_manager.emulated.memory_pool import MemoryPool, PooledMemory
MIB = 1 << 20
pool = MemoryPool(Path({library!r}))
before = torch.ones(1000)  # not the pool's, and freed after it was installed
pool.install()
pool.install()

def of(model):
    return PooledMemory(pool, model)

def resident():
    _, there, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(there) - int(shared)) * 4096

"""


@pytest.fixture(scope="module")
def in_a_process() -> Iterator[Snippet]:
    begin = _BEGIN.format(library=str(pool_library()))
    environment = dict(os.environ)  # noqa: TID251 - for a child
    with snippets(environment) as run:
        yield lambda program: run(begin + textwrap.dedent(program))


def test_every_model_has_an_account_to_the_byte(in_a_process: Snippet) -> None:
    in_a_process(
        """
        with of(1).computing():
            mine = torch.empty(1001, dtype=torch.uint8)
        with of(2).computing():
            theirs = torch.empty(5 * MIB + 3, dtype=torch.uint8)
        nobodys = torch.empty(7, dtype=torch.uint8)
        assert [of(n).used_bytes() for n in (0, 1, 2)] == [7, 1001, 5 * MIB + 3]
        of(2).watch()
        with of(2).computing():
            torch.empty(MIB, dtype=torch.uint8)
        assert of(2).peak_bytes() == 6 * MIB + 3
        assert pool.calls.gpufaas_pool_forget(1) == 1001
        del mine, theirs, nobodys, before
        assert [pool.calls.gpufaas_pool_forget(n) for n in (0, 1, 2)] == [0, 0, 0]
        assert pool.used_bytes == 0
        """
    )


def test_a_thread_and_those_that_help_it_allocate_for_the_model(in_a_process: Snippet) -> None:
    in_a_process(
        """
        def adopted():
            of(3).adopt_thread()
            kept.append(torch.ones(100, dtype=torch.uint8))
        kept = []
        for work in (adopted, lambda: kept.append(torch.ones(10, dtype=torch.uint8))):
            with of(4).computing():
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
        assert (of(3).used_bytes(), of(4).used_bytes()) == (100, 10)
        """
    )


def test_a_model_is_refused_what_its_limit_does_not_allow_and_others_are_not(
    in_a_process: Snippet,
) -> None:
    in_a_process(
        """
        of(1).limit(MIB)
        with of(1).computing():
            try:
                torch.empty(MIB + 1, dtype=torch.uint8)
            except RuntimeError as error:
                assert "allocate 1048577 bytes" in str(error), error
            else:
                raise AssertionError("it was given")
            torch.empty(MIB, dtype=torch.uint8)
        with of(2).computing():
            torch.empty(8 * MIB, dtype=torch.uint8)
        """
    )


def test_free_pages_are_the_systems_after_a_trim_and_kept_ones_are_not(
    in_a_process: Snippet,
) -> None:
    in_a_process(
        """
        begun = resident()
        with of(1).computing():
            tensors = [torch.ones(MIB, dtype=torch.uint8) for _ in range(64)]
        assert resident() - begun > 60 * MIB
        del tensors[::2]
        assert pool.trim(16 * MIB) <= 16 * MIB
        assert 44 * MIB < resident() - begun < 52 * MIB
        tensors.clear()
        assert pool.trim(0) < 4096 * 4
        assert resident() - begun < 4 * MIB
        """
    )


def test_no_byte_is_given_twice_under_random_use(in_a_process: Snippet) -> None:
    in_a_process(
        """
        random.seed(7)
        held = []
        for turn in range(20_000):
            if held and random.random() < 0.5:
                tensor, value = held.pop(random.randrange(len(held)))
                assert bool((tensor == value).all())
            else:
                size = random.choice((1, 63, 64, 65, 4095, 65_536, 65_537, 300_000))
                with of(random.randrange(1, 9)).computing():
                    held.append((torch.full((size,), turn % 251, dtype=torch.uint8), turn % 251))
            if turn % 500 == 0:
                pool.trim(random.choice((0, MIB)))
        assert all(bool((tensor == value).all()) for tensor, value in held)
        held.clear()
        del tensor
        assert [of(n).used_bytes() for n in range(1, 9)] == [0] * 8
        """
    )


def test_the_reason_is_told_when_nothing_can_compile_the_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PoolNotBuilt, match="no-such-compiler"):
        pool_library()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(PoolNotBuilt, match="does not compile"):
        pool_library()


def test_no_page_stays_when_blocks_smaller_than_pages_are_freed_in_any_order(
    in_a_process: Snippet,
) -> None:
    in_a_process(
        """
        chance = random.Random(7)
        kept = [torch.ones(chance.randint(1, 8000), dtype=torch.uint8) for _ in range(4000)]
        for part in range(4):
            chance.shuffle(kept)
            del kept[: len(kept) * 2 // 3]
            pool.trim(0)
        del kept, before
        assert (pool.used_bytes, pool.trim(0)) == (0, 0)
        size, found = 0, []
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if words[0] == "Size:":
                size = int(words[1])
            elif words[0] == "Rss:" and size >= 1 << 22:
                found.append(int(words[1]))
        assert found == [0], found
        """
    )
