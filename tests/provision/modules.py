"""The roles' own Ansible modules, run in this process."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from toolkit.resources import bundled


def answer_of(
    capsys: pytest.CaptureFixture[str], role: str, name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """What a module of a role answers on this machine."""
    path = bundled("playbooks") / "roles" / role / "library" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    return dict(json.loads(capsys.readouterr().out))
