"""How the bench of streams judges its figures, and the page that it writes."""

from bench.streambox.equal_memory import CallRate
from bench.streambox.footprint import Footprint
from bench.streambox.functions import CONTEXT_BYTES
from bench.streambox.offered_load import LoadResult
from bench.streambox.page import StreamboxFigures, headlines, streambox_blocks
from cache_manager.model.ids import MIB
from common.gpu_wishes import PROCESS, STREAM
from deploy.generated_blocks import page_of_blocks, with_blocks


def figures() -> StreamboxFigures:
    made = StreamboxFigures("command", "machine", 100)
    for count in (1, 64):
        alone = count * (CONTEXT_BYTES + 20 * MIB)
        shared = CONTEXT_BYTES + count * 20 * MIB
        made.footprints[PROCESS, count] = Footprint(alone, count * 20 * MIB, MIB, MIB, count)
        made.footprints[STREAM, count] = Footprint(shared, count * 20 * MIB, MIB, MIB, 1)
    for count, times in ((16, 2.0), (64, 10.0)):
        made.rates[PROCESS, count] = [CallRate(4.0, 0.5, 1.0), CallRate(5.0, 0.5, 1.0)]
        made.rates[STREAM, count] = [
            CallRate(times * each.calls_per_s, 0.9, 0.1) for each in made.rates[PROCESS, count]
        ]
    made.loads["bursty", STREAM, 64] = LoadResult(100, 90, 10.0, 0.1, 0.5, MIB, 2 * MIB)
    return made


def test_headlines_are_judged_by_their_distance() -> None:
    found = headlines(figures())
    assert [each.verdict for each in found] == ["reached", "reached", "near", "reached", "reached"]
    assert [round(each.distance, 2) for each in found[2:4]] == [0.91, 1.49]


def test_page_takes_its_generated_parts_again() -> None:
    blocks = streambox_blocks(figures())
    page = page_of_blocks("Title", blocks)
    assert with_blocks(page, blocks) == page
    assert "| bursty | stream | 64 | 100 | 90 % | 9.0 | 100 ms | 500 ms | 1 | 2 |" in page
