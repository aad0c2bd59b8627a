"""Backward passes, hooks, users' own autograd functions, optimizers and torch.func."""

import pytest

from tests.kit.programs.snippets import Snippet


def test_hooks_get_gpu_gradients_when_backpropagated(shim: Snippet) -> None:
    shim("""
    seen = []
    x = torch.ones(3).cuda().requires_grad_()
    x.register_hook(lambda g: seen.append(g.is_cuda and torch.zeros_like(g).is_cuda))
    y = x * 2
    y.register_hook(lambda g: seen.append(g.is_cuda) or g * 3)
    p = torch.nn.Parameter(torch.ones(3).cuda())
    p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.is_cuda))
    (y + p).sum().backward()
    assert seen == [True] * 3 and x.grad.is_cuda and x.grad.tolist() == [6, 6, 6]
    """)


def test_module_hooks_get_gpu_gradients_when_backpropagated(shim: Snippet) -> None:
    shim("""
    seen = []
    m = torch.nn.Linear(3, 3).cuda()
    m.register_full_backward_hook(lambda m, into, out: seen.append(into[0].is_cuda))
    m.register_full_backward_pre_hook(lambda m, out: seen.append(out[0].is_cuda))
    m.register_forward_hook(lambda m, args, result: seen.append(result.is_cuda))
    m(torch.ones(2, 3).cuda().requires_grad_()).sum().backward()
    assert seen == [True] * 3, seen
    """)


def test_autograd_function_sees_gpu_tensors_when_applied(shim: Snippet) -> None:
    shim("""
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            assert x.is_cuda and w.is_cuda
            ctx.save_for_backward(x, w)
            return x * w, x.cpu()
        @staticmethod
        def backward(ctx, g, on_cpu):
            x, w = ctx.saved_tensors
            assert g.is_cuda and x.is_cuda and w.is_cuda and type(on_cpu) is torch.Tensor
            return g * w + torch.zeros(3, device=g.device), g * x
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x
        @staticmethod
        def backward(ctx, g):
            return g
    x = torch.ones(3).cuda().requires_grad_()
    w = torch.nn.Parameter(torch.full((3,), 2.0).cuda())
    y, on_cpu = Product.apply(Same.apply(x), w)
    assert y.is_cuda and on_cpu.is_cpu and Same.apply(x).is_cuda
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2] and w.grad.is_cuda
    assert Same.apply(torch.ones(2)).is_cpu
    """)


@pytest.mark.parametrize("reentrant", ["True", "False"])
def test_checkpoint_recomputes_on_the_gpu_when_backpropagated(
    dynamo_shim: Snippet, reentrant: str
) -> None:
    dynamo_shim(f"""
    from torch.utils.checkpoint import checkpoint
    layer = torch.nn.Linear(3, 3).cuda()
    def work(x):
        y = layer(x)
        assert x.is_cuda and y.is_cuda
        return y + torch.zeros(3, device=y.device)
    x = torch.ones(2, 3).cuda().requires_grad_()
    y = checkpoint(work, x, use_reentrant={reentrant})
    y.sum().backward()
    assert y.is_cuda and x.grad.is_cuda and layer.weight.grad.is_cuda
    """)


def test_gradients_are_where_their_inputs_are_when_asked_for(shim: Snippet) -> None:
    shim("""
    x, z = torch.ones(3, requires_grad=True), torch.ones(3).cuda().requires_grad_()
    (g,) = torch.autograd.grad((x.cuda() * 2).sum(), [x])
    assert type(g) is torch.Tensor and g.is_cpu
    (g,) = torch.autograd.grad((z**3).sum(), z, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), z)
    assert g.is_cuda and h.is_cuda and h.tolist() == [6, 6, 6]
    torch.autograd.backward([(z * 2).sum()])
    assert z.grad.is_cuda
    image = torch.ones(3).as_subclass(type("Image", (torch.Tensor,), {})).cuda() * x.cuda()
    (g,) = torch.autograd.grad(image.sum(), [x])
    assert g.is_cpu
    """)


