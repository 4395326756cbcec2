"""Starting the server that hands a checkpoint out, and running it."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolkit.errors import ToolkitError
from toolkit.files import replace_file
from toolkit.service.detached import may_detach
from toolkit.service.transient import start_program
from toolkit.weights.origins import Peer
from toolkit.weights.pace import Tell
from toolkit.weights.request import RUN, wish_of
from toolkit.weights.serve import Seed
from toolkit.weights.store import damage, shortened
from toolkit.weights.web import BROKEN, Web

_MODULE = "toolkit.weights"
_START_LIMIT = 20.0


def seed(request: Mapping[str, Any], _: Tell) -> dict[str, Any]:
    """Begin to hand out a checkpoint; it ends by itself when nobody fetches any more."""
    wish = wish_of(request)
    if damage(wish.folder):
        raise ToolkitError(
            f"{wish.folder} cannot be handed out: {shortened(damage(wish.folder))}",
            hint="name another host to fetch it from: --seed HOST",
        )
    wish.layout.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = RUN if may_detach() else wish.layout.state
    with tempfile.TemporaryDirectory(prefix="ddtoolkit-seed-", dir=place) as folder:
        asked, ready = Path(folder) / "request", Path(folder) / "ready"
        replace_file(asked, json.dumps(dict(request)).encode())
        return _started(f"ddtoolkit-seed-{wish.unit}", asked, ready)


def unseed(request: Mapping[str, Any], _: Tell) -> dict[str, Any]:
    """End what `seed` began; whoever has the transfer's token may."""
    peer = Peer(**request["peer"])
    url = f"https://127.0.0.1:{urlsplit(peer.url).port}/"
    try:
        with Web(token=peer.token, certificate=peer.certificate).open(url, method="DELETE"):
            return {"changed": True}
    except (*BROKEN, ToolkitError):
        return {"changed": False}  # it has ended


def _started(unit: str, asked: Path, ready: Path) -> dict[str, Any]:
    """Start the server, in a unit of its own where there is systemd, and wait until it listens."""
    words = ["--serve", str(asked), str(ready)]
    if may_detach():
        if why := start_program(unit, "ddtoolkit: handing out a checkpoint", _MODULE, *words):
            raise ToolkitError(f"{unit} cannot be started: {why}")
    else:
        subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    end = time.monotonic() + _START_LIMIT
    while time.monotonic() < end:
        if ready.is_file():
            answer: dict[str, Any] = json.loads(ready.read_bytes())
            if "error" in answer:
                raise ToolkitError(answer["error"], hint=answer.get("hint"))
            return {"changed": True, **answer}
        time.sleep(0.05)
    raise ToolkitError(
        "the server that hands out the checkpoint does not start", hint=f"journalctl -u '{unit}*'"
    )


def serve(asked: Path, ready: Path) -> None:
    """What `seed` has a unit do: hand out a checkpoint until nobody fetches any more."""
    request = json.loads(asked.read_bytes())
    asked.unlink()
    wish, grant = wish_of(request), request["grant"]
    try:
        server = Seed(
            wish.folder,
            address=str(grant.get("bind") or ""),
            port=int(grant.get("port") or 0),
            token=str(grant["token"]),
            context=_context(str(grant["certificate"]), str(grant["key"])),
            rate=wish.terms.rate,
            idle=float(grant["idle"]),
        )
    except ToolkitError as error:
        replace_file(ready, json.dumps({"error": error.message, "hint": error.hint}).encode())
        return
    with server:
        replace_file(ready, json.dumps({"port": server.server_port, "pid": os.getpid()}).encode())
        server.serve_forever()


def _context(certificate: str, key: str) -> ssl.SSLContext:
    """A server's TLS context; OpenSSL reads keys from files only, and this one is in memory."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    with os.fdopen(fd, "wb") as file:
        file.write(f"{certificate}\n{key}".encode())
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    return context
