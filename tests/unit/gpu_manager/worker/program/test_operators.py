"""The closed list of operators: what computes is on it, what reaches beyond tensors is not."""

import builtins
import importlib
import inspect
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.calls.call import leave_modes
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.argument_checks import short_name
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.reviewed_operators import DUNDERS, INTERNAL
from tests.kit.outcomes import outcome
from tests.kit.worlds.caller import program, step
from torch_shim.capture.encode import encode
from torch_shim.wire.programs import Ref

importlib.import_module("torchvision")  # registers its operators
TABLE = OperatorTable(torch.device("cpu"))


COMPUTING = """
    m:relu_ m:view m:__getitem__ m:new_zeros m:stride m:item m:to m:cpu m:cuda
    t:torch.add t:torch.nn.functional.relu t:torch.nn.functional.hardswish t:torch.zeros
    t:torch.linalg.inv t:torch.fft.rfft t:torch.special.erf t:torch._C._nn.gelu t:torch.sym_max
    t:torch.nn.functional.scaled_dot_product_attention t:torch.lstm t:torch.einsum
    t:torch.amp.autocast_mode._enter_autocast t:torch._C._set_grad_enabled
    t:torch._functorch.predispatch._add_batch_dim
    a:aten::add.Tensor a:aten::add a:aten::relu.default a:torchvision::nms
    a:torchvision::nms.default
    o:getitem o:add b:max M:floor g:shape g:mT g:data""".split()  # noqa: SIM905 - reads better
REACHING_BEYOND = """
    m:numpy m:tolist m:data_ptr m:storage m:untyped_storage m:set_ m:resize_ m:apply_ m:map_
    m:register_hook m:share_memory_ m:__reduce_ex__ m:__class__ m:backward m:pin_memory
    m:__dict__ m:__init__ m:__init_subclass__ m:__getattribute__ m:__setattr__
    t:torch.load t:torch.save t:torch.from_file t:torch.hub.load t:torch.jit.load t:torch.compile
    t:torch.os.system t:torch.sys.exit t:torch.set_num_threads t:torch.manual_seed
    t:torch.utils.data.DataLoader t:torch.classes.load_library t:torch.ops.load_library
    t:torch.from_numpy t:torch.frombuffer t:torch.import_ir_module t:os.system t:builtins.eval
    t:torch.nn.functional.boolean_dispatch t:torch.package.PackageImporter t:torch.autocast
    a:aten::from_file a:aten::set_.source_Storage a:aten::resize_ a:aten::_print a:aten::data_ptr
    a:aten::__class__ a:aten::save a:inductor::_alloc_from_pool a:image::read_file a:aten::warn
    a:c10d::send a:profiler::_record_function_enter a:aten::_pin_memory a:: a:aten a:aten::
    t:torch.sparse_coo_tensor m:to_dense m:to_sparse m:coalesce a:aten::sparse_coo_tensor.size
    a:aten::_sparse_coo_tensor_with_dims_and_tensors a:aten::_convert_indices_from_csr_to_coo
    t:torch.sparse_csr_tensor a:aten::_sparse_compressed_tensor_unsafe a:aten::_reshape_alias
    t:torch.fbgemm_pack_quantized_matrix a:aten::fbgemm_pack_gemm_matrix_fp16
    t:torch.segment_reduce a:aten::segment_reduce t:torch.ctc_loss a:aten::_ctc_loss
    t:torch.quantize_per_tensor a:aten::_empty_affine_quantized a:aten::_index_put_impl_
    a:aten::_unsafe_index.Tensor a:aten::_cudnn_rnn a:aten::_efficient_attention_forward
    a:aten::_fft_c2c a:aten::_weight_int4pack_mm a:aten::_foreach_add.Scalar a:prims::as_strided
    a:aten::add.out a:aten::empty.out a:aten::native_batch_norm.out a:aten::empty.names
    a:aten::sum.dim_DimnameList a:aten::sort.dimname_stable a:aten::flatten.named_out_dim
    a:torchvision::qroi_align a:torchvision::_roi_align_backward t:torch.lcm m:lcm_
    o:attrgetter o:methodcaller o:call o:setattr b:eval b:exec b:open b:getattr b:__import__
    b:type b:print b:input M:__loader__ g:__class__ g:__dict__ g:grad_fn g:_base
    g:__init__ x:add add m: t:""".split()  # noqa: SIM905 - reads better


def test_operator_is_found_when_it_computes() -> None:
    wrong = [
        (name, found) for name in COMPUTING if not callable(found := outcome(TABLE.find, name))
    ]
    assert wrong == []


