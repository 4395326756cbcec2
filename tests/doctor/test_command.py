"""The command with `--load`, and what it asks of a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from toolkit.doctor.request import load_request
from toolkit.profile.loading import load_profile

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("ddtoolkit")


def ended(*arguments: str, status: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [PROGRAM, "doctor", "local-cpu", "--set", "service.port=1", *arguments],
        capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_a_profile_without_gpus_has_nothing_to_load() -> None:
    report = json.loads(ended("--load", "--json", status=0).stdout)
    assert report["load"] is None
    found = {item["check"]: (item["level"], item["seen"]) for item in report["findings"]}
    for name in ("pcie-bandwidth", "p2p-bandwidth", "all-reduce"):
        assert found[name] == ("skip", "the profile uses no GPU")


def test_disturbing_goes_with_loading_and_with_a_yes() -> None:
    assert "--disruptive goes with --load" in ended("--disruptive", status=2).stderr
    assert "add --yes" in ended("--load", "--disruptive", "--json", status=2).stderr


def test_a_host_is_loaded_as_the_profile_computes() -> None:
    profile = load_profile("rtx-pro-6000-pcie-8x").profile
    load = load_request(profile)
    assert load is not None
    assert load["group"] == 8
    assert load["sizes"] == [8192, 33 * 7168 * 2, 1 << 20, 16 << 20, 64 << 20]
    assert load["environment"]["NCCL_P2P_LEVEL"] == "SYS"
    assert load["user"] == "ddtoolkit"
    assert "LimitMEMLOCK=infinity" in load["properties"]
    (python,) = load["pythons"]
    assert python.startswith("/opt/ddtoolkit/envs/lib-")
    linear = load_profile("rtx-pro-6000-pcie-8x", overlays=[Path("linear-dflash")]).profile
    assert 8 * 7168 * 2 in (load_request(linear) or {})["sizes"]
