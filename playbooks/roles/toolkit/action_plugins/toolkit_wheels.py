"""Ansible action: brings wheels from the control machine to a host's store, through the host's connection.

The toolkit on the host answers what it lacks and checks what comes (`python -m toolkit.build.wheels`). Only
that is sent, in pieces, so that a run after a broken connection goes on within a file.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

CHECKSUMS = "SHA256SUMS"
PYTHON = "/usr/bin/python3"
PIECE = 32 << 20  # bytes, in memory on both sides
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
display = Display()


class ActionModule(ActionBase):
    """The action."""

    _requires_connection = True
    _VALID_ARGS = frozenset(("folder", "settings", "tool", "python"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Bring what is lacking; in check mode only tell."""
        result = super().run(tmp, task_vars)
        self._folder = Path(self._task.args["folder"]).expanduser()
        self._settings = {"root": None, **self._task.args["settings"]}
        absent = [
            name for name in ("engine", "lock", "environment", "min_free") if name not in self._settings
        ]
        if absent:
            raise AnsibleActionFail(f"toolkit_wheels lacks {', '.join(absent)}; render the settings anew")
        if self._task.check_mode and not self._remote_has_tool():
            return {**result, "changed": True, "msg": "nothing of the toolkit is there yet"}
        lock = self._lock()
        seen = self._ask(
            "look", {"lock": self._settings["lock"], "environment": self._settings["environment"]}
        )
        if seen["installed"]:
            return {**result, "changed": False, "msg": "the libraries are installed"}
        wheels = [item for item in self._wheels(lock) if suits(item[0], seen["python"], seen["machine"])]
        wanted = {
            "wheels": wheels,
            "unpacked": self._unpacked(wheels),
            "min_free": self._settings["min_free"],
        }
        lacking = dict(self._ask("plan", wanted)["lacking"])
        coming = [item for item in wheels if item[0] in lacking]
        if not self._task.check_mode:
            self._check(coming)
            lacking = dict(self._ask("begin", wanted)["lacking"])
            for wheel in coming:
                self._send(wheel, lacking.get(wheel[0], wheel[2]))
            end = self._ask("end", {"wheels": wheels, "engine": self._settings["engine"], "lock": lock})
            if end["again"]:
                raise AnsibleActionFail(f"{', '.join(end['again'])} came damaged; run the same command again")
        sent = sum(item[2] for item in coming)
        said = f"{len(coming)} of {len(wheels)} wheels, {sent >> 20} MiB"
        return {**result, "changed": bool(coming), "wheels": [item[0] for item in coming], "msg": said}

    def _lock(self) -> str:
        path = self._folder / f"{self._settings['engine']}.txt"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise AnsibleActionFail(f"{path}: {error.strerror}; ddtoolkit wheelhouse makes it") from error
        if hashlib.sha256(text.encode()).hexdigest() != self._settings["lock"]:
            mend = f"ddtoolkit wheelhouse --out {self._folder} --engine {self._settings['engine']}"
            raise AnsibleActionFail(f"{path} is not the lock of these settings; with their version: {mend}")
        return text

    def _wheels(self, lock: str) -> list[list[Any]]:
        """Name, SHA-256 and size of each wheel that the lock names."""
        hashes = set(_HASH.findall(lock))
        path = self._folder / CHECKSUMS
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            pairs = [
                (line[66:], line[:64]) for line in lines if line.endswith(".whl") and line[:64] in hashes
            ]
            return [[name, sha256, (self._folder / name).stat().st_size] for name, sha256 in pairs]
        except OSError as error:
            said = f"{error.filename}: {error.strerror}; nothing was sent"
            raise AnsibleActionFail(f"{said}; ddtoolkit wheelhouse --out {self._folder} mends it") from error

    def _unpacked(self, wheels: Sequence[Sequence[Any]]) -> int:
        total = 0
        for name, _, _ in wheels:
            try:
                with zipfile.ZipFile(self._folder / name) as packed:
                    total += sum(item.file_size for item in packed.infolist())
            except (OSError, zipfile.BadZipFile) as error:
                raise AnsibleActionFail(
                    f"{self._folder / name} is damaged: {error}; nothing was sent"
                ) from error
        return total

    def _check(self, wheels: Sequence[Sequence[Any]]) -> None:
        for name, sha256, _ in wheels:
            total = hashlib.sha256()
            with (self._folder / name).open("rb") as file:
                while piece := file.read(1 << 20):
                    total.update(piece)
            if total.hexdigest() != sha256:
                said = f"{self._folder / name} is damaged: its sha256 is not that of {CHECKSUMS}"
                mend = f"remove it, then: ddtoolkit wheelhouse --out {self._folder}"
                raise AnsibleActionFail(f"{said}; nothing was sent; {mend}")

    def _send(self, wheel: Sequence[Any], position: int) -> None:
        name, _, size = wheel
        with (self._folder / name).open("rb") as file:
            file.seek(position)
            while True:
                piece = file.read(PIECE)
                self._say(
                    [{"verb": "put", "wheel": list(wheel), "from": position, "count": len(piece)}], piece
                )
                position += len(piece)
                display.vv(f"{name}: {position} of {size} bytes", host=self._play_context.remote_addr)
                if not piece or position >= size:
                    return

    def _ask(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        answers = self._say([{"verb": verb, **fields}])
        found = next((answer[verb] for answer in answers if verb in answer), None)
        if found is None:
            raise AnsibleActionFail(f"the toolkit on the host gave no answer to {verb!r}: {answers[-1:]}")
        return found

    def _say(self, requests: Sequence[dict[str, Any]], data: bytes = b"") -> list[dict[str, Any]]:
        """What the toolkit on the host answers to requests, the last of which `data` follows."""
        root = self._settings["root"]
        lines = "".join(json.dumps({**request, "root": root}) + "\n" for request in requests)
        words = [str(self._task.args.get("python") or PYTHON), "-P", "-m", "toolkit.build.wheels"]
        tool = shlex.quote(str(self._task.args["tool"]))
        command = f"PYTHONPATH={tool} LC_ALL=C.UTF-8 {shlex.join(words)}"
        done = self._low_level_execute_command(command, in_data=lines.encode() + data)
        answers = [json.loads(line) for line in done["stdout"].splitlines() if line.startswith("{")]
        for answer in answers:
            if "error" in answer:
                hint = f"; next: {answer['hint']}" if answer.get("hint") else ""
                raise AnsibleActionFail(f"{answer['error']}{hint}")
        if done["rc"] != 0:
            said = (done.get("stderr") or done.get("stdout") or "").strip()[-500:]
            if done["rc"] == 255:
                raise AnsibleConnectionFailure(f"the connection broke: {said}")
            raise AnsibleActionFail(f"the toolkit on the host ended with {done['rc']}: {said}")
        return answers

    def _remote_has_tool(self) -> bool:
        path = shlex.quote(f"{self._task.args['tool']}/.complete")
        return self._low_level_execute_command(f"test -e {path}")["rc"] == 0


def suits(name: str, python: str, machine: str) -> bool:
    """Whether a wheel may be for that Python and machine, by its tags (PEP 425); pip has the last word."""
    interpreters, abis, platforms = (part.split(".") for part in name[: -len(".whl")].rsplit("-", 3)[1:])
    minor = int(python.partition(".")[2])
    place = any(item == "any" or item.endswith(f"_{machine}") for item in platforms)
    exact = {f"cp3{minor}", f"py3{minor}", "py3"}
    stable = "abi3" in abis and any(
        re.fullmatch(r"cp3\d+", item) and int(item[3:]) <= minor for item in interpreters
    )
    return place and (bool(exact & set(interpreters)) or stable)
