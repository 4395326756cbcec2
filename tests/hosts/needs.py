"""What test hosts need of this machine, installed where that can be done."""

import os
import shutil
import subprocess

# Program to the Debian package that has it.
PROGRAMS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "bridge": "iproute2",
    "zstd": "zstd",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "nsenter": "util-linux",
}
INSTALL_LIMIT = 900
LOCK_LIMIT = 300


def why_not() -> str | None:
    """Why no test host can run here; None: they can."""
    if os.geteuid() != 0:
        return "test hosts need root"
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing and shutil.which("apt-get") is None:
        return f"test hosts need {', '.join(missing)}, and there is no apt-get to install them"
    if missing:
        install(missing)
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        return f"test hosts need namespaces and bridges: {tried.stderr.strip()}"
    if not has_cgroup_kill():
        return "test hosts need a writable cgroup2 with cgroup.kill (Linux 5.14)"
    return None


def install(packages: list[str]) -> None:
    """Install Debian packages, waiting a bounded time for another installation to end."""
    apt = ["apt-get", "-q", "-o", f"DPkg::Lock::Timeout={LOCK_LIMIT}"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["-y", "install", "--no-install-recommends", *packages]):
        done = subprocess.run(
            [*apt, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"apt-get {' '.join(arguments)}: {done.stdout[-1500:]}{done.stderr[-1500:]}")


def has_cgroup_kill() -> bool:
    """Whether control groups can be made whose processes end at one write."""
    from tests.hosts.guard import cgroup_root

    root = cgroup_root()
    if root is None:
        return False
    probe = root / f"ddtoolkit-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        return (probe / "cgroup.kill").exists()
    finally:
        probe.rmdir()
