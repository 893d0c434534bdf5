#!/bin/sh
# Makes .venv and installs Kerneldyno into it. Usage: scripts/setup.sh tune|test
# tune: what is useful on this machine. test: everything, the compilers of the GPU kernels included (they cross-compile without a GPU).
# PYTHON=/path/to/python3.12 chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."

# a build of torch without CUDA carries this local version, which no CUDA build can match
TORCH_CPU="torch==2.13.0+cpu"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 4; }

fits() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if fits "$candidate"; then command -v "$candidate"; return 0; fi
    done
    return 1
}

apt_install() {
    command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ] || return 1
    say "installing $* with apt-get"
    { apt-get install -y -q "$@" || { apt-get update -q && apt-get install -y -q "$@"; }; } >&2
}

make_venv() {
    "$1" -m venv .venv >/dev/null 2>&1 && .venv/bin/python -m pip --version >/dev/null 2>&1
}

install_torch() {
    if .venv/bin/python -c 'import torch' >/dev/null 2>&1; then return 0; fi
    if sh scripts/has_gpu.sh; then
        say "an NVIDIA GPU is here: installing torch with CUDA"
        pip_install "torch>=2.8"
        return
    fi
    say "no NVIDIA GPU: looking for a build of torch without CUDA (about 200 MB)"
    # a CPU build that pip's own configuration offers, then PyTorch's index of them; its time-out is short, since it may be out of reach
    if pip_install --only-binary torch "$TORCH_CPU" >/dev/null 2>&1; then return 0; fi
    if pip_install --only-binary torch --timeout 10 --retries 1 --extra-index-url "$TORCH_CPU_INDEX" "$TORCH_CPU" >&2; then return 0; fi
    say "no CPU build is on offer: installing the default build of torch, which may be several gigabytes"
    pip_install "torch>=2.8"
}

pip_install() { .venv/bin/python -m pip install --disable-pip-version-check -qq "$@"; }

python=$(find_python) || { apt_install python3 python3-venv && python=$(find_python); } ||
    fail "Python 3.11, 3.12 or 3.13 is needed. Install one, or name it: PYTHON=/path/to/python3.12 make tune"

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "creating .venv with $python"
    rm -rf .venv
    if ! make_venv "$python"; then
        rm -rf .venv
        version=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        apt_install "$version" || apt_install python3-venv || fail "$python cannot create a virtual environment: apt-get install $version"
        make_venv "$python" || fail "$python -m venv .venv fails even with $version"
    fi
fi
command -v cc >/dev/null 2>&1 || apt_install gcc libc6-dev || say "no C compiler: the backend c will not be usable (apt-get install gcc)"
if [ "${1:-tune}" = test ] || sh scripts/has_gpu.sh; then
    # TileLang compiles host code
    command -v g++ >/dev/null 2>&1 || apt_install g++ || say "no C++ compiler: tilelang will not be usable (apt-get install g++)"
    # Triton compiles its launcher against Python's headers
    .venv/bin/python -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' >/dev/null 2>&1 ||
        apt_install python3-dev || say "no Python headers: triton will not be usable (apt-get install python3-dev)"
fi

install_torch
case "${1:-tune}" in
    test) extras="[all,dev]" ;;
    *) if sh scripts/has_gpu.sh; then extras="[triton,tilelang,cuda]"; else extras=""; fi ;;
esac
say "installing kerneldyno$extras"
pip_install -e ".$extras"
say "done: .venv/bin/tune"
