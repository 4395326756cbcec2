#!/usr/bin/env bash
# Makes .venv beside this script's folder ready: setup.sh [EXTRAS], by default "engine".
# Installs Debian packages when it runs as root and something is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=${1:-engine}
venv=${DDTOOLKIT_VENV:-.venv}
# The newest torch that was tested; the lower bound of the `engine` extra is what is supported.
torch=${DDTOOLKIT_TORCH:-torch==2.13.0}

say() { printf '%s\n' "$*" >&2; }

# busy WORDS COMMAND...: run it, and say every ten seconds that it is still at work
busy() {
    local words=$1 second ticker status=0
    shift
    say "$words"
    # The teller is in the background, not the command: that one would not hear an interrupt there.
    for ((second = 1; ; second++)); do
        sleep 1
        kill -0 "$$" 2>/dev/null || break
        ((second % 10)) || say "$words: $second s so far"
    done &
    ticker=$!
    "$@" || status=$?
    kill "$ticker"
    wait "$ticker" 2>/dev/null || true
    return "$status"
}

usable_python() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${DDTOOLKIT_PYTHON:-} python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if command -v "$candidate" >/dev/null && usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

install_packages() {
    if [ "$(id -u)" != 0 ]; then
        say "missing: $* - install with: sudo apt-get install $*"
        exit 1
    fi
    say "installing Debian packages: $*"
    apt-get -o DPkg::Lock::Timeout=300 -q update >&2
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -q -y install --no-install-recommends "$@" >&2
}

if ! find_python >/dev/null; then
    install_packages python3 python3-venv
fi
python=$(find_python) || { say "no Python 3.11 or newer with venv found; set DDTOOLKIT_PYTHON to one"; exit 1; }

# The stamp holds what the environment was made from, so a second run costs nothing.
wanted=$( { "$python" -VV; printf '%s %s %s\n' "$extras" "$torch" "$PWD"; cat pyproject.toml; } | sha256sum)
if [ "$(cat "$venv/.ready" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

say "preparing $venv with $("$python" -V) ($extras)"
rm -f "$venv/.ready"
"$python" -m venv "$venv"
# A freshly made environment's pip may be too old to know today's wheel tags.
busy "updating pip" "$venv/bin/python" -m pip install -q --upgrade pip
case ",$extras," in
    # Tests run Triton's interpreter, which takes no newer numpy. It is installed for every use, so that
    # running the tests changes nothing under a server that was started before.
    *engine*) busy "installing torch" "$venv/bin/python" -m pip install -q "$torch" 'numpy<2.4' ;;
esac
busy "installing ddtoolkit" "$venv/bin/python" -m pip install -q -e ".[$extras]"
printf '%s\n' "$wanted" > "$venv/.ready"
