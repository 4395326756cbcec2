"""A published checkpoint, and what brings it here."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.weights.checkpoints import publish
from tests.weights.server import Publisher, publishing
from toolkit.profile.source import parse
from toolkit.weights.arrive import Patience
from toolkit.weights.bring import Terms, bring
from toolkit.weights.origins import Origin

QUICK = Patience(attempts=3, pause=0.001, longest=0.01)
Bring = Callable[..., dict[str, Any]]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return publish(tmp_path / "published")


@pytest.fixture
def server(published: Path) -> Iterator[Publisher]:
    with publishing(published) as made:
        yield made


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def fetch(server: Publisher, models: Path, said: list[str]) -> Bring:
    """Brings the published checkpoint from its folder, or from a source that is named."""

    def run(source: str | None = None, revision: str | None = "v1", **terms: Any) -> dict[str, Any]:
        origin = Origin(parse(source or f"{server.url}/folder/", revision), endpoint=server.url)
        wanted = Terms(models, patience=QUICK, **terms)
        return bring(origin, wanted, lambda value: said.append(str(value.get("line"))))

    return run
