"""`python -m toolkit.provision.child`: one ansible-runner run in a process of its own.

ansible-runner hands its whole environment to Ansible, so it is started with only what the caller allows.
Standard input: one JSON object with `playbook`, `project`, `inventory`, `settings`, `extra_vars`, `timeout`
and `idle_timeout` (seconds), for hosts other than this one `limit` and `become`, and `check` where nothing is
to be changed. Standard output: one JSON object a line, first the tasks as they end (`task`, `host`,
`outcome`, `message`, `diff`), last
`{"status": ..., "hosts": {...}}`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from toolkit.provision.differences import diff_text

_OUTCOMES = {
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
    "runner_on_skipped": "skipped",
}


def _emit(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _on_event(event: dict[str, Any]) -> bool:
    data = event.get("event_data") or {}
    outcome = _OUTCOMES.get(event.get("event", ""))
    if outcome is not None and not data.get("ignore_errors"):
        result = data.get("res") or {}
        if outcome == "ok" and result.get("changed"):
            outcome = "changed"
        _emit(
            {
                "task": data.get("task", ""),
                "host": data.get("host", ""),
                "outcome": outcome,
                "message": message_of(result, outcome),
                "diff": diff_text(result) if outcome == "changed" else "",
            }
        )
    return False


def message_of(result: dict[str, Any], outcome: str) -> str:
    """What Ansible says of a task; where a module gave no result, also what came in its place, as of sudo."""
    said = [str(result.get("msg") or (outcome != "ok" and result.get("stderr")) or ""), _in_its_place(result)]
    gathered = (result.get("failed_modules") or {}).values()
    said += [_in_its_place(failed) or _line(failed.get("msg")) for failed in gathered]
    return " ".join(filter(None, said))


def _in_its_place(result: dict[str, Any]) -> str:
    return _line(result.get("module_stderr") or result.get("module_stdout"))


def _line(words: Any) -> str:
    return " ".join(str(words or "").split())[:500]


def _options(request: dict[str, Any]) -> list[str]:
    become = ["--become"] if request.get("become") else []
    return [*become, "--check", "--diff"] if request.get("check") else become


def main() -> None:
    """Run the playbook that standard input names."""
    import ansible_runner

    request = json.load(sys.stdin)
    # ansible-runner never overwrites what its folder already holds, so the folder is always a fresh one.
    private = Path(tempfile.mkdtemp(prefix="ddtoolkit-ansible-"))
    try:
        settings_file = private / "settings.json"
        settings_file.write_text(json.dumps(request["settings"]), encoding="utf-8")
        result = ansible_runner.run(
            private_data_dir=str(private),
            project_dir=request["project"],
            playbook=request["playbook"],
            inventory=request["inventory"],
            limit=request.get("limit"),
            cmdline=" ".join(_options(request)) or None,
            extravars={**request["extra_vars"], "ddtoolkit_settings_file": str(settings_file)},
            envvars={"ANSIBLE_HOST_KEY_CHECKING": "True"},
            settings={"job_timeout": request["timeout"], "idle_timeout": request["idle_timeout"]},
            event_handler=_on_event,
            quiet=True,
        )
        output = result.stdout.read() if result.status != "successful" else ""
        _emit({"status": result.status, "stats": result.stats or {}, "output": output[-4000:]})
    finally:
        shutil.rmtree(private, ignore_errors=True)


if __name__ == "__main__":
    main()
