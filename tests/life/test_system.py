"""Taking back packages and units, as apt and systemd would answer; with apt itself in tests/hosts."""

import json
import os

import pytest

from toolkit.life.system import give_back


class Host:
    """Answers as a host whose apt would remove `unneeded` by itself, and `purged` when told to purge."""

    def __init__(self, installed, unneeded, purged=None, status=0, said=""):
        self.installed, self.unneeded, self.purged = installed, unneeded, purged
        self.status, self.said = status, said
        self.ran = []

    def __call__(self, command):
        self.ran.append(list(command))
        simulated = "--simulate" in command
        if command[0] == "dpkg-query":
            return 0, "".join(f"installed {name}\n" for name in command[3:] if name in self.installed), ""
        if "autoremove" in command:
            return 0, "".join(f"Purg {name} [1.0]\n" for name in self.unneeded), ""
        if "purge" in command and simulated:
            names = command[command.index("purge") + 1 :] if self.purged is None else self.purged
            return 0, "".join(f"Purg {name} [1.0]\n" for name in names), ""
        if "purge" in command:
            if not self.status:
                self.installed = [name for name in self.installed if name not in command]
            return self.status, "", self.said
        return 0, "", ""

    def did(self, word):
        return [command for command in self.ran if word in command and "--simulate" not in command]


@pytest.fixture
def record(tmp_path):
    def write(**noted):
        path = tmp_path / "provisioned.json"
        path.write_text(json.dumps(noted))
        return path

    return write


def test_without_a_record_nothing_is_asked(tmp_path):
    host = Host([], [])
    assert give_back(tmp_path / "none", host) == ([], [])
    assert host.ran == []


def test_just_what_was_installed_and_nobody_needs_is_purged(record):
    path = record(packages=["figlet", "gone", "libfig"], held=[], enabled=[])
    host = Host(["figlet", "libfig"], ["figlet", "libfig", "an-admins-old-dependency"])
    assert give_back(path, host) == (["package figlet", "package libfig"], [])
    (purge,) = host.did("purge")
    assert purge[purge.index("purge") :] == ["purge", "figlet", "libfig"]
    assert any(word.startswith("DPkg::Lock::Timeout=") for word in purge)
    assert not path.exists()


def test_what_others_need_by_now_stays(record):
    host = Host(["figlet", "libfig"], ["figlet"])
    removed, kept = give_back(record(packages=["figlet", "libfig"]), host)
    assert (removed, kept) == (["package figlet"], ["package libfig: others need it"])


def test_nothing_else_goes_with_them(record):
    host = Host(["figlet"], ["figlet"], purged=["figlet", "an-admins-package"])
    removed, kept = give_back(record(packages=["figlet"]), host)
    assert removed == []
    assert kept == ["packages figlet: an-admins-package would go with them; next: apt-get purge figlet"]
    assert host.did("purge") == []


def test_a_lock_that_is_held_for_long_is_told_and_fails_nothing(record):
    said = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (apt-get)\n"
    host = Host(["figlet"], ["figlet"], status=100, said=said)
    removed, kept = give_back(record(packages=["figlet"]), host)
    assert removed == []
    assert kept == [f"packages figlet: {said.strip()}; next: apt-get purge figlet"]


def test_holds_and_units_are_set_back(record):
    host = Host(["curl"], [])
    removed, _ = give_back(record(packages=[], held=["curl"], enabled=["chrony.service"]), host)
    assert removed == ["start of chrony.service", "hold of package curl"]
    assert host.did("unhold") == [["apt-mark", "unhold", "curl"]]
    assert host.did("disable") == [["systemctl", "disable", "--quiet", "--now", "chrony.service"]]


@pytest.mark.parametrize("text", ["", "[]", '{"packages": 7}', "\xff"])
def test_a_damaged_record_is_told(tmp_path, text):
    path = tmp_path / "provisioned.json"
    path.write_bytes(text.encode("latin-1"))
    removed, (line,) = give_back(path, Host([], []))
    assert removed == []
    assert str(path) in line


@pytest.mark.parametrize(
    "text", ['{"packages": "abc"}', '{"held": [1]}', '{"enabled": {"a": 1}}', "[]", "[" * 200_000, None]
)
def test_a_damaged_record_is_told_and_nothing_is_taken_back(tmp_path, text):
    path, host = tmp_path / "provisioned.json", Host(["a", "b", "c"], ["a", "b", "c"])
    path.write_text(text) if text is not None else os.mkfifo(path)
    removed, (line,) = give_back(path, host)
    assert (removed, host.ran) == ([], [])
    assert line.startswith(f"packages that provisioning installed: {path} cannot be read: ")
