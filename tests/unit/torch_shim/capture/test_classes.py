"""A class whose functions were replaced is noticed; one that counts its calls is not."""

import torch

from torch_shim.capture.root_calls import Methods


def make() -> tuple[type[torch.nn.Module], type, torch.nn.Module]:
    class Helper:
        def help(self, x: int) -> int:
            return x

    class Net(torch.nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.helper = Helper()

        def forward(self, x: int) -> int:
            return self.helper.help(x)

        @property
        def size(self) -> int:
            return 1

    return Net, Helper, Net()


def test_methods_are_unchanged_when_only_attributes_were_written() -> None:
    net, _, module = make()
    methods = Methods(module)
    net.calls = 5  # type: ignore[attr-defined]  # a class made in the test
    module.training = False
    assert methods.unchanged()


def test_methods_are_changed_when_forward_was_replaced() -> None:
    net, _, module = make()
    methods = Methods(module)
    original = net.forward
    net.forward = lambda _self, x: x + 1
    assert not methods.unchanged()
    net.forward = original
    assert methods.unchanged()


def test_methods_are_changed_when_a_property_was_replaced() -> None:
    net, _, module = make()
    methods = Methods(module)
    net.size = property(lambda _self: 2)  # type: ignore[attr-defined]  # what users do
    assert not methods.unchanged()


def test_methods_are_changed_when_an_object_it_holds_has_another_method() -> None:
    _, helper, module = make()
    methods = Methods(module)
    helper.help = lambda _self, x: x * 2  # type: ignore[attr-defined]  # what users do
    assert not methods.unchanged()


def test_methods_are_changed_when_a_base_class_got_one_more() -> None:
    net, _, module = make()
    methods = Methods(module)
    net.more = lambda _self: None  # type: ignore[attr-defined]  # what users do
    assert not methods.unchanged()
