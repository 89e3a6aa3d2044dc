#!/usr/bin/env bash
# Sets up a virtual environment with Fleuve in it, editable, and everything that its tests need.
#
#   scripts/install.sh PYTHON VENV
#
# torch comes first, so that a machine without an NVIDIA GPU gets the CPU build and not gigabytes of CUDA:
#   1. the CPU build, if pip is configured to find it (its version ends in +cpu);
#   2. the index in $TORCH_INDEX, if set (for example PyTorch's index of CPU builds);
#   3. the package index's own torch: on macOS and ARM that is a CPU build anyway, on Linux x86 it is the CUDA build.
# With a GPU (nvidia-smi answers) it is 2 if set, else 3.
set -euo pipefail

python=$1
venv=$2
torch=2.13.0

"$python" - <<'CHECK' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Fleuve needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.12")
CHECK

[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; }
has_torch() { "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; }

install_torch() {
    if ! has_gpu && pip install "torch==$torch+cpu" 2>/dev/null; then
        return
    fi
    if [ -n "${TORCH_INDEX:-}" ]; then
        pip install --index-url "$TORCH_INDEX" "torch==$torch"
        return
    fi
    if ! has_gpu && [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then
        echo "No GPU here, and pip knows no CPU build of torch: installing the CUDA build, some gigabytes." >&2
        echo "It works. To get the small one: make install TORCH_INDEX=<URL of PyTorch's index of CPU builds>" >&2
    fi
    pip install "torch==$torch"
}

echo "installing into $venv (a minute or more)"
has_torch || install_torch
pip install --editable '.[dev]'
"$venv/bin/fleuve" --help >/dev/null
echo "installed: $venv/bin/fleuve"
