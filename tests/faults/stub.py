"""Stands in for the engine on a test host: server, build and acceptance, each by its contract. Quick.

`/generate` answers with the id of the release that the server was started for, so that a token tells whose it
is.
"""

import json
import os
import socket
import sys
import threading
import urllib.request
from pathlib import Path


def _option(argv, name, default=None):
    return argv[argv.index(name) + 1] if name in argv else default


def build(argv):
    """What `toolkit.ddtree.build` reports."""
    Path(_option(argv, "--out")).write_text(json.dumps({"stub": True, "tuned": {"threads": 1}}))
    return 0


def accept(argv):
    """Three tokens decide; a wanted acceptance length above 6 is refused."""
    settings = json.loads(Path(_option(argv, "--settings")).read_text())
    key = os.environ.get("DDTOOLKIT_API_KEY", "")
    reasons = []
    try:
        for _ in range(3):
            request = urllib.request.Request(
                settings["url"] + "/generate",
                b'{"text": "a"}',
                {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
            )
            with urllib.request.urlopen(request, timeout=20) as answer:
                json.load(answer)["output_ids"][0]
    except OSError as error:
        reasons.append(f"no token: {error}")
    if '"min_acceptance_length": 7' in json.dumps(settings):
        reasons.append("acceptance_length: 4.0 is below 7")
    report = {"verdict": "refused" if reasons else "accepted", "reasons": reasons}
    out = Path(_option(argv, "--out"))
    written = out.with_name(f".{out.name}.stub")
    try:
        written.write_text(json.dumps(report))
    except OSError as error:
        written.unlink(missing_ok=True)
        sys.stderr.write(f"{error}\n")
        return 2
    written.replace(out)
    return 1 if reasons else 0


def serve(argv):
    """`/health`, `/server_info` and `/generate` with one token."""
    if "--version" in argv:
        return 0
    release = os.environ["DDTOOLKIT_RELEASE"]
    key = None
    if config := _option(argv, "--config"):
        text = Path(config).read_text()
        key = json.loads(text.partition('"api-key": ')[2].partition("\n")[0])
    with socket.create_server(("127.0.0.1", int(_option(argv, "--port")))) as listener:
        sys.stdout.write(f"serving {release}\n")
        sys.stdout.flush()
        while True:
            connection = listener.accept()[0]
            threading.Thread(target=_talk, args=(connection, release, key), daemon=True).start()


def _talk(connection, release, key):
    with connection:
        data = b""
        while b"\r\n\r\n" not in data:
            block = connection.recv(65536)
            if not block:
                return
            data += block
        head, _, body = data.partition(b"\r\n\r\n")
        text = head.decode("latin-1")
        length = int(text.lower().partition("content-length:")[2].partition("\r\n")[0] or 0)
        while len(body) < length:
            body += connection.recv(65536)
        status, value = _answer(text, release, key)
        sent = json.dumps(value).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(sent)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + sent)


def _answer(head, release, key):
    if head.startswith("GET /health"):
        return "200 OK", {}
    if key is not None and f"authorization: bearer {key}".lower() not in head.lower():
        return "401 Unauthorized", {"error": "no key"}
    if head.startswith("GET"):
        return "200 OK", {"internal_states": [{"avg_spec_accept_length": 4.0, "num_running_reqs": 0}]}
    return "200 OK", {"output_ids": [7], "text": release, "meta_info": {"completion_tokens": 1}}
