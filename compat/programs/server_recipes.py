"""Serves and ships models in the ways of deployments: WAY."""

import asyncio
import io
import json
import multiprocessing
import queue
import sys
import tempfile
import threading
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import passes
from torch.utils.benchmark import Timer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

path, way = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
warnings.simplefilter("ignore")
results = {}


def note(name, value):
    results[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x))


def http_server():
    model = Net().to(device).eval()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with torch.inference_mode():
                answer = model(torch.tensor(body, device=device)).softmax(-1).cpu().tolist()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(number):
        rows = [[float(number + column) / 10 for column in range(8)]]
        url = f"http://127.0.0.1:{server.server_port}/"
        with urllib.request.urlopen(url, json.dumps(rows).encode()) as answer:
            return json.load(answer)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(12)))
    server.shutdown()
    note("answers", torch.tensor(answers))


def batching_loop():
    model, waiting = Net().to(device).eval(), asyncio.Queue()

    @torch.inference_mode()
    def answer(batch):
        return model(batch)

    async def serve():
        while True:
            batch = [await waiting.get()]
            while not waiting.empty() and len(batch) < 4:
                batch.append(waiting.get_nowait())
            found = await asyncio.to_thread(answer, torch.stack([x for x, _ in batch]).to(device))
            for (_, done), row in zip(batch, found, strict=True):
                done.set_result(row.cpu())

    async def ask(x):
        done = asyncio.get_running_loop().create_future()
        await waiting.put((x, done))
        return await done

    async def main():
        task = asyncio.create_task(serve())
        found = await asyncio.gather(*(ask(torch.full((8,), i / 10)) for i in range(10)))
        task.cancel()
        return torch.stack(found)

    note("answers", asyncio.run(main()))


def pipeline_of_threads():
    first, second = Net().body.to(device).eval(), Net().head.to(device).eval()
    between, done = queue.Queue(2), queue.Queue()

    def start():
        with torch.no_grad():
            for number in range(6):
                between.put(first(torch.full((2, 8), number / 5, device=device)))
        between.put(None)

    def finish():
        with torch.no_grad():
            while (found := between.get()) is not None:
                done.put(second(found).cpu())

    threads = [threading.Thread(target=step) for step in (start, finish)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    note("answers", torch.stack([done.get() for _ in range(6)]))


def _work(inbox, outbox, state):
    model = Net().to("cuda" if torch.cuda.is_available() else "cpu").eval()
    model.load_state_dict(state)
    for rows in iter(inbox.get, None):
        with torch.inference_mode():
            outbox.put(model(rows.to(next(model.parameters()).device)).cpu().numpy())


def spawned_worker():
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=_work, args=(inbox, outbox, Net().state_dict()))
    process.start()
    for number in range(3):
        inbox.put(torch.full((2, 8), number / 3))
    inbox.put(None)
    note("answers", torch.stack([torch.from_numpy(outbox.get()) for _ in range(3)]))
    process.join()


def _add_one(shared, ready):
    shared.add_(1)
    ready.set()


def shared_tensor():
    context = torch.multiprocessing.get_context("spawn")
    shared, ready = torch.zeros(4).share_memory_(), context.Event()
    process = context.Process(target=_add_one, args=(shared, ready))
    process.start()
    ready.wait(120)
    process.join()
    note("shared", shared.to(device) * 2)


def scripted_and_saved():
    scripted = torch.jit.script(Net().eval())
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    loaded = torch.jit.load(file, map_location=device)
    note("loaded", loaded(torch.ones(2, 8, device=device)))
    frozen = torch.jit.freeze(torch.jit.script(Net().eval().to(device)))
    note("frozen", frozen(torch.ones(2, 8, device=device)))
    traced = torch.jit.trace(Net().to(device).eval(), torch.ones(1, 8, device=device))
    note("traced", traced(torch.ones(3, 8, device=device)))
    optimized = torch.jit.optimize_for_inference(torch.jit.script(Net().eval()))
    note("optimized", optimized(torch.ones(2, 8)))


def exported_and_saved():
    model = Net().eval()
    with tempfile.TemporaryDirectory() as folder:
        rows = torch.export.Dim("rows", min=1, max=64)
        program = torch.export.export(model, (torch.ones(2, 8),), dynamic_shapes=({0: rows},))
        torch.export.save(program, Path(folder) / "model.pt2")
        loaded = torch.export.load(Path(folder) / "model.pt2").module().to(device)
    note("loaded", loaded(torch.ones(5, 8, device=device)))
    note(
        "decomposed", program.run_decompositions().module().to(device)(torch.ones(3, 8).to(device))
    )
    moved = passes.move_to_device_pass(program, device)
    note("moved", moved.module()(torch.ones(4, 8, device=device)))


def compiled_modes():
    x = torch.ones(4, 8, device=device)
    for options in (
        {"mode": "reduce-overhead"},
        {"dynamic": True},
        {"fullgraph": True},
        {"backend": "eager"},
        {"backend": "aot_eager"},
    ):
        torch.manual_seed(1)
        model = Net().to(device).eval()
        compiled = torch.compile(model, **options)
        with torch.no_grad():
            note(f"answer{len(results)}", compiled(x))
            note(f"rows{len(results)}", compiled(x[:3]))
        assert set(compiled.state_dict()) != set(model.state_dict())

    @torch.compile
    def gelu(value, scale: float = 2.0):
        return F.gelu(value) * scale

    note("function", gelu(x))
    model.compile()
    note("in_place", model(x))


