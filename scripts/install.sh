#!/usr/bin/env bash
# Makes the virtual environment $1 and installs the package with the extras $2 (by default those that tests need), and
# what else is named, as pip takes it. Called by the Makefile when pyproject.toml or the constraints changed; pip's own
# configuration on the machine is used as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/install.sh VENV [EXTRAS [PACKAGE...]]}
extras=${2:-torch,hopper,plot,dev}

usable() { # a Python that runs, is new enough, and can make a virtual environment
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if ! usable "$venv/bin/python"; then
  found=
  for name in ${PYTHON:-python3 python python3.11 python3.12 python3.13 python3.14}; do
    if usable "$name"; then found=$name && break; fi
  done
  if [ -z "$found" ]; then
    echo "install: no Python 3.11 or later with the venv module on the PATH; install one, or name it: make PYTHON=..." >&2
    exit 1
  fi
  echo "install: $("$found" --version) in $venv"
  "$found" -m venv --clear "$venv"
fi

if nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "install: NVIDIA GPU found, newest torch and jax"
  constraints=()
else
  echo "install: no NVIDIA GPU, torch and jax from constraints/cpu.txt"
  constraints=(-c constraints/cpu.txt)
fi
"$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "${constraints[@]}" \
  -e ".[$extras]" "${@:3}"
