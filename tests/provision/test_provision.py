"""Provisioning through real ansible-runner and Ansible, on this machine."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.profile.schema import Profile
from toolkit.provision.lacks import missing
from toolkit.provision.playbook import TaskResult, run_local
from toolkit.provision.requirements import Requirements, requirements
from toolkit.resources import bundled


def needs(root: Path) -> Requirements:
    return requirements(Profile.model_validate({"name": "unit", "schema": 1}), Layout(root))


def test_the_playbook_makes_what_was_missing_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    needed = needs(tmp_path / "root")
    assert f"folder {tmp_path / 'root'} is missing" in missing(needed)

    first = run_local("provision.yml", needed.settings())
    assert "changed" in {result.outcome for result in first}
    assert missing(needed) == []

    second = run_local("provision.yml", needed.settings())
    assert {result.outcome for result in second} <= {"ok", "skipped"}


def test_values_are_data_and_never_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE", "leaked")
    name = "{{ 6 * 7 }}{{ lookup('env', 'PROBE') }} %s"
    needed = dataclasses.replace(needs(tmp_path), directories=((tmp_path / name, 0o750),))
    run_local("provision.yml", needed.settings())
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_wrong_mode_and_a_file_in_the_way_are_seen(tmp_path: Path) -> None:
    wrong, blocked = tmp_path / "wrong", tmp_path / "blocked"
    wrong.mkdir(mode=0o700)
    blocked.write_text("")
    needed = Requirements(directories=((wrong, 0o755), (blocked, 0o755)), packages=(), min_free_bytes=0)
    assert missing(needed) == [f"folder {wrong} has mode 0700, not 0755", f"{blocked} is not a folder"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_in_a_folders_place_is_named_and_left(tmp_path: Path, kind: str) -> None:
    blocked, behind = tmp_path / "blocked", tmp_path / "behind"
    if kind == "file":
        blocked.write_text("theirs")
    else:
        behind.mkdir(mode=0o700)
        blocked.symlink_to(behind)
    needed = dataclasses.replace(needs(tmp_path), directories=((blocked, 0o755), (tmp_path / "next", 0o755)))
    with pytest.raises(ToolkitError, match=rf"'Create folders' .*{blocked} already exists and is no folder"):
        run_local("provision.yml", needed.settings())
    assert blocked.read_text() == "theirs" if kind == "file" else behind.stat().st_mode & 0o777 == 0o700


def test_too_little_space_is_refused_with_the_numbers_before_anything_else(tmp_path: Path) -> None:
    needed = dataclasses.replace(needs(tmp_path), min_free_bytes=1 << 60)
    with pytest.raises(ToolkitError, match=rf"{tmp_path} has \d+ bytes free, {1 << 60} are needed"):
        run_local("provision.yml", needed.settings())


def test_progress_is_told_task_by_task(tmp_path: Path) -> None:
    seen: list[TaskResult] = []
    run_local("provision.yml", needs(tmp_path).settings(), on_task=seen.append)
    assert [result.task for result in seen if result.task == "Create folders"] == ["Create folders"]
    assert {result.host for result in seen} == {"localhost"}


def test_the_callers_environment_does_not_reach_ansible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A broken locale and a foreign Ansible configuration would both end the run.
    monkeypatch.setenv("LC_ALL", "xx_XX.broken")
    monkeypatch.setenv("ANSIBLE_CONFIG", str(tmp_path / "absent.cfg"))
    monkeypatch.setenv("ANSIBLE_ROLES_PATH", str(tmp_path))
    run_local("provision.yml", needs(tmp_path / "root").settings())
    assert (tmp_path / "root" / "services" / "unit" / "releases").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give folders away")
def test_under_systemd_only_the_cache_belongs_to_the_user(tmp_path: Path) -> None:
    profile = Profile.model_validate(
        {"name": "unit", "schema": 1, "service": {"manager": "systemd"}, "host": {"user": "daemon"}}
    )
    needed = requirements(profile, Layout(tmp_path))
    run_local("provision.yml", needed.settings())
    assert missing(needed) == []
    owners = {path.name: path.owner() for path in (tmp_path / "services", tmp_path / "cache" / "unit")}
    assert owners == {"services": "root", "unit": "daemon"}
    os.chown(tmp_path / "services", 1, 1)
    assert missing(needed) == [f"folder {tmp_path / 'services'} belongs to daemon, not to root"]


def test_a_missing_system_user_is_told() -> None:
    needed = Requirements(directories=(), packages=(), min_free_bytes=0, user="no-such-user")
    assert missing(needed) == ["system user no-such-user is missing"]


HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def wait_for_dpkg(lock: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run the module as Ansible does, on this machine."""
    arguments = f"timeout={timeout} paths={lock}"
    command = [Path(sys.executable).with_name("ansible"), "localhost", "-c", "local", "-m", "dpkg_lock"]
    library = bundled("playbooks") / "roles" / "base" / "library"
    environment = os.environ | {"ANSIBLE_LIBRARY": str(library), "ANSIBLE_LOCALHOST_WARNING": "False"}
    return subprocess.run(
        [*command, "-a", arguments], capture_output=True, text=True, check=False, timeout=60, env=environment
    )


def test_who_holds_the_lock_of_dpkg_is_named_after_a_bounded_wait(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    assert wait_for_dpkg(lock, 5).returncode == 0
    with subprocess.Popen([sys.executable, "-c", HOLDS, lock], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline()
            done = wait_for_dpkg(lock, 1)
        finally:
            holder.kill()
    assert done.returncode != 0
    assert re.search(rf"{lock} is held by \S+ \(pid {holder.pid}, since ", done.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to look for packages to install")
def test_packages_that_are_there_are_not_installed_again(tmp_path: Path) -> None:
    needed = dataclasses.replace(needs(tmp_path), packages=("bash", "dpkg"))
    results = run_local("provision.yml", needed.settings())
    assert {item.task: item.outcome for item in results}["Install packages"] == "skipped"


def test_check_mode_tells_the_difference_and_changes_nothing(tmp_path: Path) -> None:
    services = tmp_path / "root" / "services"
    services.mkdir(mode=0o711, parents=True)
    done = run_local("provision.yml", needs(tmp_path / "root").settings(), check=True)

    changed = [result for result in done if result.outcome == "changed"]
    assert [result.task for result in changed] == ["Create folders"]
    assert '- "mode": "0711",\n+ "mode": "0755",' in changed[0].diff
    made = ["services/unit", "services/unit/releases", "envs", "models", "state", "state/unit"]
    made += ["log", "cache", "cache/unit"]
    told = re.findall(rf'"path": "{tmp_path}/root/(.+)",\n- "state": "absent"', changed[0].diff)
    assert told == made, changed[0].diff
    assert (services.stat().st_mode & 0o777, list(services.iterdir())) == (0o711, [])
