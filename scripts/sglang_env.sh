#!/usr/bin/env bash
# Makes .venv-sglang ready: stock SGLang 0.5.17 for tests on a CPU, with the packages it imports and no CUDA.
# A GPU host installs ddtoolkit[sglang] instead, which brings all that SGLang asks for.
# Where scripts/setup.sh has made .venv, its torch is used; uv installs the rest in seconds, or else pip does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${DDTOOLKIT_SGLANG_VENV:-.venv-sglang}
torch=${DDTOOLKIT_TORCH:-torch==2.13.0}
python=${DDTOOLKIT_PYTHON:-python3}
base=${DDTOOLKIT_VENV:-.venv}

# What SGLang pins, and what it imports without pinning. The packages without their needs ask for CUDA ones.
pinned=(transformers==5.12.1 tokenizers==0.22.2 openai==2.6.1 apache-tvm-ffi==0.1.11 triton==3.6.0 numpy==2.3.5)
imported=(aiohttp dill einops fastapi gguf ipython jsonschema loguru msgspec orjson partial-json-parser pillow
    prometheus-client psutil pybase64 pydantic python-multipart pyzmq requests safetensors sentencepiece
    setproctitle soundfile starlette tqdm uvicorn uvloop)
alone=(sglang==0.5.17 xgrammar==0.2.1 compressed-tensors==0.20.1)

wanted=$( { "$python" -VV; printf '%s ' "$torch" "$PWD"; cat scripts/sglang_env.sh pyproject.toml; } | sha256sum)
if [ "$(cat "$venv/.ready" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

printf 'preparing %s\n' "$venv" >&2
rm -f "$venv/.ready"

# Prints where the packages of .venv are, if its torch is the one wanted.
packages_of_base() {
    "$base/bin/python" - "$torch" 2>/dev/null <<'EOF'
import importlib.metadata
import sys
import sysconfig

if importlib.metadata.version("torch").partition("+")[0] != sys.argv[1].partition("==")[2]:
    sys.exit(1)
print(sysconfig.get_path("purelib"))
EOF
}

pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check)
if shared=$(packages_of_base); then
    "$base/bin/python" -m venv --clear "$venv"
    "${pip[@]}" uv || true
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    realpath "$shared" > "$site/shared.pth"  # behind its own packages
else
    "$python" -m venv --clear "$venv"
    "${pip[@]}" uv || true
    "${pip[@]}" "$torch"
fi

install_all() {
    "$@" "${pinned[@]}" "${imported[@]}" && "$@" --no-deps "${alone[@]}" && "$@" --no-deps -e .
}

if ! install_all "$venv/bin/uv" pip install -q --python "$venv/bin/python"; then
    printf 'uv cannot install it here; pip does\n' >&2
    install_all "${pip[@]}"
fi
printf '%s\n' "$wanted" > "$venv/.ready"
