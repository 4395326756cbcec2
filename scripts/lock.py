"""Writes hash-locked requirements: `toolkit/build/locks/ENGINE.txt` for hosts, `control.txt` for who deploys.

    pip install uv
    python scripts/lock.py control
    python scripts/lock.py embedded --also torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl

Names and ranges are those of pyproject.toml; uv resolves them for Linux and every supported Python at once,
from the package index that it is set to. `--also` adds the hash of a wheel that is on no index, such as a
build of torch without CUDA.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "toolkit" / "build" / "locks"
CONTROL = "control"
# What runs on a host besides the engine: the agent, the host's own command and the acceptance checks.
HOST = ("httpx", "jinja2", "pydantic", "pyyaml", "rich", "typer")
# On the control machine: the line of Ansible that the tests run, and the numpy that the engine has too.
PINNED = {
    "embedded": ("torch==2.13.0", "numpy<2.4"),
    "sglang": (),
    CONTROL: ("ansible-core==2.19.*", "numpy<2.4"),
}
EXTRA = {"embedded": "engine", "sglang": "sglang"}
PYTHON = {"embedded": "3.11", "sglang": "3.12", CONTROL: "3.11"}
# Only tests and benchmarks import it.
LEFT_OUT = {"embedded": ("transformers",), "sglang": ()}
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def name_of(requirement: str) -> str:
    """The distribution that a requirement names."""
    found = _NAME.match(requirement)
    if found is None:
        raise SystemExit(f"pyproject.toml: {requirement!r} names nothing")
    return found.group().lower()


def wanted(engine: str) -> list[str]:
    """The requirements that are to be locked: an engine's, or the control machine's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if engine == CONTROL:
        return [*project["dependencies"], *PINNED[CONTROL]]
    extra = project["optional-dependencies"][EXTRA[engine]]
    host = [item for item in project["dependencies"] if name_of(item) in HOST]
    return [*host, *(item for item in extra if name_of(item) not in LEFT_OUT[engine]), *PINNED[engine]]


def resolve(requirements: list[str], python: str) -> str:
    """Pinned requirements with hashes, as `pip --require-hashes` reads them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.txt"
        source.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        command = ["uv", "pip", "compile", "--universal", "--generate-hashes", "--no-header", "--no-annotate"]
        command += ["--python-version", python, "--quiet", "--no-emit-index-url", str(source)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return done.stdout


def add_hash(lock: str, wheel: Path) -> str:
    """The lock with one more hash for the distribution that `wheel` is of."""
    name, version = wheel.name.split("-")[:2]
    line = f"{name.lower().replace('_', '-')}=={version.partition('+')[0]}"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = re.search(rf"^{re.escape(line)}(?=[ ;\\]).*\\\n", lock, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{wheel}: the lock has no {line}")
    return f"{lock[: found.end()]}    --hash=sha256:{digest} \\\n{lock[found.end() :]}"


def main() -> int:
    """Write one lock."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=[*sorted(EXTRA), CONTROL])
    parser.add_argument("--also", type=Path, action="append", default=[], metavar="WHEEL")
    args = parser.parse_args()
    lock = resolve(wanted(args.engine), PYTHON[args.engine])
    for wheel in args.also:
        lock = add_hash(lock, wheel)
    LOCKS.mkdir(exist_ok=True)
    path = LOCKS / f"{args.engine}.txt"
    path.write_text(f"# Made by scripts/lock.py {args.engine}; do not edit.\n{lock}", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {lock.count('==')} distributions", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
