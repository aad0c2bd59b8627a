"""Weights laid out as their image: same values, one memory, and nobody's view is cut off."""

from tests.kit.programs.snippets import Snippet

SETUP = """
import fcntl, os
from torch_shim.tensors import write_epochs
from torch_shim.weights import MEMORY_NAME, ProcessWeights

memories = ProcessWeights()

def model(copies=1):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(copies + 1)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(512))

def weights(module):
    return [*module.parameters(), *module.buffers()]

def settled(module):
    since = write_epochs.new_key()
    module.cuda()
    memories.lay_out_weights(weights(module), since)
    seen = {write_epochs.storage_of(value).data_ptr(): value for value in weights(module)}
    return memories.find([write_epochs.storage_of(value) for value in seen.values()])

def content(memory):
    return [os.pread(memory.descriptor, size, offset) for offset, size in memory.table.storages]

def copy_of(memory):
    copy = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(copy, memory.table.total_bytes)
    for (offset, _), part in zip(memory.table.storages, content(memory)):
        os.pwrite(copy, part, offset)
    fcntl.fcntl(copy, fcntl.F_ADD_SEALS, 0xF)
    return copy

def raw(value):
    return value.detach().cpu().numpy().tobytes()
"""


def test_weights_keep_values_and_identity_when_they_are_laid_out(shim: Snippet) -> None:
    shim(f"""{SETUP}
    native = model()
    expected = [raw(value) for value in weights(native)]
    before = list(map(id, native.parameters()))
    memory = settled(native)
    assert memory is not None
    assert list(map(id, native.parameters())) == before
    assert [raw(value) for value in weights(native)] == expected
    assert content(memory) == expected
    """)


def test_writes_reach_the_image_until_it_is_sealed_and_not_after(shim: Snippet) -> None:
    shim(f"""{SETUP}
    module = model()
    memory = settled(module)
    address = module[0].weight.data_ptr()
    with torch.no_grad():
        module[0].weight.fill_(1)
        memory.seal()
        sealed = content(memory)
        assert sealed[0] == raw(module[0].weight)
        module[0].weight.fill_(2)
    assert content(memory) == sealed
    assert module[0].weight.unique().tolist() == [2.0]
    assert module[0].weight.data_ptr() == address
    """)


def test_contents_tell_that_a_weight_was_written_to_since_the_seal(shim: Snippet) -> None:
    shim(f"""{SETUP}
    module = model()
    memory = settled(module)
    memory.seal()
    weight = module[0].weight
    now = (write_epochs.marked(weight).epoch, write_epochs.version_of(weight))
    assert memory.sealed[0] == now
    weight.data.mul_(2)
    assert memory.sealed[0] != (write_epochs.marked(weight).epoch, write_epochs.version_of(weight))
    """)


def test_tied_weights_stay_tied(shim: Snippet) -> None:
    shim(f"""{SETUP}
    module = model()
    module[1].weight = module[0].weight
    assert settled(module) is not None
    with torch.no_grad():
        module[0].weight.fill_(3)
    assert module[1].weight.unique().tolist() == [3.0]
    """)


def test_weights_are_left_alone_when_somebody_has_a_view_of_one(shim: Snippet) -> None:
    shim(f"""{SETUP}
    module = model().cuda()
    view = module[0].weight.detach()[0]
    memories.lay_out_weights(weights(module), 0)
    assert memories.find([write_epochs.storage_of(value) for value in weights(module)]) is None
    view.fill_(7)
    assert module[0].weight[0].unique().tolist() == [7.0]
    """)


def test_weights_that_were_there_before_are_left_where_they_are(shim: Snippet) -> None:
    shim(f"""{SETUP}
    module = model()
    memory = settled(module)
    assert settled(module) is memory
    """)


def test_half_precision_weights_get_a_memory_of_their_own(shim: Snippet) -> None:
    shim(f"""{SETUP}
    module = model(copies=4)
    first = settled(module)
    since = write_epochs.new_key()
    module.half()
    memories.lay_out_weights(weights(module), since)
    second = memories.find([write_epochs.storage_of(value) for value in weights(module)])
    assert second is not None and second is not first
    """)


def test_memory_and_descriptor_go_with_the_weights(shim: Snippet) -> None:
    shim(f"""{SETUP}
    import gc
    module = model()
    memory = settled(module)
    descriptor = memory.descriptor
    del memory, module
    gc.collect()
    try:
        os.fstat(descriptor)
    except OSError:
        pass
    else:
        raise AssertionError("the descriptor is still open")
    assert MEMORY_NAME not in open("/proc/self/maps").read()
    """)


def test_a_childs_writes_do_not_reach_its_parent(shim: Snippet) -> None:
    shim(f"""{SETUP}
    module = model()
    memory = settled(module)
    before = raw(module[0].weight)
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            module[0].weight.fill_(9)
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.sealed is not None
    assert raw(module[0].weight) == before
    """)


def test_pages_are_those_of_a_copy_and_late_writes_stay(shim: Snippet) -> None:
    shim(f"""{SETUP}
    module = model()
    memory = settled(module)
    copy = copy_of(memory)
    late = module[1].weight.data
    late[3].fill_(5)  # after the copy was compared, before its pages are taken over
    expected = [raw(value) for value in weights(module)]
    memory.seal(copy)
    assert [raw(value) for value in weights(module)] == expected
    assert os.fstat(memory.descriptor).st_ino == os.fstat(copy).st_ino
    with torch.no_grad():
        module[0].weight.fill_(6)
    assert module[0].weight.unique().tolist() == [6.0]
    assert content(memory)[0] == expected[0]
    """)
