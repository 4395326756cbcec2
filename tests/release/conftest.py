import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def service(tmp_path):
    from stub_service import StubService

    stub = StubService(tmp_path / "root")
    yield stub
    stub.kill()
