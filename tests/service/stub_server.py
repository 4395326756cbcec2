"""A server with SGLang's /health and /generate that can misbehave in the ways a real one does.

Speaks just enough HTTP over a bare socket: it starts in a fraction of the time that http.server takes.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import count

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument(
    "--load", type=float, default=0.0, help="seconds until tokens come; /health answers before"
)
parser.add_argument("--bind-after", type=float, default=0.0, help="seconds until it takes its port")
parser.add_argument("--exit-at-once", type=int, help="status to end with")
parser.add_argument("--exit-after", type=float, help="seconds until it ends with status 9")
parser.add_argument("--exit-when", help="file that is removed when it comes; then it ends with status 9")
parser.add_argument("--die-after", type=int, help="requests answered before it is killed by SIGABRT")
parser.add_argument("--hang-after", type=int, help="requests answered before it answers no more")
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--grandchild", choices=["group", "session"])
parser.add_argument("--config", help="YAML file with the wanted api-key")
parser.add_argument("--chatter", type=int, default=0, help="bytes of output a request")
parser.add_argument("--mark", default="")
options = parser.parse_args()

if options.exit_at_once is not None:
    sys.stderr.write(f"cannot load the model: {options.mark or 'no such file'}\n")
    sys.exit(options.exit_at_once)
if options.ignore_term:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.grandchild:
    code = "trap '' TERM; echo up; exec sleep 60"
    child = subprocess.Popen(
        ["/bin/sh", "-c", code],
        stdout=subprocess.PIPE,
        start_new_session=options.grandchild == "session",
    )
    child.stdout.readline()
    print(f"grandchild {child.pid}", flush=True)
if options.exit_after is not None:
    threading.Timer(options.exit_after, lambda: os._exit(9)).start()


def exit_when(path):
    while not os.path.exists(path):  # noqa: PTH110
        time.sleep(0.02)
    os.remove(path)  # noqa: PTH107
    os._exit(9)


if options.exit_when is not None:
    threading.Thread(target=exit_when, args=(options.exit_when,), daemon=True).start()

key = None
if options.config:
    with open(options.config) as file:  # noqa: PTH123 - pathlib costs time at every start
        key = json.loads(file.read().partition('"api-key": ')[2].partition("\n")[0])
begin = time.monotonic()
requests = count(1)


def answer(head):
    if head.startswith("GET"):
        return "200 OK", {"mark": options.mark}
    if key is not None and f"Authorization: Bearer {key}\r\n" not in head:
        return "401 Unauthorized", {"error": "no key"}
    if time.monotonic() - begin < options.load:
        return "503 Service Unavailable", {"error": "loading"}
    answered = next(requests)
    if options.die_after is not None and answered > options.die_after:
        os.abort()
    if options.hang_after is not None and answered > options.hang_after:
        time.sleep(60)
    if options.chatter:
        print("x" * options.chatter, flush=True)
    return "200 OK", {"output_ids": [7], "text": options.mark, "meta_info": {"completion_tokens": 1}}


def serve(connection):
    with connection:
        data = b""
        while b"\r\n\r\n" not in data:
            block = connection.recv(65536)
            if not block:
                return
            data += block
        head, _, body = data.partition(b"\r\n\r\n")
        head = head.decode("latin-1") + "\r\n"
        length = int(head.lower().partition("content-length:")[2].partition("\r\n")[0] or 0)
        while len(body) < length:
            body += connection.recv(65536)
        status, value = answer(head)
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + data)


time.sleep(options.bind_after)
print(f"serving {options.mark}", flush=True)
with socket.create_server(("127.0.0.1", options.port)) as listener:
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
