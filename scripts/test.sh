#!/usr/bin/env bash
# Sets up and runs every check: formatting, types, import contracts, playbooks, tests.
# Arguments go to pytest and skip the other checks, such as tests/profile -k duplicate.
# DDTOOLKIT_ALL_TESTS=1 runs what is slow, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Some machines set it: then each of a thousand interpreters would compile what it imports anew.
unset PYTHONDONTWRITEBYTECODE
# Most of what is installed is never imported, and needs no byte code.
PIP_COMPILE=0 bash scripts/setup.sh engine,dev
export PATH="${DDTOOLKIT_VENV:-$PWD/.venv}/bin:$PATH"
export ANSIBLE_LOCALHOST_WARNING=False

if [ "$(id -u)" = 0 ] && ! command -v systemd-analyze >/dev/null; then
    # Rendered units are checked by the real systemd-analyze.
    apt-get -o DPkg::Lock::Timeout=300 -q update >&2
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -q -y install --no-install-recommends systemd >&2
fi

step() { printf '\n== %s\n' "$*" >&2; "$@"; }

# Runs commands side by side, since each works on one core, and prints what they say in turn; fails if one did.
side_by_side() {
    local folder command number failed=0 pids=()
    folder=$(mktemp -d)
    # Process groups of their own: commands in the background do not hear an interrupt, and would go on.
    trap 'kill -- "${pids[@]/#/-}"; rm -r "$folder"; exit 130' INT TERM
    set -m
    for command in "$@"; do
        $command > "$folder/${#pids[@]}" 2>&1 < /dev/null &
        pids+=($!)
    done
    set +m
    for number in "${!pids[@]}"; do
        wait "${pids[$number]}" || failed=1
        cat "$folder/$number" >&2
    done
    trap - INT TERM
    rm -r "$folder"
    return "$failed"
}

lint_code() {
    step ruff check . && step ruff format --check . && step mypy && step lint-imports
}

lint_playbooks() { step ansible-lint --offline --strict --profile production playbooks; }

# Hosts of tests serve from this environment and can write no byte code into it.
byte_code() { python -c 'import torch, toolkit.acceptance.run, toolkit.ddtree.server.__main__, toolkit.ddtree.server.app'; }

# Stock SGLang on a CPU, for tests/sglang.
sglang() { bash scripts/sglang_env.sh; }

if [ $# -eq 0 ]; then
    side_by_side lint_code lint_playbooks byte_code sglang
elif [[ "$*" == *tests/sglang* ]]; then
    sglang
fi
if [ $# -eq 0 ]; then
    # One file more side by side than there are cores, since hosts boot and services wait for a good part of the time;
    # the longest come first (tests/conftest.py). Each works with one thread, or they wait for each other.
    cores=$(nproc)
    export OMP_NUM_THREADS=1
    set -- --numprocesses=$((cores < 4 ? cores + 1 : 4)) --dist=loadfile --no-loadscope-reorder \
        --durations=40 --durations-min=8
fi
step python -m pytest -q "$@"
