import sys
from pathlib import Path

import pytest

for folder in ("service", "release"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


@pytest.fixture
def service(tmp_path, monkeypatch):
    from stub_service import StubService

    # The record of what is deployed goes there, and not to whoever runs the tests.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    stub = StubService(tmp_path / "root")
    yield stub
    stub.kill()
