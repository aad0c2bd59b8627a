"""Saved files, pickles, copies and storages of handles."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.programs.snippets import Snippet


def test_file_is_pytorch_s_own_when_saved_from_the_gpu(shim: Snippet, tmp_path: Path) -> None:
    file = tmp_path / "saved.pt"
    shim(f"""
    m = torch.nn.Linear(2, 2).cuda()
    x = torch.arange(4.0).cuda()
    torch.save({{"x": x, "view": x[1:], "state": m.state_dict(), "p": m.weight}}, {str(file)!r})
    """)
    content = file.read_bytes()
    assert b"torch_shim" not in content
    assert b"Cuda" not in content
    assert b"cuda:0" in content
    plain = (
        "import sys, torch; o = torch.load(sys.argv[1], map_location='cpu', weights_only=True);"
        "assert type(o['x']) is torch.Tensor and o['x'].tolist() == [0, 1, 2, 3];"
        "assert type(o['p']) is torch.nn.Parameter; o['x'][1] = 9; assert o['view'][0] == 9"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", plain, str(file)], check=True)


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ("None", "cuda"),
        ("'cpu'", "cpu"),
        ("'cuda'", "cuda"),
        ("torch.device('cuda:0')", "cuda"),
        ("{'cuda:0': 'cpu'}", "cpu"),
        ("lambda storage, place: storage.cuda()", "cuda"),
        ("lambda storage, place: storage.cpu()", "cpu"),
    ],
)
def test_tensors_are_where_asked_when_loaded(shim: Snippet, location: str, kind: str) -> None:
    shim(f"""
    import io
    x = torch.arange(4.0).cuda()
    saved = {{"x": x, "view": x[1:], "p": torch.nn.Parameter(x.clone())}}
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save(saved, file, _use_new_zipfile_serialization=zipped)
        file.seek(0)
        loaded = torch.load(file, map_location={location})
        assert all(t.device.type == {kind!r} for t in loaded.values()), loaded
        assert isinstance(loaded["p"], torch.nn.Parameter)
        loaded["x"][1] = 9
        assert loaded["view"][0] == 9
    """)


def test_file_of_the_cpu_goes_to_the_gpu_when_mapped(shim: Snippet) -> None:
    shim("""
    import io
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    for location, kind in (("cuda", "cuda"), ({"cpu": "cuda"}, "cuda"), (None, "cpu")):
        file.seek(0)
        assert torch.load(file, map_location=location).device.type == kind
    file.seek(0)
    try:
        torch.load(file, map_location="cuda:1")
    except RuntimeError:
        pass
    else:
        raise AssertionError
    """)


def test_pickle_names_nothing_of_ours_when_made_from_handles(shim: Snippet) -> None:
    shim("""
    import copy, io, pickle
    x, m = torch.arange(4.0).cuda(), torch.nn.Linear(2, 2).cuda()
    m.weight.note = 3
    for thing in (x, m, m.weight):
        data = pickle.dumps(thing)
        assert b"torch_shim" not in data
        again = pickle.loads(data)
        tensor = again.weight if isinstance(again, torch.nn.Module) else again
        assert tensor.is_cuda
    assert pickle.loads(pickle.dumps(m.weight)).note == 3 and copy.copy(x).is_cuda
    file = io.BytesIO()
    torch.save(m, file)
    assert b"torch_shim" not in file.getvalue()
    file.seek(0)
    assert torch.load(file, weights_only=False).weight.is_cuda
    """)


def test_deep_copy_keeps_class_views_and_gradient_when_made(shim: Snippet) -> None:
    shim("""
    import copy
    m = torch.nn.Linear(2, 2).cuda()
    m.weight.note = 3
    n = copy.deepcopy(m)
    assert n.weight.is_cuda and n.weight is not m.weight and n.weight.note == 3
    assert isinstance(n.weight, torch.nn.Parameter)
    x = torch.arange(4.0).cuda()
    whole, view = copy.deepcopy([x, x[1:]])
    whole[1] = 7
    assert view[0] == 7 and x[1] == 1 and whole.is_cuda and view.is_cuda
    y = torch.ones(2).cuda().requires_grad_()
    (y * 2).sum().backward()
    z = copy.deepcopy(y)
    assert z.requires_grad and z.grad.is_cuda and z.grad is not y.grad
    assert torch.equal(copy.deepcopy(torch.ones(2, 2).cuda().t()), torch.ones(2, 2).cuda())
    """)


def test_storage_answers_for_the_gpu_when_taken_from_a_handle(shim: Snippet) -> None:
    shim("""
    import warnings
    x = torch.arange(4.0).cuda()
    storage = x.untyped_storage()
    assert storage.device.type == "cuda" and storage.is_cuda
    again = torch.empty(0, device="cuda").set_(storage, 0, (4,))
    again[0] = 5
    assert again.is_cuda and x[0] == 5 and x.data_ptr() == storage.data_ptr()
    assert storage.cpu().device.type == "cpu" and storage.clone().device.type == "cuda"
    assert torch.UntypedStorage(8, device="cuda").is_cuda
    assert torch.zeros(2).untyped_storage().cuda().is_cuda
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert x.storage().is_cuda
    assert torch.zeros(2).untyped_storage().device.type == "cpu"
    """)


def test_safetensors_loads_to_the_gpu_when_asked(shim: Snippet, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    shim(f"""
    import safetensors.torch as st
    from safetensors import safe_open
    m, file = torch.nn.Linear(2, 2).cuda(), {str(tmp_path / "m.safetensors")!r}
    st.save_file(m.state_dict(), file)
    for device in ("cuda", "cuda:0", 0):
        loaded = st.load_file(file, device=device)["weight"]
        assert loaded.is_cuda and torch.equal(loaded, m.weight)
    assert st.load_file(file)["weight"].is_cpu
    with safe_open(file, "pt", device="cuda:0") as opened:
        assert opened.get_tensor("bias").is_cuda and opened.get_slice("weight")[:1].is_cuda
    """)


def test_loaded_tensor_with_attributes_of_its_own_is_on_the_gpu(shim: Snippet) -> None:
    shim("""
    import io
    x = torch.ones(2).cuda()
    x.note = "kept"  # as Dynamo notes what it has seen
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    y = torch.load(file, weights_only=False)
    assert y.is_cuda and y.note == "kept" and torch.equal(y, x)
    assert x.as_subclass(torch.Tensor).is_cuda
    """)
