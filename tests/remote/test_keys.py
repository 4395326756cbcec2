"""known_hosts files, written by ssh-keygen and by the toolkit, read by both."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from toolkit.errors import UnreachableError
from toolkit.remote import keys

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def _key(folder: Path, name: str, kind: str = "ed25519") -> tuple[bytes, str, str]:
    """A new key: its blob, its public line, and the fingerprint that ssh-keygen gives it."""
    path = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True)
    line = path.with_suffix(".pub").read_text(encoding="utf-8")
    shown = subprocess.run(["ssh-keygen", "-lf", path], check=True, capture_output=True, text=True).stdout
    return base64.b64decode(line.split()[1]), " ".join(line.split()[:2]), shown.split()[1]


def test_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    blob, _, shown = _key(tmp_path, "k")
    assert keys.fingerprint(blob) == shown
    assert keys.is_fingerprint(shown)
    assert not keys.is_fingerprint("MD5:00")


@pytest.mark.parametrize("name", ["host", "192.0.2.1", "[host]:2222", "[2001:db8::1]:2222"])
def test_an_added_key_is_hashed_and_found_by_ssh_keygen(tmp_path: Path, name: str) -> None:
    blob, _, shown = _key(tmp_path, "k")
    known = tmp_path / "ssh" / "known_hosts"
    keys.add(name, known, blob)
    assert name not in known.read_text(encoding="utf-8")
    found = subprocess.run(
        ["ssh-keygen", "-lF", name, "-f", known], check=True, capture_output=True, text=True
    ).stdout
    assert shown in found
    keys.check("h", name, (known,), blob)


def test_a_line_without_an_end_is_not_spoilt(tmp_path: Path) -> None:
    first, line, _ = _key(tmp_path, "first")
    second, _, _ = _key(tmp_path, "second")
    known = tmp_path / "known_hosts"
    known.write_text(f"a {line}", encoding="utf-8")
    keys.add("b", known, second)
    assert [key.blob for key in keys.known_keys("a", (known,))] == [first]
    assert [key.line for key in keys.known_keys("b", (known,))] == [2]


def test_keys_hashed_by_ssh_keygen_are_found(tmp_path: Path) -> None:
    blob, line, _ = _key(tmp_path, "k")
    known = tmp_path / "known_hosts"
    known.write_text(f"# comment\n\nother {line}\n[h]:22022 {line}\n", encoding="utf-8")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert "22022" not in known.read_text(encoding="utf-8")
    keys.check("h", "[h]:22022", (tmp_path / "absent", known), blob)


def test_an_unknown_key_shows_its_fingerprint_and_how_to_trust_it(tmp_path: Path) -> None:
    blob, _, shown = _key(tmp_path, "k")
    with pytest.raises(UnreachableError, match="ct200: its key is not known") as caught:
        keys.check("ct200", "ct200", (), blob)
    assert shown in caught.value.message
    assert caught.value.hint is not None
    assert f"ddtoolkit hosts trust ct200 -i INVENTORY --fingerprint {shown}" in caught.value.hint


def test_a_changed_key_names_both_and_the_line(tmp_path: Path) -> None:
    _, line, before = _key(tmp_path, "before")
    blob, _, after = _key(tmp_path, "after")
    known = tmp_path / "known_hosts"
    known.write_text(f"h {line}\n", encoding="utf-8")
    with pytest.raises(UnreachableError, match=f"{known}:1") as caught:
        keys.check("h", "h", (known,), blob)
    assert before in caught.value.message
    assert after in caught.value.message


def test_a_revoked_key_is_refused_even_if_it_is_also_known(tmp_path: Path) -> None:
    blob, line, _ = _key(tmp_path, "k")
    known = tmp_path / "known_hosts"
    known.write_text(f"h {line}\n@revoked h {line}\n", encoding="utf-8")
    with pytest.raises(UnreachableError, match=f"revoked in {known}:2"):
        keys.check("h", "h", (known,), blob)


def test_other_kinds_of_keys_and_damaged_lines_do_not_count(tmp_path: Path) -> None:
    blob, line, _ = _key(tmp_path, "k")
    _, rsa, _ = _key(tmp_path, "rsa", "rsa")
    known = tmp_path / "known_hosts"
    known.write_text(f"h {rsa}\nh ssh-ed25519 %%%\n|1|x h\n@cert-authority h {line}\n", encoding="utf-8")
    with pytest.raises(UnreachableError, match="not known"):
        keys.check("h", "h", (known,), blob)
