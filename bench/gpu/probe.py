"""Once: what filling buffers costs."""
import ctypes, mmap, os, time, sys
from functools import partial
import torch
from gpu_manager.worker.device import staged_copy as sc
from gpu_manager.worker.device.cuda_runtime import loaded_runtime

size = 2 << 30
fd = os.memfd_create("x"); os.ftruncate(fd, size)
m = mmap.mmap(fd, size)
src = torch.frombuffer(m, dtype=torch.uint8)
src[: 64 << 20].random_(0, 255)
for at in range(64 << 20, size, 64 << 20):
    src[at : at + (64 << 20)].copy_(src[: 64 << 20])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
target = torch.empty(size, dtype=torch.uint8, device="cuda")
runtime = loaded_runtime()
read = sc._read
base = 0

def move(place, descriptor, offset, populate):
    if populate:
        libc.madvise(base + offset, len(place), 22)
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(place)), base + offset, len(place))

print("thp", open("/sys/kernel/mm/transparent_hugepage/enabled").read().strip(), open("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read().strip())
print([l.strip() for l in open("/proc/cpuinfo") if "model name" in l][0], os.popen("lscpu | grep -E 'Thread|L3|Socket|NUMA node'").read().split("\n"))
t = time.perf_counter(); b = mmap.mmap(-1, 32 << 20); t1 = time.perf_counter()
b.madvise(14); v = torch.frombuffer(b, dtype=torch.uint8); v.zero_(); t2 = time.perf_counter()
runtime.pin(v.data_ptr(), v.numel()); t3 = time.perf_counter(); runtime.unpin(v.data_ptr()); t4 = time.perf_counter()
print(f"32 MiB: mmap {1e3*(t1-t):.2f}, touched {1e3*(t2-t1):.2f}, pinned {1e3*(t3-t2):.2f}, unpinned {1e3*(t4-t3):.2f} ms")
t = time.perf_counter(); p = torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True); print(f"cudaHostAlloc of 32 MiB {1e3*(time.perf_counter()-t):.2f} ms")
t = time.perf_counter(); p2 = torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True); print(f"again {1e3*(time.perf_counter()-t):.2f} ms", flush=True)

for threads, part, piece in ((8, 4, 32), (12, 4, 32), (16, 2, 32), (16, 4, 64), (16, 1, 16), (14, 2, 32)):
    sc._MOST_THREADS, sc._PART_BYTES = threads, part << 20
    staging = sc.StagingBuffers(torch.cuda, runtime, piece << 20)
    for how in ("read", "move", "populated"):
        best, fill = [], []
        for _ in range(2):
            if how != "read":
                base = libc.mmap(None, size, 1, 1, fd, 0)
                sc._read = partial(move, populate=how == "populated")
            else:
                sc._read = read
            t = time.perf_counter()
            staging.copy(fd, size, target)
            best.append(time.perf_counter() - t)
            t = time.perf_counter()
            for start in range(0, size, piece << 20):
                staging._fill(staging._buffers[0], fd, start, piece << 20, lambda _: None)
            fill.append(time.perf_counter() - t)
            if how != "read":
                libc.munmap(base, size)
        print(threads, part, piece, how, f"{size/min(best)/1e9:.1f} GB/s; fill alone, mapped {size/min(fill)/1e9:.1f}", flush=True)
    staging.close()
