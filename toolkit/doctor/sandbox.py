"""Looking at the host from within the unit's sandbox: a short unit with the same properties.

Hardening can hide the GPU, and limits of a login shell are not those of a service.
"""

from __future__ import annotations

import json
import pwd
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.doctor import probe
from toolkit.doctor.programs import ask
from toolkit.layout import PYTHON

_LIMIT = 20.0
_STAND_IN = "nobody"


def _python() -> str:
    """The distribution's interpreter: the one that runs this may lie where the sandbox does not reach."""
    return PYTHON if Path(PYTHON).exists() else sys.executable


def _object(text: str) -> dict[str, Any] | None:
    """The probe's answer; None for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def user_for(name: str) -> str:
    """The service's user, or who stands in until it is made: any other without rights sees the same."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return _STAND_IN
    return name


def look(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What the probe saw inside.

    Args:
        wanted: `properties` of the unit (`Key=value`), its `environment`, its `user`, and `probe`: what the
            probe is asked.

    Returns:
        `user` it ran as, `seen` (the probe's answer, None without one) and `why` there is none.
    """
    user = user_for(wanted["user"])
    name = f"ddtoolkit-doctor.{secrets.token_hex(4)}.service"
    words = ["systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--no-ask-password", f"--unit={name}"]
    words += [f"--property={item}" for item in (*wanted["properties"], f"User={user}")]
    words += [f"--property=RuntimeMaxSec={_LIMIT:g}", "--property=TimeoutStopSec=1"]
    words += [f"--setenv={key}={value}" for key, value in wanted["environment"].items()]
    text = Path(probe.__file__).read_text(encoding="utf-8")
    words += ["--", _python(), "-I", "-S", "-c", text, json.dumps(wanted["probe"])]
    answer = ask(words, _LIMIT + 5)
    seen = _object(answer["out"])
    if seen is None:
        why = {"missing": "there is no systemd-run", "slow": f"it did not end within {_LIMIT:g} s"}
        said = " ".join(answer["err"].split())[-500:] or f"status {answer['status']}"
        return {"user": user, "seen": None, "why": why.get(answer["why"], said)}
    return {"user": user, "seen": seen, "why": ""}