def test_operator_is_refused_when_it_reaches_beyond_tensors() -> None:
    wrong = []
    for name in REACHING_BEYOND:
        found = outcome(TABLE.find, name)
        using = program(step(name, Ref(0)), output=[Ref(1)])
        built = outcome(BuiltProgram, "d", using, TABLE)
        refused = isinstance(built, CallRefused) and built.failure == "program refused"
        named = isinstance(built, CallRefused) and repr(name) in built.detail
        if found is not None or not refused or not named:
            wrong.append((name, found, built))
    assert wrong == []


def test_no_operator_leads_to_the_system_when_all_are_walked() -> None:
    forbidden: set[Any] = {
        eval,
        exec,
        compile,
        open,
        __import__,
        getattr,
        setattr,
        torch.load,
        torch.save,
        torch.from_file,
    }
    found = {name: TABLE.find(name) for name in TABLE.names()}
    assert len(found) > 2500
    modules = {type(builtins), type(TABLE)}
    for name, target in found.items():
        assert callable(target), name
        assert type(target) not in modules, name
        assert not isinstance(target, type) or target in {bool, complex, float, int}, name
        assert target not in forbidden, name


def test_methods_are_found_when_torch_alone_calls_them() -> None:
    mixed = torch.tensor([True, False])
    asked = [TABLE.find(f"m:{name}") for name in ("_is_all_true", "_is_any_true")]
    assert [found is not None and bool(found(mixed)) for found in asked] == [False, True]