def test_gradients_are_refused_when_they_are_on_the_cpu_and_their_outputs_are_not(
    shim: Snippet,
) -> None:
    shim("""
    x = torch.ones(3, requires_grad=True)
    y, on_cpu = x.cuda() * 2, torch.ones(3)
    options = {"retain_graph": True}
    for asked in (
        lambda: torch.autograd.grad(y, x, on_cpu, **options),
        lambda: torch.autograd.grad([y, x * 3], [x], [on_cpu, on_cpu.cuda()], **options),
        lambda: torch.autograd.backward([y], [on_cpu], **options),
        lambda: y.backward(on_cpu, **options),
    ):
        try:
            asked()
        except RuntimeError as error:
            assert "cuda:0 and cpu" in str(error)
        else:
            raise AssertionError("CUDA refuses it")
    assert x.grad is None
    (g,) = torch.autograd.grad([y, x * 3], [x], [on_cpu.cuda(), on_cpu], **options)
    assert g.is_cpu and g.tolist() == [5, 5, 5]
    torch.autograd.grad(y.sum(), x, torch.tensor(1.0))
    """)


@pytest.mark.parametrize("foreach", ["None", "True"])
def test_training_equals_the_cpu_s_when_run_on_handles(dynamo_shim: Snippet, foreach: str) -> None:
    dynamo_shim(f"""
    def train(device):
        torch.manual_seed(0)
        m = torch.nn.Linear(3, 3).to(device)
        optimizer = torch.optim.Adam(m.parameters(), foreach={foreach})
        for _ in range(3):
            optimizer.zero_grad()
            m(torch.ones(2, 3, device=device)).pow(2).sum().backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return m, optimizer
    (expected, _), (found, optimizer) = train("cpu"), train("cuda")
    assert found.weight.is_cuda and torch.equal(found.weight.cpu(), expected.weight)
    assert next(iter(optimizer.state.values()))["exp_avg"].is_cuda
    """)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "Adagrad", "LBFGS"])
def test_optimizer_steps_when_parameters_are_on_the_gpu(dynamo_shim: Snippet, name: str) -> None:
    dynamo_shim(f"""
    def train(device):
        torch.manual_seed(0)
        m = torch.nn.Linear(3, 3).to(device)
        optimizer = torch.optim.{name}(m.parameters(), lr=0.1)
        def loss():
            optimizer.zero_grad()
            value = m(torch.ones(2, 3, device=device)).pow(2).sum()
            value.backward()
            return value
        optimizer.step(loss)
        return m.weight
    assert torch.equal(train("cuda").cpu(), train("cpu"))
    """)


def test_gradient_scaler_steps_when_on_the_gpu(dynamo_shim: Snippet) -> None:
    dynamo_shim("""
    m = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    before = m.weight.detach().clone()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = m(torch.ones(2, 4).cuda()).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0 and not torch.equal(before, m.weight)
    """)


def test_functional_transforms_keep_the_device_when_applied(dynamo_shim: Snippet) -> None:
    dynamo_shim("""
    import warnings
    warnings.simplefilter("ignore")  # forward mode loads TorchScript, which is deprecated
    f = torch.func
    m, x = torch.nn.Linear(3, 2).cuda(), torch.ones(4, 3).cuda()
    weights = dict(m.named_parameters())
    def total(weights, x):
        return f.functional_call(m, weights, (x,)).sum()
    def inside(a):
        assert a.is_cuda
        return a * 2 + torch.ones(3, device=a.device)
    assert f.functional_call(m, weights, (x,)).is_cuda
    assert f.grad(total)(weights, x)["weight"].is_cuda
    assert f.vmap(inside)(x).is_cuda and f.vmap(inside)(x).tolist() == [[3.0] * 3] * 4
    assert f.vmap(f.grad(total), in_dims=(None, 0))(weights, x)["bias"].is_cuda
    for transform in (f.jacrev, f.jacfwd):
        assert transform(lambda a: a * a)(x[0]).is_cuda
    assert f.hessian(lambda a: (a**3).sum())(x[0]).diag().tolist() == [6, 6, 6]
    assert f.vjp(lambda a: a * 2, x)[1](x)[0].is_cuda
    assert all(part.is_cuda for part in f.jvp(lambda a: a * 2, (x,), (x,)))
    assert torch.autograd.functional.jacobian(lambda a: a * a, x[0]).is_cuda
    """)


