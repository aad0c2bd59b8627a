"""What callers ask to be kept: anybody may, so it gives way to what functions keep."""

import pytest

from gpu_manager.data.items import DataItem
from gpu_manager.data.table import DataTable
from gpu_manager.errors import NoRoomForData, NoSuchData
from tests.kit.virtual_time import virtually
from tests.unit.gpu_manager.data.data_world import MIB, put, table


def has(it: DataTable, item: DataItem) -> bool:
    try:
        return it.find(item.tenant, item.handle) is item
    except NoSuchData:
        return False


@virtually
async def test_functions_data_is_neither_refused_nor_ended_when_strangers_fill_the_table() -> None:
    it = table(most_of_a_tenant=40)
    first = await put(it, b"first")
    wishes = [await put(it, b"wish", wished=True) for _ in range(100)]
    assert [has(it, wish) for wish in wishes] == [False] * 90 + [True] * 10

    later = [await put(it, b"later") for _ in range(39)]
    assert all(has(it, item) for item in (first, *later))
    assert not any(has(it, wish) for wish in wishes)
    with pytest.raises(NoRoomForData, match="team has 40 pieces"):
        await put(it, b"", wished=True)
    it.close()


@virtually
async def test_oldest_wish_gives_way_when_its_namespace_lacks_bytes() -> None:
    it = table(memory_bytes=64 * MIB, tenant_bytes=12 * MIB)
    oldest, latest = [await put(it, bytes(5 * MIB), wished=True) for _ in range(2)]
    theirs = await put(it, bytes(MIB), tenant="neighbours", wished=True)
    await put(it, bytes(4 * MIB))
    assert [has(it, item) for item in (oldest, latest, theirs)] == [False, True, True]
    it.close()


@virtually
async def test_wishes_of_all_give_way_when_memory_lacks_but_not_to_another_wish() -> None:
    it = table(memory_bytes=16 * MIB, tenant_bytes=16 * MIB)
    theirs = await put(it, bytes(10 * MIB), tenant="neighbours", wished=True)
    with pytest.raises(NoRoomForData):
        await put(it, bytes(8 * MIB), wished=True)
    with pytest.raises(NoRoomForData):
        await put(it, bytes(17 * MIB), tenant="third")
    assert has(it, theirs)
    assert has(it, await put(it, bytes(8 * MIB)))
    assert not has(it, theirs)
    it.close()


@virtually
async def test_no_wish_ends_when_what_is_put_is_refused_all_the_same() -> None:
    it = table(memory_bytes=24 * MIB, tenant_bytes=12 * MIB)
    sizes = {"team": MIB, "neighbours": 10 * MIB, "third": 4 * MIB}
    kept = [await put(it, bytes(size), tenant=tenant) for tenant, size in sizes.items()]
    part = await put(it, bytes(MIB))
    parts = (part.handle,)
    wishes = [await put(it, bytes(MIB), parts=of, wished=True) for of in (parts, ())]
    theirs = await put(it, bytes(MIB), tenant="neighbours", wished=True)
    for wished in (False, True):
        with pytest.raises(NoRoomForData, match=f"team has {MIB} bytes of {12 * MIB} already"):
            await put(it, bytes(12 * MIB), wished=wished)
    with pytest.raises(NoRoomForData):
        await put(it, bytes(12 * MIB), tenant="fourth")
    assert all(has(it, item) for item in (*kept, part, *wishes, theirs))
    it.close()


@virtually
async def test_wishes_of_all_give_way_when_the_node_lacks_pieces() -> None:
    it = table(most=2)
    theirs = await put(it, b"", tenant="neighbours", wished=True)
    kept = [await put(it, b"") for _ in range(2)]
    assert [has(it, item) for item in (theirs, *kept)] == [False, True, True]
    with pytest.raises(NoRoomForData, match="all namespaces together have 2 pieces"):
        await put(it, b"")
    it.close()


@virtually
async def test_parts_count_when_the_share_of_wishes_is_full() -> None:
    it = table(most_of_a_tenant=16)
    parts = [await put(it, b"part") for _ in range(3)]
    whole = await put(it, b"whole", parts=tuple(part.handle for part in parts), wished=True)
    await put(it, b"next", wished=True)
    assert not any(has(it, item) for item in (whole, *parts))
    it.close()
