"""What a deploy ends with: the result as data, the acceptance report, and what can be done next."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from typing import Any

from toolkit.deploy.rollback import way_back
from toolkit.plan.steps import Plan
from toolkit.release.host import ServiceHost
from toolkit.release.request import Outcome


def summary(host: ServiceHost, plan: Plan, outcome: Outcome | None) -> dict[str, Any]:
    """The result of a deploy, JSON-safe."""
    current = host.store.current()
    return {
        "ok": outcome is None or outcome.status == "committed",
        "service": host.name,
        "release": None if current is None else current.id,
        "url": None if current is None else current.url,
        "plan": plan.to_json(),
        "outcome": None if outcome is None else outcome.to_json(),
        "acceptance": None if current is None else current.acceptance,
    }


def _other_budget(profile: dict[str, Any]) -> int:
    """A somewhat wider tree, as an example that has something to do."""
    budget: int = profile["speculative"]["budget"]
    return budget * 3 // 2


def next_lines(host: ServiceHost, *, changed: bool) -> list[str]:
    """Lines that tell how to query, look at, change and stop the service."""
    current = host.store.current()
    if current is None or not changed:
        return []
    unit, name = current.unit, host.name
    model = current.profile["model"]["served_name"]
    body = json.dumps({"model": model, "prompt": "def fibonacci(n):", "max_tokens": 48, "temperature": 0})
    program = "ddtoolkit" if shutil.which("ddtoolkit") else sys.argv[0]
    header = "-H 'Content-Type: application/json'"
    key = ' -H "Authorization: Bearer $API_KEY"' if "api-key" in unit.secrets else ""
    return [
        "",
        f"{name} serves at {unit.url} (release {current.id})",
        f"  query it   curl {unit.url}/v1/completions{key} {header} -d {shlex.quote(body)}",
        f"  look at it {program} status {name}; {program} logs -f {name}; {program} test {name}",
        f"  change it  {program} swap {name} --set speculative.budget={_other_budget(current.profile)}",
        f"  undo it    {program} rollback {name}; {program} history {name}"
        if way_back(host, current)
        else f"  past       {program} history {name}",
        f"  stop it    {program} stop {name}",
    ]
