"""Two hosts over SSH: what commands take, against `ansible-playbook` and against the server's own restart.

python -m benchmarks.two_hosts --out benchmarks/two_hosts.json

As root, in the checkout. Two test hosts (Debian 12 and 13) are booted and get the profile `systemd-cpu`.
Then, in turn: a deploy with nothing to change; `ansible-playbook` of the same playbook with the same
inventory and values, which has nothing to change either, with pipelining and a connection that is kept
between its runs (its quickest settings); `plan`; `status`; `drift`. "ratio" is deploy over ansible-playbook,
turn by turn.

The swaps change a value that does not concern the model's output and are accepted. What a swap adds is its
wall-clock time without its acceptance and without the server's own stop and start, in two ways:
"beyond_its_steps" takes stop, start and first token as the swap's own journal has them;
"beyond_a_restart_by_hand" takes what `systemctl stop`, `systemctl start` and asking for a token until one
comes (every 10 ms) took just before, on the host itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet import NAME, ROOT, SETS, Fleet, fleet, load, machine, timed
from tests.hosts.machines import Host

KEPT = "600s"  # longer than anything between two of Ansible's runs
STEPS = ("stop_old", "start_new", "ready")
# Runs on the host: the server's own stop, start and first token, and nothing of the toolkit's.
BY_HAND = """
import http.client, json, subprocess, sys, time
unit, port = sys.argv[1], int(sys.argv[2])
begin = time.monotonic()
subprocess.run(["systemctl", "stop", unit], check=True)
stopped = time.monotonic()
subprocess.run(["systemctl", "start", unit], check=True)
body = json.dumps({"text": "def", "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
while True:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        if json.load(connection.getresponse()).get("output_ids"):
            break
    except OSError:
        time.sleep(0.01)
    finally:
        connection.close()
print(json.dumps({"stop": stopped - begin, "start": time.monotonic() - stopped}))
"""


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and range of measured values, with all of them."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "all": [round(value, 3) for value in values],
    }


def playbook(made: Fleet, settings: Path) -> float:
    """Seconds of the provision playbook, which has to find nothing to change."""
    keep = f"-o ControlMaster=auto -o ControlPersist={KEPT} -o StrictHostKeyChecking=yes -o BatchMode=yes"
    environment = {
        "ANSIBLE_CONFIG": str(ROOT / "playbooks" / "ansible.cfg"),
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_SSH_ARGS": f"-C {keep}",
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(made.folder / "cp"),
        "ANSIBLE_NOCOLOR": "1",
        "LC_ALL": "C.UTF-8",
    }
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "--become", "-i", str(made.inventory)]
    command += [str(ROOT / "playbooks" / "provision.yml"), "-e", f"ddtoolkit_settings_file={settings}"]
    seconds, done = timed(command, environment)
    recap = [line for line in done.stdout.splitlines() if "changed=" in line]
    if done.returncode or len(recap) != len(made.hosts) or any("changed=0" not in line for line in recap):
        raise SystemExit(f"ansible-playbook: status {done.returncode}\n{done.stdout}{done.stderr}")
    return seconds


def idle_commands(made: Fleet, turns: int) -> dict[str, Any]:
    """Commands that find nothing to do, in turn."""
    shown = timed([sys.executable, "-c", "from toolkit.cli.main import main; main()", "render", NAME, *SETS,
                   "--format", "ansible"])[1]  # fmt: skip
    settings = made.folder / "settings.json"
    settings.write_text(shown.stdout, encoding="utf-8")
    playbook(made, settings)  # opens the connections that are kept
    deploys, plays, plans, looks, drifts = [], [], [], [], []
    for _ in range(turns):
        seconds, said = made.deploy(batch=1)
        if any(not item["result"]["plan"]["empty"] for item in said["hosts"].values()):
            raise SystemExit(f"the deploy had something to do: {said}")
        deploys.append(seconds)
        plays.append(playbook(made, settings))
        plans.append(made.toolkit("plan", NAME, *SETS)[0])
        looks.append(made.toolkit("status", NAME)[0])
        drifts.append(made.toolkit("drift", NAME, *SETS)[0])
    return {
        "deploy_with_nothing_to_do": spread(deploys),
        "ansible_playbook": spread(plays),
        "ratio": spread([mine / theirs for mine, theirs in zip(deploys, plays, strict=True)]),
        "plan": spread(plans),
        "status": spread(looks),
        "drift": spread(drifts),
    }


def restart_by_hand(host: Host) -> dict[str, float]:
    """Seconds of the server's own stop, and of its start up to its first token, on the host itself."""
    command = [sys.executable, "-c", BY_HAND, f"ddtoolkit-{NAME}", "30000"]
    return dict(json.loads(host.root(command).stdout))


def swaps(made: Fleet, turns: int) -> dict[str, Any]:
    """Accepted swaps on one host after the other, each after a restart by hand."""
    values = dict.fromkeys(made.hosts, False)
    walls, judged, stops, starts, beyond_steps, beyond_hand, steps = [], [], [], [], [], [], []
    for turn in range(turns):
        name = list(made.hosts)[turn % len(made.hosts)]
        values[name] = not values[name]
        by_hand = restart_by_hand(made.hosts[name])
        stops.append(by_hand["stop"])
        starts.append(by_hand["start"])
        change = f"speculative.debug_metrics={str(values[name]).lower()}"
        wall, said = made.toolkit("swap", NAME, "--set", change, "--new-baseline", "--yes", limit=name)
        seconds = said["hosts"][name]["result"]["outcome"]["seconds"]
        walls.append(wall)
        steps.append(seconds)
        judged.append(seconds["acceptance"])
        beyond_steps.append(wall - seconds["acceptance"] - sum(seconds[step] for step in STEPS))
        beyond_hand.append(wall - seconds["acceptance"] - sum(by_hand.values()))
    return {
        "wall": spread(walls),
        "acceptance": spread(judged),
        "stop_by_hand": spread(stops),
        "start_by_hand": spread(starts),
        "beyond_its_steps": spread(beyond_steps),
        "beyond_a_restart_by_hand": spread(beyond_hand),
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=7, help="turns of the commands that change nothing")
    parser.add_argument("--swaps", type=int, default=5)
    options = parser.parse_args()
    before = load()
    with fleet(("bookworm", "trixie")) as made:
        first, _ = made.deploy(batch=2)
        idle = idle_commands(made, options.turns)
        swapped = swaps(made, options.swaps) if options.swaps else None
        versions = {
            host.name: host.root(["systemctl", "--version"]).stdout.splitlines()[0]
            for host in made.hosts.values()
        }
    record = {
        "benchmark": "two_hosts",
        "machine": {**machine(), "hosts": versions, "load_before": before, "load_after": load()},
        "unit": "seconds of wall-clock time; ratio without a unit",
        "first_deploy": first,
        "commands": idle,
        "swap": swapped,
        "targets": {"ratio": 1.0, "deploy_with_nothing_to_do": 8.0, "plan": 3.0, "swap": 2.0},
    }
    text = json.dumps(record, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
