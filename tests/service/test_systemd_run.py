"""A real systemd starts a rendered unit: its process sees every byte (R1, R2, R3).

systemd runs as a user manager in namespaces of its own, in a cgroup made for it; the machine is not touched.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stub_service import wait_until

from toolkit.service.systemd import render_unit
from toolkit.service.unit import Unit

SYSTEMD = Path("/lib/systemd/systemd")
CGROUPS = [
    path
    for path in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
    if (path / "cgroup.procs").exists()
]

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make namespaces and a cgroup"),
    pytest.mark.skipif(not SYSTEMD.exists(), reason="systemd is not installed"),
    pytest.mark.skipif(not CGROUPS, reason="there is no cgroup v2 file system"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed"),
]

WORDS = [
    "%s",
    "100%FREE",
    "pa$1wor$D",
    "${HOME}",
    "$$",
    '{"a": "b c"}',
    ";",
    "",
    "a\tb",
    "\\",
    "\\n",
    "# x",
    "*",
]
WORDS += ["'", "a'b\"c", "\u00fc", "\u2028", "\U0001f600", " a  b ", "-x", "@y", "+", "\\;"]
VALUE = "100%FREE $X ${HOME} \\ \" ' ; # \t \u00fc -c search_path=app"

# Keys of the sandbox and limits need a system manager; only what carries text matters here.
CARRIES_TEXT = re.compile(r"^(\[|Type=|ExecStart=|Environment=|WorkingDirectory=|$)")

START = """
set -e
echo $$ > "$1/cgroup.procs"
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec "$2" --user --unit=t.service
"""


@pytest.fixture
def cgroup():
    folder = CGROUPS[0] / f"ddtoolkit-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip(reason="no cgroup can be made here")
    yield folder
    for _ in range(100):
        for below in sorted(folder.rglob("*"), reverse=True):
            if below.is_dir():
                try:
                    below.rmdir()
                except OSError:
                    time.sleep(0.02)
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.02)
        else:
            return


def test_process_sees_every_byte(tmp_path, cgroup):
    seen, program = tmp_path / "seen", tmp_path / "show.py"
    program.write_text(
        "import os, pathlib, sys\n"
        "data = pathlib.Path('/proc/self/cmdline').read_bytes() + os.environb[b'A']\n"
        "pathlib.Path(sys.argv[1] + '.new').write_bytes(data)\n"
        "os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
    )
    argv = (sys.executable, "-S", str(program), str(seen), *WORDS)
    unit = Unit(
        name="t",
        release="r",
        description="t",
        argv=argv,
        environment={"A": VALUE},
        working_directory=str(tmp_path),
        host="127.0.0.1",
        port=1,
    )
    text = "\n".join(line for line in render_unit(unit, 252).split("\n") if CARRIES_TEXT.match(line))
    (tmp_path / "systemd" / "user").mkdir(parents=True)
    (tmp_path / "systemd" / "user" / "t.service").write_text(text)
    environment = {
        "PATH": os.environ["PATH"],
        "XDG_RUNTIME_DIR": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    command = [
        "unshare",
        "-m",
        "-C",
        "--propagation",
        "private",
        "sh",
        "-c",
        START,
        "sh",
        str(cgroup),
        str(SYSTEMD),
    ]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            command, env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL
        )
    try:
        wait_until(lambda: seen.exists() or process.poll() is not None, 20)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert seen.exists(), (tmp_path / "said").read_text()
    assert seen.read_bytes().decode() == "\0".join([*argv, VALUE])
