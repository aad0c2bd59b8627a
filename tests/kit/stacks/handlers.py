"""Functions as text: what the tests deploy."""

from collections.abc import Mapping
from pathlib import Path

PLAIN = {"com.gpufaas.enabled": "false"}

GREETING = """
import os, time
def handle(event, context):
    print("called with", event.body.decode(), flush=True)
    if event.path == "/slow":
        time.sleep(float(event.query["s"]))
    return f"{os.environ.get('GREETING', 'hello')} {event.body.decode()}"
"""

SECRET = """
import os
from pathlib import Path
def handle(event, context):
    for folder in (os.environ["secret_mount_path"], "/var/openfaas/secrets"):
        path = Path(folder, event.body.decode())
        if path.exists():
            return path.read_text()
    return {"statusCode": 404, "body": "no such secret"}
"""

# What can go wrong in a handler, and answers that are hard to pass on.
TROUBLE = """
import os, time
def handle(event, context):
    print("path", event.path, flush=True)
    return globals()["on_" + event.path.strip("/")](event)
def on_fine(event):
    return f"fine {os.getpid()}"
def on_raise(event):
    raise RuntimeError("the handler's own mistake")
def on_hang(event):
    time.sleep(1000)
def on_die(event):
    os._exit(3)
def on_large(event):
    return b"x" * int(event.query["bytes"])
def on_stream(event):
    return {"statusCode": 200, "headers": {"Content-Type": "text/event-stream"},
            "body": ticks(int(event.query["count"]), float(event.query["every_s"]))}
def ticks(count, every_s):
    try:
        for number in range(count):
            yield f"data: {number}\\n\\n"
            time.sleep(every_s)
    finally:
        print("the stream has ended", flush=True)
"""

# One model, small enough to load at once; it can ask for too much, and hold its GPU.
ON_GPU = """
import os, time
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
model = model.eval().cuda()
def handle(event, context):
    if event.path == "/much":
        return much()
    if event.path == "/held":
        return {"statusCode": 200, "body": held()}
    return {"device": str(answer().device), "pid": os.getpid()}
def answer():
    with torch.no_grad():
        return model(torch.ones(1, 64, device="cuda"))
def much():
    try:
        torch.nn.Linear(40_000, 40_000, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        return {"statusCode": 507, "body": {"error": str(error)}}
    return "it fitted"
def held():
    for _ in range(1000):
        yield f"{float(answer().sum())}\\n"
        time.sleep(0.05)
"""


def write(folder: Path, name: str, handler: str, requirements: str = "") -> Mapping[str, str]:
    """A handler's folder in `folder`; the annotations that deploy it."""
    made = folder / "handlers" / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "handler.py").write_text(handler)
    (made / "requirements.txt").write_text(requirements)
    return {"com.gpufaas.path": f"handlers/{name}"}