class _Many(nn.Module):
    """A little of everything that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, _ = self.lstm(x)
        z, _ = self.attention(y, y, y)
        mask = torch.arange(x.size(1), device=x.device)[None] < 2
        z = self.norm(z).masked_fill(~mask[..., None], math.inf)
        top, indices = z.flatten(1).topk(3)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):
            w = top @ top.mT
        w[:, 0] = 1.0
        pooled = torch.vmap(lambda row: row.sum(-1))(z)
        return w, indices, pooled, z.chunk(2, dim=1)[0].to(x.dtype), x.new_zeros(2)


def _captured(
    module: nn.Module, *inputs: torch.Tensor
) -> list[tuple[torch.fx.GraphModule, tuple[Any, ...], Any]]:
    """The graphs that Dynamo makes of a module, each with its arguments and its own answer."""
    graphs: list[tuple[torch.fx.GraphModule, tuple[Any, ...], Any]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            graphs.append((graph, arguments, graph(*arguments)))
            return graphs[-1][2]

        return run

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend)(*inputs)
    return graphs


def test_captured_module_computes_the_same_when_built_again() -> None:
    torch.manual_seed(0)
    (captured,) = _captured(_Many().eval(), torch.randn(2, 4, 4))
    _computes_the_same(*captured)


def _computes_the_same(graph: torch.fx.GraphModule, arguments: Any, expected: Any) -> None:
    built = BuiltProgram("d", encode(graph), TABLE)
    with torch.no_grad():
        found = built.run([_plain(argument) for argument in arguments], built.constants)
    leave_modes()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


class _Marks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).requires_grad_() + 1


def test_module_computes_the_same_when_it_marks_a_result_for_gradients() -> None:
    captured = _captured(_Marks(), torch.ones(2))
    assert captured  # older Dynamo ends a graph there and begins another
    for graph, arguments, expected in captured:
        _computes_the_same(graph, arguments, expected)


def test_switches_for_gradients_are_no_steps_of_a_program() -> None:
    allow: Any = torch._C._functorch.set_inplace_requires_grad_allowed  # noqa: SLF001 - what Dynamo puts around a mark
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(allow, (True,))
    marked = graph.call_method("requires_grad_", (x,))
    graph.call_function(allow, (False,))
    graph.output([graph.call_function(operator.add, (marked, 1))])
    encoded = encode(torch.fx.GraphModule({}, graph))
    assert [called.operator for called in encoded.steps] == ["m:requires_grad_", "o:add"]
    built = BuiltProgram("d", encoded, TABLE)
    (found,) = built.run([torch.ones(2)], built.constants)
    assert torch.equal(found, torch.full((2,), 2.0))


def test_sizes_are_tuples_in_a_program() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    rows = graph.call_method("size", (x, 0))
    size = graph.call_function(torch.Size, ([rows, 2],))
    graph.output([graph.call_method("expand", (x, size))])
    module = torch.fx.GraphModule({}, graph)
    built = BuiltProgram("d", encode(module), TABLE)
    (found,) = built.run([torch.ones(3, 1)], built.constants)
    assert found.shape == (3, 2)


def _plain(argument: Any) -> Any:
    return argument.detach() if isinstance(argument, torch.Tensor) else argument


def version(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001 - the counter that autograd goes by


def test_statistics_count_as_written_when_batches_are_normalised_in_training() -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    for name, arguments in {
        "t:torch.nn.functional.batch_norm": (mean, variance, None, None, True),
        "t:torch.batch_norm": (None, None, mean, variance, True, 0.1, 1e-5, False),
        "a:aten::native_batch_norm": (None, None, mean, variance, True, 0.1, 1e-5),
        "a:aten::_native_batch_norm_legit.default": (None, None, mean, variance, True, 0.1, 1e-5),
    }.items():
        before = (version(mean), version(variance))
        found = TABLE.find(name)
        assert found is not None
        found(torch.randn(4, 3, 2, 2), *arguments)
        assert (version(mean), version(variance)) > before, name


def test_statistics_count_as_unwritten_when_batches_are_normalised_in_evaluation() -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    found = TABLE.find("t:torch.nn.functional.batch_norm")
    assert found is not None
    found(torch.randn(4, 3, 2, 2), mean, variance, training=False)
    assert (version(mean), version(variance)) == (0, 0)


def test_data_shares_the_version_when_it_is_written_to() -> None:
    tensor = torch.zeros(3)
    found = TABLE.find("g:data")
    assert found is not None
    found(tensor).mul_(2)
    assert version(tensor) == 1


def test_autocast_is_left_when_a_program_never_leaves_it() -> None:
    enter = TABLE.find("t:torch.amp.autocast_mode._enter_autocast")
    assert enter is not None
    enter("cuda", torch.bfloat16, True, None)
    assert torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    leave_modes()
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_takes_half_when_the_program_names_no_dtype() -> None:
    enter = TABLE.find("t:torch.amp.autocast_mode._enter_autocast")
    leave = TABLE.find("t:torch.amp.autocast_mode._exit_autocast")
    assert enter is not None
    assert leave is not None
    mode = enter("cuda", None, True, None)
    assert torch.get_autocast_dtype("cpu") is torch.float16
    leave(mode)
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_of_the_cpu_is_passed_over_when_the_device_is_emulated() -> None:
    enter = TABLE.find("t:torch.amp.autocast_mode._enter_autocast")
    leave = TABLE.find("t:torch.amp.autocast_mode._exit_autocast")
    assert enter is not None
    assert leave is not None
    mode = enter("cpu", torch.bfloat16, True, None)
    assert not torch.is_autocast_enabled("cpu")
    leave(mode)


def test_vmap_is_left_when_a_program_never_leaves_it() -> None:
    begin = TABLE.find("t:torch._functorch.predispatch._vmap_increment_nesting")
    assert begin is not None
    begin(3, "error")
    leave_modes()
    functorch = torch._C._functorch  # noqa: SLF001 - the only way to see it
    assert functorch.get_dynamic_layer_stack_depth() == 0


def test_names_with_an_underscore_are_those_that_were_reviewed() -> None:
    listed = frozenset().union(*INTERNAL.values(), DUNDERS)
    replaced = (
        "_enter_", "_exit_", "_set_grad", "_vmap_", "_add_batch", "_remove_batch", "_grouped_mm"
    )  # fmt: skip
    for name in TABLE.names():
        short = name[2:].rpartition("::")[2]
        short = short.partition(".")[0] if name[0] == "a" else short.rpartition(".")[2]
        if short.startswith("_") and not short.startswith(replaced):
            assert short in listed, name


def test_reviewed_names_with_an_underscore_are_found() -> None:
    found = {short_name(name) for name in TABLE.names()}
    for reason, reviewed in INTERNAL.items():
        assert reviewed <= found, reason


def test_registered_operators_have_no_output_that_is_given() -> None:
    registered = [name for name in TABLE.names() if name.startswith("a:") and "." in name]
    assert len(registered) > 1000
    for name in registered:
        space, _, rest = name[2:].partition("::")
        if space == "transformers":  # the worker's own function; it does not load the library
            continue
        short, _, overload = rest.partition(".")
        schema = getattr(getattr(getattr(torch.ops, space), short), overload)._schema  # noqa: SLF001 - torch has no public way to ask
        assert not any(argument.is_out for argument in schema.arguments), name


def test_registered_operators_take_no_names_of_dimensions() -> None:
    called_so = re.compile(r"names|(start_|end_|out_?)?dims?[012]?")
    for name in TABLE.names():
        space, _, rest = name[2:].partition("::")
        short, _, overload = rest.partition(".")
        if not name.startswith("a:") or not overload or space == "transformers":
            continue
        schema = getattr(getattr(getattr(torch.ops, space), short), overload)._schema  # noqa: SLF001 - torch has no public way to ask
        for argument in schema.arguments:
            is_text = "str" in str(argument.type)
            assert not (is_text and called_so.fullmatch(argument.name)), schema


def test_explicit_lists_name_what_their_modules_have() -> None:
    table = OperatorTable(torch.device("cuda", 0))  # an emulated one has power as autocast has it
    for letter, space in (("o", operator), ("M", math), ("b", builtins)):
        named = [name[2:] for name in table.names() if name.startswith(f"{letter}:")]
        assert named
        for name in named:
            found = table.find(f"{letter}:{name}")
            assert found is not None
            assert inspect.unwrap(found) is getattr(space, name)
