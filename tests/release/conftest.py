import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Many short-lived interpreters are started here; let them share their byte code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("pycache")))
        yield


@pytest.fixture
def service(tmp_path):
    from stub_service import StubService

    stub = StubService(tmp_path / "root")
    yield stub
    stub.kill()
