"""The handle class of a program's class stands for it where a program looks at classes."""

from tests.kit.programs.snippets import Snippet

_CLASSES = """
import copy, gc, io, pickle, sys, weakref
made = []
class Metaclass(type(torch.Tensor)):
    def __new__(cls, name, bases, namespace, **options):
        made.append(name)
        return super().__new__(cls, name, bases, namespace)
class Tagged(torch.Tensor):
    def __init_subclass__(cls, label="none", **options):
        made.append(label)
        super().__init_subclass__(**options)
class Derived(Tagged, label="derived"):
    pass
class OfMetaclass(torch.Tensor, metaclass=Metaclass):
    pass
class Weight(torch.nn.Parameter):
    pass
class Reduced(torch.Tensor):
    def __reduce_ex__(self, protocol):
        return rebuilt, (type(self), self.tolist())
def rebuilt(kind, values):
    return torch.tensor(values).as_subclass(kind)
for name in ("Tagged", "Derived", "OfMetaclass", "Weight", "Reduced", "rebuilt"):
    setattr(sys.modules["__main__"], name, globals()[name])
plain = torch.ones(2, device="cuda")
def on_gpu(kind):
    return plain.as_subclass(kind)
"""


def test_handle_class_answers_as_its_program_s_class_when_others_are_compared(
    shim: Snippet,
) -> None:
    shim(f"""{_CLASSES}
handle, derived = type(on_gpu(Tagged)), type(on_gpu(Derived))
assert isinstance(torch.ones(2).as_subclass(Tagged), handle)
assert isinstance(on_gpu(Derived), handle) and isinstance(on_gpu(Tagged), handle)
assert not isinstance(on_gpu(Tagged), derived) and not isinstance(plain, handle)
assert not isinstance(1, handle) and isinstance(torch.ones(2).as_subclass(Derived), handle)
assert issubclass(derived, handle) and issubclass(handle, handle) and issubclass(handle, Tagged)
assert not issubclass(handle, derived) and not issubclass(type(plain), handle)
assert handle == Tagged and Tagged == handle and hash(handle) == hash(Tagged) and handle != 1
assert handle != derived and handle != on_gpu(Tagged)
weight = type(Weight(plain))
assert isinstance(Weight(torch.ones(2)), weight) and not isinstance(plain, weight)
# A class of CPU tensors is none: C++ would ask it first, and the results would be CPU tensors.
scalar = torch.tensor(2.0).as_subclass(Tagged)
for product in (on_gpu(Tagged) * scalar, scalar * on_gpu(Tagged)):
    assert product.is_cuda and product.tolist() == [2, 2]
""")


def test_attribute_is_the_program_s_class_s_when_a_method_writes_it_to_its_own(
    shim: Snippet,
) -> None:
    shim(f"""{_CLASSES}
class Counted(torch.Tensor):
    count = 0
    def called(self):
        type(self).count += 1
        self.__class__.count += 1
        return self.called_on_class()
    @classmethod
    def called_on_class(cls):
        cls.count += 1
        return cls.count
class More(Counted):
    pass
assert on_gpu(Counted).called() == torch.ones(2).as_subclass(Counted).called() - 3 == 3
assert Counted.count == 6 == type(on_gpu(Counted)).count == on_gpu(More).count
assert on_gpu(More).called() == More.count == 9 and Counted.count == 6
""")


def test_handle_class_answers_when_the_program_s_metaclass_asks_all_subclasses(
    shim: Snippet,
) -> None:
    shim(f"""{_CLASSES}
import abc
class Meta(abc.ABCMeta, type(torch.Tensor)):
    pass
class Abstract(torch.Tensor, metaclass=Meta):
    pass
class Concrete(Abstract):
    pass
x = on_gpu(Concrete)
assert isinstance(x, Abstract) and isinstance(x, type(x)) and issubclass(type(x), Abstract)
assert issubclass(type(x), type(on_gpu(Abstract))) and not issubclass(Abstract, type(x))
assert not isinstance(1, Abstract) and not isinstance(plain, Abstract)
assert not isinstance(plain, type(x)) and not issubclass(Concrete, type(x))
""")


def test_class_is_derived_from_the_program_s_when_a_program_derives_from_a_handle_s(
    shim: Snippet,
) -> None:
    shim(f"""{_CLASSES}
class Own(type(on_gpu(Tagged)), label="own"):
    def doubled(self):
        return __class__, self * 2
assert Own.__bases__ == (Tagged,) and made[-1] == "own" and hash(Own) == object.__hash__(Own)
assert torch.ones(2).as_subclass(Own).is_cpu
kind, doubled = on_gpu(Own).doubled()
assert kind is Own and type(doubled) == Own and doubled.is_cuda
assert isinstance(on_gpu(Own), type(on_gpu(Tagged)))
class OwnOfMetaclass(type(on_gpu(OfMetaclass))):
    pass
assert OwnOfMetaclass.__bases__ == (OfMetaclass,) and type(OwnOfMetaclass) is Metaclass
""")


def test_class_is_of_gpu_tensors_when_a_program_derives_it_from_that_of_a_plain_one(
    shim: Snippet,
) -> None:
    shim(f"""{_CLASSES}
class Registered:
    def __init_subclass__(cls, label):
        made.append(label)
class OnGpu(type(plain), Registered, label="on the GPU"):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {{}})
x = on_gpu(OnGpu)
assert type(x) is OnGpu and (plain * x).tolist() == [1, 1] and (x * plain).is_cuda
assert "on the GPU" in made and "mul" in made
""")


def test_program_s_hooks_see_no_class_when_its_handle_class_is_made(shim: Snippet) -> None:
    shim(f"""{_CLASSES}
before = list(made)
for kind in (Tagged, Derived, OfMetaclass, Weight):
    x = on_gpu(kind)
    assert type(x * 2) == (type(plain) if kind is Weight else kind) and x.is_cuda
assert made == before == ["derived", "OfMetaclass"], made
""")


def test_handle_class_is_pickled_as_the_program_s(shim: Snippet) -> None:
    shim(f"""{_CLASSES}
for kind in (Derived, OfMetaclass, Weight, Reduced):
    for dumps in (pickle.dumps, pickle._dumps):
        assert pickle.loads(dumps(type(on_gpu(kind)))) is kind, kind
kept = pickle.loads(pickle.dumps(on_gpu(Reduced)))
assert type(kept) is Reduced and kept.tolist() == [1, 1]
file = io.BytesIO()
torch.save(type(on_gpu(Reduced)), file)
file.seek(0)
assert torch.load(file, weights_only=False) is Reduced
# Pickled by value, as some libraries do, a class leaves its handle class behind.
values = {{name: value for name, value in vars(Reduced).items() if name.startswith("_gpufaas")}}
assert values and set(pickle.loads(pickle.dumps(values)).values()) == {{None}}
""")


def test_classes_are_collected_when_a_function_makes_one_in_each_call(shim: Snippet) -> None:
    shim("""
import gc, weakref
def call(base):
    class Local(base):
        pass
    x = torch.ones(2, device="cuda").as_subclass(Local)
    assert type(x * 2) in (Local, type(torch.ones(1, device="cuda"))) and x.cpu().is_cpu
    return weakref.ref(Local), weakref.ref(type(x))
class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})
class OfMetaclass(torch.Tensor, metaclass=type("Metaclass", (type(torch.Tensor),), {})):
    pass
references = [r for base in (torch.Tensor, torch.nn.Parameter, Named, OfMetaclass)
    for r in call(base)]
gc.collect()
assert not any(reference() for reference in references), references
""")