def symbolic_rewrite():
    traced = torch.fx.symbolic_trace(Net().eval())
    for node in traced.graph.nodes:
        if node.op == "call_module" and isinstance(traced.get_submodule(node.target), nn.ReLU):
            with traced.graph.inserting_after(node):
                new = traced.graph.call_function(torch.tanh, (node.args[0],))
            node.replace_all_uses_with(new)
            traced.graph.erase_node(node)
    traced.recompile()
    moved = traced.to(device)
    note("rewritten", moved(torch.ones(2, 8, device=device)))

    class Doubling(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            return super().call_function(target, args, kwargs) * 2

    note("interpreted", Doubling(moved).run(torch.ones(2, 8, device=device)))


def own_operator():
    @torch.library.custom_op("strangers::clip_rows", mutates_args=())
    def clip_rows(x: torch.Tensor, bound: float) -> torch.Tensor:
        return x.clamp(-bound, bound) / x.abs().amax(-1, keepdim=True)

    @clip_rows.register_fake
    def _(x, bound):
        return torch.empty_like(x)

    clip_rows.register_autograd(
        lambda ctx, gradient: (gradient, None), setup_context=lambda ctx, inputs, output: None
    )

    class Clipped(Net):
        def forward(self, x):
            return self.head(torch.ops.strangers.clip_rows(self.body(x), 0.5))

    model = Clipped().to(device).eval()
    with torch.no_grad():
        for call in range(3):
            note(f"answer{call}", model(torch.randn(4, 8).to(device)))
    note("outside", clip_rows(torch.ones(2, 4, device=device) * 3, 2.0))


def older_library():
    library = torch.library.Library("strangers_old", "DEF")
    library.define("twice(Tensor x, int n=2) -> Tensor")
    library.impl("twice", lambda x, n=2: x * n, "CompositeImplicitAutograd")

    class Twice(Net):
        def forward(self, x):
            return self.head(torch.ops.strangers_old.twice(self.body(x), 3))

    model = Twice().to(device).eval()
    with torch.no_grad():
        note("answer", model(torch.ones(4, 8, device=device)))
        note("again", model(torch.ones(4, 8, device=device) * 2))
    results["keep"] = library is not None


def data_loaders():
    model = Net().to(device).eval()
    data = TensorDataset(torch.randn(20, 8), torch.arange(20) % 3)
    total = torch.zeros(3, 3, dtype=torch.long, device=device)
    with torch.no_grad():
        loader = DataLoader(data, 4, num_workers=2, pin_memory=True, persistent_workers=True)
        for _ in range(2):
            for x, y in loader:
                guess = model(x.to(device, non_blocking=True)).argmax(-1)
                total.index_put_(
                    (y.to(device, non_blocking=True), guess),
                    torch.ones(1, device=device).long(),
                    True,
                )
        note("confusion", total)
        weights = torch.rand(20)
        sampler = WeightedRandomSampler(weights, 8, generator=torch.Generator().manual_seed(0))
        for x, _ in DataLoader(data, 4, sampler=sampler):
            note(f"sampled{len(results)}", model(x.to(device)))

        class Stream(IterableDataset):
            def __iter__(self):
                yield from ({"x": torch.full((8,), i / 7), "name": str(i)} for i in range(5))

        for batch in DataLoader(Stream(), 2):
            note("_".join(batch["name"]), model(batch["x"].to(device)))
        on_device = TensorDataset(torch.randn(6, 8).to(device))
        for (x,) in DataLoader(on_device, 3, shuffle=True):
            note(f"there{len(results)}", model(x))


def quantized():
    net = Net().eval()
    quick = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    note("dynamic", quick(torch.ones(2, 8)))
    net = Net().to(device)
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    prepared = torch.ao.quantization.prepare_qat(net.train())
    for _ in range(2):
        prepared(torch.randn(4, 8).to(device)).sum().backward()
    note("trained", prepared.eval()(torch.ones(2, 8, device=device)))
    fake = torch.fake_quantize_per_tensor_affine(torch.randn(4).to(device), 0.1, 0, -128, 127)
    note("fake", fake)


def one_process_group():
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/group",
            rank=0,
            world_size=1,
        )
        model = nn.parallel.DistributedDataParallel(Net().to(device))
        loss = model(torch.ones(4, 8, device=device)).square().sum()
        loss.backward()
        note("gradient", model.module.head.weight.grad)
        total = torch.ones(3, device=device)
        torch.distributed.all_reduce(total)
        gathered = [torch.zeros(3, device=device)]
        torch.distributed.all_gather(gathered, total)
        torch.distributed.barrier()
        note("gathered", gathered[0])
        torch.distributed.destroy_process_group()


def profiled():
    model, x = Net().to(device).eval(), torch.ones(4, 8, device=device)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with (
        torch.profiler.profile(activities=kinds, record_shapes=True) as found,
        torch.profiler.record_function("forward"),
    ):
        note("answer", model(x))
    assert any(event.key == "forward" for event in found.key_averages())
    timer = Timer("model(x)", globals={"model": model, "x": x})
    assert timer.timeit(3).mean > 0


if __name__ == "__main__":
    globals()[way]()
    torch.save(results, path)
