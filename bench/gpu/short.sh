#!/bin/bash
# `bash bench/gpu/short.sh A` asks in at most 230 s whether everything works on this machine's GPU;
# `B` measures in at most 470 s. Each alone is of use. Results and a log go to $OUT, or to
# bench/results. Further arguments go to bench.gpu: --emulate tries it without a GPU, `B --within 300`
# has less time.
# They need a Python with torch as `python3`, and what that Python lacks as wheels in out/gpu-kit.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
part=${1:-}
shift
export PYTHONUNBUFFERED=1
began=$SECONDS
out=${OUT:-bench/results}
mkdir -p "$out"
exec > >(tee "$out/short-$part.txt") 2>&1

# The driver stays initialised while a process has it open, and libraries are read ahead.
python3 - <<'END' &
import sys, time
try:
    import pynvml
    pynvml.nvmlInit()
    pynvml.nvmlDeviceGetHandleByIndex(0)
except Exception as error:
    sys.exit(f"the driver is not kept initialised: {error!r}")
time.sleep(600)
END
keeper=$!
trap 'kill $keeper 2>/dev/null' EXIT
packages=$(python3 -c 'import importlib.util as i, pathlib as p; print(p.Path(i.find_spec("torch").origin).resolve().parents[1])')
find "$packages/torch/lib" "$packages/nvidia" -name '*.so*' -type f -print0 2>/dev/null |
  xargs -0 -r -P 8 -n 4 cat >/dev/null 2>&1 &

measure() { # seconds from the beginning, and parts
  python3 -m bench.gpu.kit run --within $(($1 - (SECONDS - began))) --only "${@:2}"
}

environment() {
  id; pwd; uname -r; nproc; command -v python3
  env | grep -E '^(LD_|CUDA|NVIDIA|PATH|VIRTUAL_ENV|PYTHON)'
  timeout 40 python3 -c '
import ctypes, time
began = time.time()
print("cuInit gives", ctypes.CDLL("libcuda.so.1").cuInit(0), "after", time.time() - began, "s")'
  ls -ld / /opt "$packages" . /dev/nvidia* /dev/shm
  grep -iE 'nvidia|shm' /proc/mounts
  ldconfig -p | grep -E 'libcuda.so|libnvidia-ml'
  grep -E 'MemTotal|MemAvail' /proc/meminfo
  timeout 15 nvidia-smi
  timeout 15 nvidia-smi -q | grep -iE 'persist|compute mode|mig mode'
  timeout 15 python3 -m pip list 2>/dev/null |
    grep -iE '^(torch|torchvision|triton|nvidia-ml|cuda-|pytest|protobuf|grpcio|msgspec|numpy|transformers)'
}

case $part in
  A)
    environment
    measure 218 facts smoke tests "$@"
    ;;
  B)
    measure 455 smoke copies memory cold warm suspend programs profile "$@"
    ;;
  *)
    echo 'Usage: bash bench/gpu/short.sh A|B [--emulate]'
    exit 2
    ;;
esac
code=$?
echo "short.sh $part ended with $code after $((SECONDS - began)) s"
exit $code
