"""Whose models leave first where tenants have parts of the memory."""

from cache_manager.eviction import make
from cache_manager.model.ids import GpuId, ModelId, NodeId
from cache_manager.residency import CacheIndex


def filled(*models: str, memory: int = 10, size: int = 2) -> CacheIndex:
    """An index whose one GPU holds these models, the least recently used first."""
    index = CacheIndex(make("lru"))
    cache = index.add_gpu(GpuId("g0"), NodeId("n0"), memory)
    for place, model in enumerate(models):
        index.admit(cache, ModelId(model), size, float(place))
    return index


def leaving(index: CacheIndex, short: int) -> tuple[str, ...]:
    """What leaves so that so much more is free."""
    return tuple(index.victims(index.gpus[GpuId("g0")], short, 9.0) or ())


def test_models_of_tenants_with_more_than_their_part_leave_first_when_memory_is_shared() -> None:
    index = filled("a/0", "b/0", "b/1", "b/2", "a/1")
    assert leaving(index, 4) == ("a/0", "b/0")
    index.parts.share({})
    assert leaving(index, 4) == ("b/0", "b/1")
    assert leaving(index, 8) == ("b/0", "b/1", "b/2", "a/0")


def test_parts_follow_weights_when_tenants_have_them() -> None:
    index = filled("a/0", "b/0", "b/1", "b/2", "a/1")
    index.parts.share({"b": 9.0})
    assert leaving(index, 2) == ("a/0",)


def test_bytes_are_counted_when_models_leave_and_grow() -> None:
    index = filled("a/0", "a/1", "b/0", memory=20)
    cache = index.gpus[GpuId("g0")]
    index.parts.share({})
    index.resize(cache, ModelId("b/0"), 11)
    assert leaving(index, 1) == ("b/0",)
    index.evict(cache, ModelId("b/0"))
    assert not list(index.parts.models_of("b"))
    assert list(index.parts.models_of("a")) == ["a/0", "a/1"]
    assert leaving(index, 1) == ("a/0",)


def test_models_without_a_tenant_share_one_part_when_no_tenant_is_named() -> None:
    index = filled("bert", "vgg", "bart")
    index.parts.share({})
    assert leaving(index, 4) == ("bert", "vgg")
