"""The units of the shipped profiles, read by the systemds on both sides of Ubuntu 24.04's."""

import json

import pytest

from tests.service.golden import FOLDER, NAMES, PYTHON, rendered

PROGRAM = """
import json, subprocess, sys
from pathlib import Path
answers = {}
for name, text in json.load(sys.stdin).items():
    unit = f"ddtoolkit-{name.split('+')[0]}.service"
    path = Path("/etc/systemd/system") / unit
    path.write_text(text)
    verify = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)]
    said = subprocess.run(verify, capture_output=True, text=True).stderr
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    keys = ["-p", "ExecStart", "-p", "Environment", "-p", "LoadState", "-p", "TimeoutStartUSec", "-p", "User"]
    shown = subprocess.run(["systemctl", "show", *keys, unit], capture_output=True, text=True).stdout
    answers[name] = {"said": [line for line in said.splitlines() if unit in line], "shown": shown}
    path.unlink()
print(json.dumps(answers))
"""


def words(text):
    """The arguments of a rendered unit: all of them are plain words in double quotes."""
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    return [word.strip('"') for word in line.removeprefix("ExecStart=").split('" "')]


TIMEOUTS = {"3600000ms": "1h", "900000ms": "15min", "60000ms": "1min"}


def load_timeout(text):
    return next(line for line in text.splitlines() if line.startswith("TimeoutStartSec=")).partition("=")[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_a_booted_systemd_reads_what_was_reviewed(make_host, release):
    host = make_host(release)
    program = host.path(PYTHON)
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    kept = {name: (FOLDER / f"{name}.service").read_text() for name in NAMES}
    answers = json.loads(host.root(["python3", "-c", PROGRAM], json.dumps(kept), timeout=200).stdout)
    for name, answer in answers.items():
        text = rendered(name)
        assert answer["said"] == [], name
        assert f"argv[]={' '.join(words(text))} ;" in answer["shown"], name
        assert "LoadState=loaded" in answer["shown"]
        assert "DDTOOLKIT_RELEASE=20260101T000000Z-00000000" in answer["shown"]
        assert "User=ddtoolkit" in answer["shown"]
        assert f"TimeoutStartUSec={TIMEOUTS[load_timeout(text)]}" in answer["shown"], name
