#!/usr/bin/env bash
# Puts a CUDA machine to the test, in less than 8 minutes once the environment is there: the engine's conformance tests, a
# short training run, throughput and memory against the plan; the last thing it prints is a table.
#
#   scripts/gpu_check.sh [--device cpu --size toy] [--parts engine,trainer]       (options of benchmarks/gpu_check.py)
#
# The environment is the first of these that has what is needed and, unless --device cpu is asked for, sees a GPU:
#   1. the interpreter in $GPU_CHECK_PYTHON;
#   2. .venv;
#   3. python3 as it is;
#   4. .venv-gpu, which is made: on top of python3's packages if its torch sees a GPU, else with torch from the index (see
#      scripts/install.sh). $GPU_CHECK_WHEELS names a directory of wheels for a machine that reaches no index.
# With $OUT set, the table's figures are copied there. Where there is no GPU and none is done without, nothing is set up: exit code 2.
set -euo pipefail

cd "$(dirname "$0")/.."
device=cuda
previous=
for word in "$@"; do
    [ "$previous" = --device ] && device=$word
    case $word in --device=*) device=${word#--device=} ;; esac
    previous=$word
done

has_gpu() { timeout 60 nvidia-smi --list-gpus 2>/dev/null | grep GPU >/dev/null || compgen -G '/dev/nvidia[0-9]*' >/dev/null; }
if [ "$device" = cuda ] && ! has_gpu; then
    echo "gpu_check: there is no NVIDIA GPU here (nvidia-smi lists none); without one: scripts/gpu_check.sh --device cpu --size toy" >&2
    exit 2
fi

needed='aiohttp jinja2 msgspec numpy pydantic safetensors tensorboard transformers typer rich math_verify pytest pytest_asyncio'
sees_gpu() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }
has_all() { "$1" -c "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(m) is None for m in sys.argv[1:]))" torch $needed 2>/dev/null; }
serves() { command -v "$1" >/dev/null && has_all "$1" && { [ "$device" = cpu ] || sees_gpu "$1"; }; }

make_environment() {
    local base=python3 options=()
    if sees_gpu "$base"; then
        options=(--system-site-packages)
    fi
    "$base" -m venv "${options[@]}" .venv-gpu
    if [ -n "${GPU_CHECK_WHEELS:-}" ]; then
        .venv-gpu/bin/python -m pip -qq install --no-index --find-links "$GPU_CHECK_WHEELS" --editable '.[dev]' --no-build-isolation
    elif [ ${#options[@]} -gt 0 ]; then
        .venv-gpu/bin/python -m pip -qq install --editable '.[dev]'
    else
        bash scripts/install.sh "$base" .venv-gpu
    fi
}

chosen=
for python in ${GPU_CHECK_PYTHON:-} .venv/bin/python python3 .venv-gpu/bin/python; do
    if serves "$python"; then
        chosen=$python
        break
    fi
done
if [ -z "$chosen" ]; then
    echo "no environment here serves on $device: .venv-gpu is set up" >&2
    make_environment
    chosen=.venv-gpu/bin/python
    serves "$chosen" || { echo "gpu_check: $chosen has no torch that sees a GPU, or lacks packages" >&2; exit 2; }
fi
echo "with $chosen" >&2
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || true

status=0
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "$chosen" benchmarks/gpu_check.py "$@" || status=$?
if [ -n "${OUT:-}" ] && [ -f benchmarks/results/gpu_check.json ]; then
    cp benchmarks/results/gpu_check.json "$OUT/"
fi
exit $status
