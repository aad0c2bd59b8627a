"""Users of tenants' workers: never two tenants with one, and none lost."""

from gpu_manager.runtimes.process import WorkerUsers


def test_tenant_keeps_its_user_while_it_has_a_worker() -> None:
    users = WorkerUsers(100, 2)

    assert users.take("a") == 100
    assert users.take("b") == 101
    assert users.take("a") == 100
    users.give_back("a")
    assert users.take("a") == 100


def test_no_two_tenants_have_one_user_when_there_are_too_many() -> None:
    users = WorkerUsers(100, 2)
    users.take("a")
    users.take("b")

    assert users.take("c") is None
    users.give_back("a")
    assert users.take("c") == 100
    assert users.take("a") is None


def test_tenants_that_come_and_go_find_users_for_ever() -> None:
    users = WorkerUsers(100, 3)
    found = []
    for number in range(30):
        found.append(users.take(f"t{number}"))
        users.give_back(f"t{number}")

    assert found == [100, 101, 102] * 10, "the one that was free for longest comes next"