def test_backward_sees_gpu_tensors_when_another_class_starts_it(shim: Snippet) -> None:
    shim("""
    import warnings
    from torch.masked import as_masked_tensor, masked_tensor

    warnings.simplefilter("ignore")
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.extend((gradient, *ctx.saved_tensors, gradient * 2))
            return gradient * 2

    def gradients(device):
        x = torch.arange(6.0, device=device).reshape(2, 3).requires_grad_()
        mask = torch.tensor([[True, False, True], [False, True, True]], device=device)
        doubled = Doubled.apply(x)
        doubled.register_hook(lambda gradient: seen.append(gradient + 1))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, lambda tensor: (seen.append(tensor.clone()), tensor)[1]
        ):
            as_masked_tensor(doubled.exp(), mask).sum().backward()
        own = masked_tensor(x.detach(), mask, requires_grad=True)
        (own.sin() ** 2).sum().backward()
        return x.grad.to_tensor(0), own.grad.to_tensor(0)

    on_cpu = gradients("cpu")
    seen.clear()
    on_gpu = gradients("cuda")
    assert seen and all(tensor.is_cuda for tensor in (*seen, *on_gpu)), seen
    assert all(torch.equal(here, there.cpu()) for here, there in zip(on_cpu, on_gpu, strict=True))
    """)


def test_linear_approximation_is_on_the_gpu_when_its_point_is(dynamo_shim: Snippet) -> None:
    dynamo_shim("""
    import warnings
    warnings.simplefilter("ignore")

    weight, net = torch.full((2, 2), 2.0), torch.nn.Linear(2, 2)
    for function in (
        torch.sin,
        lambda x: x @ weight.to(x.device) + 1,
        lambda x: net.to(x.device)(x).softmax(0)[0].sum(),
    ):
        found = []
        for device in ("cpu", "cuda"):
            x = torch.arange(4.0, device=device).reshape(2, 2)
            value, approximate = torch.func.linearize(function, x)
            step = approximate(torch.ones_like(x))
            assert value.device.type == step.device.type == device
            found.append((value.cpu(), step.cpu()))
        assert all(map(torch.allclose, *found)), found
    """)


def test_linear_approximation_is_where_the_function_puts_it(dynamo_shim: Snippet) -> None:
    dynamo_shim("""
    import warnings
    warnings.simplefilter("ignore")

    def approximations(device):
        x = torch.arange(1.0, 4.0, device=device)
        for function in (
            lambda x: x.sin().cpu(),
            lambda x: (x.cos(), x.sin().cpu() * torch.ones(3)),
            lambda x: (x.cpu() * torch.tensor([1.0, 2.0, 3.0])).to(x.device) * 2,
            lambda x: x.gather(0, torch.tensor([0, 2], device=x.device)),
            lambda x: (torch.zeros(3), x.new_zeros(3) + torch.full((3,), 2.0, device=x.device)),
        ):
            value, approximate = torch.func.linearize(function, x)
            step = approximate(torch.ones_like(x))
            yield torch.utils._pytree.tree_leaves((value, step))

    for on_cpu, on_gpu in zip(approximations("cpu"), approximations("cuda"), strict=True):
        values, steps = on_gpu[:len(on_gpu) // 2], on_gpu[len(on_gpu) // 2:]
        assert [value.device for value in values] == [step.device for step in steps], on_gpu
        assert all(torch.allclose(here, there.cpu()) for here, there in zip(on_cpu, on_gpu))
    """)
