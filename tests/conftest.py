"""What holds for every test."""

import os
from pathlib import Path

import pytest

# Triton decides when it is first imported, by whichever test comes first, whether kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Folders whose tests share something costly: a deployed service, a running server.
_TOGETHER = ("deploy", "ddtree/server")
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share fixtures on one worker, where several run side by side."""
    for item in items:
        path = item.path.relative_to(_HERE).as_posix()
        group = next((folder for folder in _TOGETHER if path.startswith(f"{folder}/")), path)
        item.add_marker(pytest.mark.xdist_group(group))
