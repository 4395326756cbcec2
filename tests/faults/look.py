"""Run on a test host by its own Python: everything that a check wants to know, as one JSON object.

    python3 -I -S look.py NAME SECRET

Standard library only, and nothing of the toolkit: what is looked at must not look at itself.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")
NAME, SECRET = sys.argv[1:]
UNIT = f"ddtoolkit-{NAME}.service"
OPT, STATE = Path("/opt/ddtoolkit"), Path("/var/lib/ddtoolkit/state") / NAME
BASE = OPT / "services" / NAME
UNITS = Path("/etc/systemd/system")
PROPERTIES = ("ActiveState", "SubState", "MainPID", "NRestarts")
# Everything that may lie in the state folder when nothing is under way.
SETTLED = re.compile(
    r"lock\.guard|transaction\.flock|reserve\.(lock|transaction|history)|transaction|history\.jsonl|started|"
    r"secrets|experiment\.json|test-report\.json"
)


def names(folder):
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def unit():
    command = ["systemctl", "show", UNIT, f"--property={','.join(PROPERTIES)}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(line.split("=", 1) for line in said.splitlines())
    # The property of that name is of the last time that systemd read the unit.
    asked = subprocess.run(["systemctl", "is-enabled", UNIT], capture_output=True, text=True, check=False)
    return found | {"enabled": asked.stdout.strip()}


def running(pid):
    """The release that the server's process was started for, by its own environment."""
    try:
        values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((v.decode().partition("=")[2] for v in values if v.startswith(b"DDTOOLKIT_RELEASE=")), None)


def unit_release():
    try:
        found = re.search(rf"DDTOOLKIT_RELEASE=({ID.pattern})", (UNITS / UNIT).read_text())
    except OSError:
        return None
    return found and found[1]


def current():
    try:
        return (BASE / "current").readlink().name
    except OSError:
        return None


def damaged():
    found = []
    for top in (OPT / "services", STATE, OPT / "envs"):
        for path in top.rglob("*.json"):
            if re.search(r"/toolkit/|/\.|/transaction\.(new|old)/", str(path)):  # never read
                continue
            try:
                json.loads(path.read_bytes())
            except ValueError:
                found.append(str(path))
    return found


def stray():
    """Files that no state of rest has."""
    found = [BASE / name for name in names(BASE) if name not in ("releases", "current")]
    found += [BASE / "releases" / name for name in names(BASE / "releases") if not ID.fullmatch(name)]
    found += [OPT / "envs" / name for name in names(OPT / "envs") if name.startswith(".")]
    found += [
        OPT / "tool" / name for name in names(OPT / "tool") if not re.fullmatch(r"[0-9a-f]{16}|python", name)
    ]
    found += [STATE / name for name in names(STATE) if not SETTLED.fullmatch(name)]
    kept = set(names(BASE / "releases"))
    for folder in (BASE / "releases" / name for name in kept):
        found += [folder / name for name in names(folder) if name.startswith(".")]
    found += [STATE / "secrets" / name for name in names(STATE / "secrets") if name[:-5] not in kept]
    found += [UNITS / name for name in names(UNITS) if name.startswith(".")]
    records = Path("/root/.local/state/ddtoolkit/services")
    found += [records / name for name in names(records) if not name.endswith(".json")]
    found += [
        path
        for name in names(Path("/var/cache/ddtoolkit"))
        if (path := Path("/var/cache/ddtoolkit") / name) and name.startswith(".") and name != ".build"
    ]
    return [str(path) for path in found]


def history():
    try:
        lines = (STATE / "history.jsonl").read_text().splitlines()
    except OSError:
        return []
    entries = [json.loads(line) for line in lines]
    return [
        {key: entry[key] for key in ("id", "kind", "outcome", "release", "base", "message")}
        for entry in entries
    ]


def transaction():
    folder = STATE / "transaction"
    try:
        request = json.loads((folder / "request.json").read_bytes())
    except (OSError, ValueError):
        return None
    text = (folder / "journal.jsonl").read_bytes().partition(b"\0")[0]
    events = []
    for line in text.splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    ends = [event["data"] for event in events if event["step"] == "outcome"]
    return {
        "id": request["id"], "kind": request["kind"], "release": request["release"], "base": request["base"],
        "outcome": ends[0]["status"] if ends else None, "message": ends[0]["message"] if ends else None,
        "steps": [event["step"] for event in events if event["state"] == "begin"], "ends": len(ends),
    }  # fmt: skip


def leaks():
    """Files that hold the secret, but for the releases' own; those too where others may read them."""
    places = [
        "/opt/ddtoolkit",
        "/var/lib/ddtoolkit",
        "/etc/systemd",
        "/var/log",
        "/tmp",
        "/run/systemd/transient",
    ]
    said = subprocess.run(
        ["grep", "-rlsF", SECRET, *places], capture_output=True, text=True, check=False
    ).stdout
    found = []
    for line in said.splitlines():
        private = Path(line).parent == STATE / "secrets"
        if not private or os.stat(line).st_mode & 0o077:  # noqa: PTH116
            found.append(line)
    return found


facts = unit()
print(json.dumps({
    "unit": facts, "running": running(facts["MainPID"]), "unit_release": unit_release(), "current": current(),
    "releases": names(BASE / "releases"), "history": history(), "transaction": transaction(),
    "lock": (STATE / "lock").exists(), "damaged": damaged(), "stray": stray(), "leaks": leaks(),
    "crash": (STATE / "transaction" / "crash.txt").exists(),
}))  # fmt: skip
