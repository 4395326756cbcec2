"""The real command, in a home of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ddtoolkit(tmp_path: Path) -> Command:
    """Run `ddtoolkit ARGUMENTS` in an empty folder with an empty home."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("DDTOOLKIT_", "XDG_"))
    }
    environment |= {"HOME": str(home), "COLUMNS": "120"}

    def run(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
        program = Path(sys.executable).with_name("ddtoolkit")
        settings = {"env": environment, "cwd": tmp_path, "timeout": 120, **options}
        return subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            **settings,
        )

    return run
