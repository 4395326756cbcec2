"""What holds for every test."""

import os
from pathlib import Path

import pytest

# Hundreds of short-lived interpreters are started: they share their byte code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Triton decides when it is first imported, by whichever test comes first, whether kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What takes longest, the longest first: begun last, one of these would keep a single process busy in the end.
LONGEST = (
    "hosts/test_gpu_host.py", "hosts/test_bare_hosts.py", "deploy/test_local.py",
    "hosts/test_deploy_over_ssh.py", "hosts/test_drifts.py", "hosts/test_faults.py", "hosts/test_weights.py",
    "hosts/test_recovery.py", "hosts/test_systemd_manager.py", "sglang/test_profiles.py",
    "hosts/test_preflight.py", "provision/test_provision.py", "sglang/test_serving.py",
    "sglang/test_build.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files where several processes share them."""
    if hasattr(config, "workerinput"):
        here = Path(__file__).parent
        rank = {(here / name).resolve(strict=True): number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(item.path, len(rank)))
