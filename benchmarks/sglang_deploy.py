"""The whole job with SGLang on one GPU: deploy, a swap for the worse, a swap that stays, a rollback.

    python benchmarks/sglang_deploy.py --python /opt/engine/bin/python --target DIR --drafter DIR --out FILE

On a GPU host with the toolkit and, under `--python`, SGLang 0.5.17. Commands are run as a user would type
them, with the `process` manager below a folder of their own; the record has what each took and how it ended,
and the acceptance report's figures. The folders that provisioning would make are made here, so Ansible is not
needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NAME = "sglang-pair"
PROFILE = """
schema: 1
name: {name}
hardware: {{device: cuda, count: 1}}
host: {{root: {root}, python: {python}, min_free_disk: 1GiB}}
engine:
  kind: sglang
  version: 0.5.17
  dtype: bfloat16
  memory_fraction: {fraction}
model:
  target: {{source: {target}}}
  drafter: {{source: {drafter}}}
  served_name: pair
  context_length: 2048
speculative: {{algorithm: DDTREE, block_size: 8, budget: 32, topk_cap: 8}}
service: {{manager: process, port: 30123, max_running_requests: 16, load_timeout: 5m, stop_timeout: 30s,
          restart: {{burst: 2, interval: 30m}}}}
acceptance: {{level: quick, speed_tolerance: 0.9, time_limit: 3m}}
"""


def run(words: list[str], folder: Path) -> dict[str, Any]:
    """Run a command; what it took, its status, what it gave as JSON and the end of its words."""
    command = [sys.executable, "-c", "from toolkit.cli.main import main; main()", *words, "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    begin = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        told = json.loads(done.stdout)
    except ValueError:
        told = None
    seconds = round(time.monotonic() - begin, 2)
    print(f"{seconds:7.1f} s  status {done.returncode}  {' '.join(words)}", file=sys.stderr, flush=True)
    return {
        "command": " ".join(words),
        "status": done.returncode,
        "seconds": seconds,
        "told": told,
        "said": done.stderr.splitlines()[-25:],
    }


def provide(profile: Path) -> None:
    """Make the folders that provisioning would make."""
    from toolkit.profile.loading import load_profile
    from toolkit.provision.requirements import requirements
    from toolkit.release.locate import layout_of

    loaded = load_profile(str(profile)).profile
    for item in requirements(loaded, layout_of(loaded)).settings()["directories"]:
        folder = Path(item["path"])
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(int(item["mode"], 8))


def main() -> int:
    """Run all of it; status 1 where a command ended otherwise than it has to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter with SGLang")
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--root", type=Path, default=Path("/tmp/ddtoolkit-sglang"))  # noqa: S108
    parser.add_argument("--memory-fraction", type=float, default=0.5)
    parser.add_argument(
        "--ignore-check", action="append", default=[], help="of the doctor, where the GPU is shared"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    profile = options.root / f"{NAME}.yaml"
    values = {
        "name": NAME,
        "root": options.root,
        "python": options.python,
        "fraction": options.memory_fraction,
    }
    profile.write_text(PROFILE.format(**values, target=options.target, drafter=options.drafter))
    provide(profile)
    ignored = [word for name in options.ignore_check for word in ("--ignore-check", name)]
    keep = ["--new-baseline", "--yes"]
    wanted = [
        (0, ["deploy", "profile", str(profile), *ignored, "--yes"]),
        (0, ["status", NAME]),
        (5, ["swap", NAME, "--set", "speculative.budget=7", "--set", "speculative.topk_cap=1", "--yes"]),
        (1, ["swap", NAME, "--set", "engine.extra_args=[--no-such-flag]", "--yes"]),
        (0, ["swap", NAME, "--set", "speculative.budget=16", *keep]),
        (0, ["rollback", NAME, "--yes"]),
        (0, ["history", NAME]),
        (0, ["stop", NAME, "--yes"]),
    ]
    steps, good = [], True
    for status, words in wanted:
        steps.append(run(words, options.root) | {"expected_status": status})
        good = good and steps[-1]["status"] == status
        options.out.write_text(json.dumps({"benchmark": "sglang_deploy", "steps": steps}, indent=1) + "\n")
        if not good:
            log = next(options.root.rglob("*.log"), None)
            print("\n".join([*steps[-1]["said"], *(log.read_text().splitlines()[-40:] if log else [])]))
            run(["stop", NAME, "--yes"], options.root)
            break
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
