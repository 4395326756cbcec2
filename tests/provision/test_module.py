"""The Ansible module that asks a host's agent."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from toolkit.doctor.request import examination, load_request
from toolkit.layout import Layout
from toolkit.profile.loading import load_profile
from toolkit.release.claims import claim, first_deploys
from toolkit.remote import protocol

FILE = Path(__file__).parents[2] / "playbooks" / "library" / "ddtoolkit.py"
# Answers once it has heard two beats, as an agent does that works for long.
AGENT = """
import json, sys
beats = 0
json.loads(sys.stdin.readline())
while beats < 2:
    beats += "beat" in json.loads(sys.stdin.readline())
print(json.dumps({"beat": 1}))
print(json.dumps({"result": {"beats": beats}}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ddtoolkit_module", FILE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert loaded.BEAT == protocol.BEAT
    monkeypatch.setattr(loaded, "BEAT", 0.05)
    return loaded


@pytest.mark.timeout(30)
def test_the_agent_hears_of_the_module_while_it_works(module: ModuleType) -> None:
    agent = module.Agent([sys.executable, "-c", AGENT], {})
    assert agent.ask("swap", {}) == {"beats": 2}
    agent.close()
    assert agent._child.stdout.closed


@pytest.mark.timeout(30)
def test_an_agent_that_ends_is_told(module: ModuleType) -> None:
    begins = "print('{}', flush=True); input()"
    agent = module.Agent([sys.executable, "-c", begins], {})
    with pytest.raises(module.AgentError, match=r"^the agent ended without an answer$"):
        agent.ask("swap", {})
    agent.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ([sys.executable, "-c", "input(); import tookit"], "No module named 'tookit'"),
        ([sys.executable, "-c", "input()"], "it said nothing"),
        (["/bin/true"], "it said nothing"),
        (["/nowhere/python3"], "No such file or directory"),
    ],
)
def test_an_interpreter_that_will_not_do_is_named(module: ModuleType, program: list[str], why: str) -> None:
    def ask() -> None:
        with contextlib.closing(module.Agent(program, {})) as agent:
            agent.ask("swap", {})

    with pytest.raises(module.AgentError) as caught:
        ask()
    assert program[0] in str(caught.value)
    assert f"{why}; next: render the settings again, with the host.python that has" in str(caught.value)


@pytest.fixture
def given() -> dict[str, Any]:
    profile = load_profile("local-cpu", sets=("service.port=1",)).profile
    doctor = {"examination": examination(profile), "load": load_request(profile)}
    return {"doctor": doctor, "ignored": [], "load": True, "disruptive": False, "tool": str(FILE.parents[2])}


def test_the_doctor_is_asked_under_the_modules_own_python(module: ModuleType, given: dict[str, Any]) -> None:
    found = module.examined(given, actions=[])
    assert found["changed"] is False
    assert found["report"]["ok"]
    assert found["report"]["load"] is None  # a profile without GPUs has nothing to load


def test_a_finding_of_the_doctor_fails_with_its_words(module: ModuleType, given: dict[str, Any]) -> None:
    given["doctor"]["examination"]["wanted"]["host"]["min_free_disk"] = 1 << 60
    with pytest.raises(module.AgentError, match=r"^disk: .* free at .*; expected .*\(host.min_free_disk\)"):
        module.examined(given, actions=[])
    with pytest.raises(module.AgentError, match=r"nothing was touched.*\n.*ddtoolkit_ignore_checks: disk"):
        module.examined(given, actions=[], refuse=True)
    found = module.examined({**given, "ignored": ["disk"]}, actions=[], refuse=True)
    assert [line.partition(" ")[0] for line in found["findings"]] == ["fail:"]


def test_a_check_that_there_is_not_is_refused(module: ModuleType, given: dict[str, Any]) -> None:
    with pytest.raises(module.AgentError, match="no check 'rom'; next: did you mean ram"):
        module.examined({**given, "ignored": ["rom"]}, actions=[])


def test_a_doctor_that_does_not_run_is_told(
    module: ModuleType, given: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit" / "__init__.py").write_text("raise SystemExit('damaged')\n")
    with pytest.raises(module.AgentError, match="the doctor failed"):
        module.examined({**given, "tool": str(tmp_path)}, actions=[])


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a first deploy is given, of a service below a folder that is not made yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    root = tmp_path / "root"
    found = load_profile("local-cpu", sets=(f"host.root={root}", "service.port=1"))
    given = {"service": "local-cpu", "profile": found.data, "sources": {}, "secrets": {}, "given": {}}
    return given | {"who": "ann@desk", "lock_wait": 0.1, "new_baseline": False, "ignored": []}


@pytest.mark.timeout(60)
def test_a_first_deploy_claims_the_service_until_its_agent_ends(
    module: ModuleType, deployment: dict[str, Any]
) -> None:
    agent = module.Agent([sys.executable, "-P", "-m", "toolkit.hostside"], {})
    with pytest.raises(module.AgentError, match="local-cpu"):  # nothing is provisioned
        module.deploy(agent, deployment, check=False)
    holder = first_deploys()["local-cpu"]
    assert holder is not None
    assert (holder.who.partition(" ")[0], holder.command) == ("ann@desk", "deploy profile local-cpu")
    agent.close()
    assert first_deploys() == {}


@pytest.mark.timeout(60)
def test_a_service_that_another_one_deploys_is_left_to_them(
    module: ModuleType, deployment: dict[str, Any], tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "root")
    with (
        contextlib.closing(module.Agent([sys.executable, "-P", "-m", "toolkit.hostside"], {})) as agent,
        claim(layout, "local-cpu", "deploy profile other.yaml"),
    ):
        told = module.deploy(agent, deployment, check=True)["plan"]  # reading takes no lock
        assert told["steps"][0]["action"] == "provision"
        with pytest.raises(module.AgentError) as caught:
            module.deploy(agent, deployment, check=False)
    assert (
        ": deploy profile other.yaml; next: wait for its end, or with ddtoolkit_lock_wait, and run "
        in str(caught.value)
    )
