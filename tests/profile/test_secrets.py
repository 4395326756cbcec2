"""Secrets: read where a reference points, never shown."""

import sys
import time
import traceback
from pathlib import Path

import pytest

from toolkit.errors import ConfigError
from toolkit.profile.schema import SecretRef
from toolkit.profile.secrets import resolve_secret

SECRET = "s3cr3t pa$1wor$D %s \\ é"


def python(code):
    return SecretRef(command=(sys.executable, "-c", code))


def runs(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "key"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def test_environment(monkeypatch):
    monkeypatch.setenv("DDTREE_KEY", SECRET)
    secret = resolve_secret(SecretRef(env="DDTREE_KEY"))
    assert (secret.reveal(), secret.reference, secret.warnings) == (SECRET, "env DDTREE_KEY", ())


def test_file(kept):
    assert resolve_secret(SecretRef(file=str(kept))).reveal() == SECRET


@pytest.mark.parametrize(("raw", "value"), [("a\n", "a"), ("a\r\n", "a"), ("a", "a"), (" a \n", " a ")])
def test_one_newline_is_stripped(kept, raw, value):
    kept.write_bytes(raw.encode())
    assert resolve_secret(SecretRef(file=str(kept))).reveal() == value


def test_command_has_no_shell():
    secret = resolve_secret(SecretRef(command=("echo", "$HOME;`id`")))
    assert (secret.reveal(), secret.reference) == ("$HOME;`id`", "command echo")


def test_a_file_that_others_read_warns_and_one_they_write_is_refused(kept):
    kept.chmod(0o644)
    assert "others can read it (mode 0644)" in resolve_secret(SecretRef(file=str(kept))).warnings[0]
    kept.chmod(0o620)
    with pytest.raises(ConfigError, match=r"others can change it \(mode 0620\)"):
        resolve_secret(SecretRef(file=str(kept)))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (SecretRef(env="DDTREE_NO_SUCH_VARIABLE"), "env DDTREE_NO_SUCH_VARIABLE: the variable is not set"),
        (SecretRef(file="/no/such/file"), "file /no/such/file: cannot be read: no such file or directory"),
        (SecretRef(file="/dev/zero"), "file /dev/zero: is no regular file"),
        (SecretRef(file="/tmp"), "file /tmp: is no regular file"),
        (
            SecretRef(command=("/no/such", "x")),
            "command /no/such: cannot be run: no such file",
        ),
        (python("print('hidden-1'); raise SystemExit(3)"), "ended with exit status 3"),
        (python("pass"), "is empty"),
        (python("print('hidden-2\\nhidden-3')"), "holds a newline"),
        (python("import sys; sys.stdout.buffer.write(b'hidden-4 \\xff')"), "is not UTF-8 text"),
        (python("print('hidden-5' * 100000)"), "is longer than 64 KiB"),
    ],
)
def test_errors_name_the_reference_and_never_the_value(reference, message):
    with pytest.raises(ConfigError) as caught:
        resolve_secret(reference)
    assert message in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value.__context__)
    assert "hidden-" not in shown.replace("hidden-1'); raise", "").replace("hidden-2\\nhidden-3')", "")


def test_a_command_that_hangs_ends_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); print('hidden', flush=True); time.sleep(60)"
    )
    started = time.monotonic()
    with pytest.raises(ConfigError, match="no answer within 1 s"):
        resolve_secret(python(code), timeout=1)
    assert time.monotonic() - started < 10
    child = int(pid_file.read_text())
    for _ in range(100):
        if not runs(child):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child still runs")


def test_a_command_that_never_stops_writing_is_bounded():
    started = time.monotonic()
    with pytest.raises(ConfigError, match="longer than 64 KiB"):
        resolve_secret(SecretRef(command=("yes", "hidden")))
    assert time.monotonic() - started < 10


def test_nothing_shows_the_value(monkeypatch):
    monkeypatch.setenv("DDTREE_KEY", SECRET)
    secret = resolve_secret(SecretRef(env="DDTREE_KEY"))
    assert "s3cr3t" not in f"{secret} {secret!r} {[secret]}"
