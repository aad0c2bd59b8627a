"""Models that are made, moved and called in threads other than the first: WAY."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from urllib.request import urlopen

import torch
from torch import nn

path, way = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Gated(nn.Module):
    """Has a condition, a loop and a dropout, as models have."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x, deep=True):
        for layer in self.layers:
            x = torch.relu(layer(x))
            if not deep:
                break
        return nn.functional.dropout(x, training=self.training)


def answer(model, x):
    with torch.inference_mode():
        return model(x.to(device)).cpu()


def only_in_thread(model, inputs):
    """No call is ever made in the first thread."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(answer(model, x) for x in inputs))
    thread.start()
    thread.join()
    return found


def first_here(model, inputs):
    """The first call here, all others in other threads, one after the other."""
    return [answer(model, inputs[0]), *only_in_thread(model, inputs[1:])]


def pool(model, inputs):
    """Many threads at once."""
    with ThreadPoolExecutor(6) as threads:
        return list(threads.map(lambda x: answer(model, x), inputs * 4))


def model_of_each(model, inputs):
    """Each thread has a model of its own, with the first one's weights."""

    def serve(x):
        own = Gated()
        own.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
        return answer(own.to(device).eval(), x)

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(serve, inputs))


def arguments(model, inputs):
    """Threads that call one model in two ways."""

    def serve(numbered):
        number, x = numbered
        with torch.no_grad():
            return model(x.to(device), deep=number % 2 == 0).cpu()

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(serve, enumerate(inputs * 3)))


def batching(model, inputs):
    """A thread that gathers what others ask for, and answers it as one batch."""
    asked, answers = SimpleQueue(), {}

    def serve():
        while (batch := asked.get()) is not None:
            answers.update(enumerate(answer(model, torch.stack(batch)).unbind()))

    thread = threading.Thread(target=serve)
    thread.start()
    asked.put([x[0] for x in inputs])
    asked.put(None)
    thread.join()
    return [answers[number] for number in sorted(answers)]


def web_server(model, inputs):
    """A threaded HTTP server around the model."""

    class Handler(BaseHTTPRequestHandler):
        """Answers GET /N with the largest entry for input N."""

        def do_GET(self):
            said = repr(answer(model, inputs[int(self.path[1:])]).max().item()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with ThreadPoolExecutor(3) as clients:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        said = list(clients.map(lambda n: urlopen(f"{address}/{n}").read(), range(len(inputs))))
    server.shutdown()
    thread.join()
    server.server_close()
    return [torch.tensor(float(text)) for text in said]


model = Gated().to(device).eval()
inputs = [torch.randn(2 + number % 2, 12) for number in range(5)]
results = {"answers": globals()[way](model, inputs)}
torch.save(results, path)
