#!/bin/sh
# Makes the checkout's Python environment, .venv, from nothing but python3 (any version).
# uv, from PyPI, goes into .bootstrap; it finds or fetches a Python >= 3.12 and installs the
# tested set of pyproject.toml. Called by make, which skips it while nothing has changed.
set -eu
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }

if [ ! -x .bootstrap/bin/uv ]; then
    say "installing uv into .bootstrap"
    if python3 -m venv .bootstrap 2>/dev/null; then
        .bootstrap/bin/python -m pip install --quiet --disable-pip-version-check uv
    elif python3 -m pip --version >/dev/null 2>&1; then
        # Debian ships python3 without venv: a plain folder serves as well.
        rm -rf .bootstrap
        python3 -m pip install --quiet --target .bootstrap uv
    else
        echo "setup: python3 has neither venv nor pip; install python3-venv (or uv) and run make again" >&2
        exit 1
    fi
fi
UV=.bootstrap/bin/uv

# pyenv's shims refuse every version that is not selected: select all, so that uv can look.
if command -v pyenv >/dev/null 2>&1; then
    PYENV_VERSION=$(pyenv versions --bare | grep -E '^[0-9.]+$' | paste -sd: -)
    export PYENV_VERSION
fi
# Without compiled bytecode every process that imports megatron.core starts 5 to 10 s later.
export UV_COMPILE_BYTECODE=1 UV_LINK_MODE="${UV_LINK_MODE:-copy}"

if [ ! -x .venv/bin/python ]; then
    say "creating .venv with Python >= 3.12"
    "$UV" venv --quiet --python '>=3.12,<3.15' .venv
fi
say "installing the tested packages into .venv (about a minute the first time)"
"$UV" pip install --quiet --python .venv/bin/python --group dev --editable .
touch .venv/.ready
say "done"
