"""The Ansible module that asks a host's agent."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from toolkit.hostside import protocol

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
    agent = module.Agent([sys.executable, "-c", "input()"], {})
    with pytest.raises(module.AgentError, match="ended without an answer"):
        agent.ask("swap", {})
    agent.close()
