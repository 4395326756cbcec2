"""When an agent uses its plan again, and when it looks at the host anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.hostside import operations
from toolkit.layout import Layout
from toolkit.profile.loading import load_profile
from toolkit.release.controller import reserve
from toolkit.release.host import ServiceHost

NAME = "local-cpu"


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One entry for each time that the host is observed; its folders are there."""
    seen: list[str] = []
    real = operations.prepare

    def prepare(*args: Any, **keys: Any) -> Any:
        seen.append("looked")
        return real(*args, **keys)

    monkeypatch.setattr(operations, "prepare", prepare)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield seen
    operations._last_plan.clear()


def request(root: Path, *sets: str) -> dict[str, Any]:
    data = load_profile(NAME, sets=[f"host.root={root}", *sets]).data
    return {"profile": data, "sources": {}, "secrets": {}, "current": None}


def nobody(_: dict[str, Any]) -> None: ...


@contextlib.contextmanager
def reserved(root: Path) -> Iterator[None]:
    ServiceHost(Layout(root), NAME).paths.base.mkdir(parents=True, exist_ok=True)
    with reserve(Layout(root), NAME, "test"):
        yield


def provisioned(root: Path, args: dict[str, Any]) -> None:
    for folder in operations.plan(args, nobody)["needed"]["directories"]:
        path = Path(folder["path"])
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(int(folder["mode"], 8))


def test_a_plan_is_used_again_under_the_lock_that_was_kept(tmp_path: Path, looked: list[str]) -> None:
    args = request(tmp_path / "root")
    with reserved(tmp_path / "root"):
        provisioned(tmp_path / "root", args)
        operations.plan(args, nobody)
        before = len(looked)
        operations._planned(args)
        assert len(looked) == before
        operations._planned(request(tmp_path / "root", "speculative.budget=20"))
        assert len(looked) == before + 1
        with pytest.raises(ToolkitError, match="was changed while this deploy was planned"):
            operations._planned({**args, "current": "r1"})


def test_without_the_lock_the_host_is_looked_at_again(tmp_path: Path, looked: list[str]) -> None:
    args = request(tmp_path / "root")
    provisioned(tmp_path / "root", args)
    operations.plan(args, nobody)
    before = len(looked)
    operations._planned(args)
    assert len(looked) == before + 1


def test_after_provisioning_the_host_is_looked_at_again(tmp_path: Path, looked: list[str]) -> None:
    args = request(tmp_path / "root")
    with reserved(tmp_path / "root"):
        made = operations.plan(args, nobody)
        assert made["plan"]["steps"][0]["action"] == "provision"
        before = len(looked)
        operations._planned(args)
        assert len(looked) == before + 1
