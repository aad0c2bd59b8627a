"""Who has proved to have which weights: until it is withdrawn, and as many as are remembered."""

from gpu_manager.weights.store import MOST_FUNCTIONS, PossessionRecord

DIGEST = "d" * 64


def test_function_is_allowed_until_its_record_is_removed() -> None:
    record = PossessionRecord()
    record.add("a/f", DIGEST)
    record.add("b/g", DIGEST)

    assert record.tenants(DIGEST) == {"a", "b"}
    assert record.allows("a/f", DIGEST)
    assert not record.allows("a/other", DIGEST)
    assert not record.remove("a/f", DIGEST), "another one has the weights"
    assert not record.allows("a/f", DIGEST)
    assert record.tenants(DIGEST) == {"b"}
    assert record.remove("b/g", DIGEST)
    assert not record.remove("b/g", DIGEST)


def test_functions_that_come_and_go_push_out_the_oldest_of_their_own_tenant_alone() -> None:
    record = PossessionRecord()
    record.add("calm/f", DIGEST)
    record.add("busy/returns", DIGEST)
    for number in range(MOST_FUNCTIONS):
        if number == 10:
            record.add("busy/returns", DIGEST)
        record.add(f"busy/f{number}", DIGEST)

    assert not record.allows("busy/f0", DIGEST)
    assert record.allows("busy/returns", DIGEST), "it has proved it again"
    assert record.allows(f"busy/f{MOST_FUNCTIONS - 1}", DIGEST)
    assert record.allows("calm/f", DIGEST)
    record.forget(DIGEST)
    assert record.tenants(DIGEST) == frozenset()
