"""A server with SGLang's /health and /generate that can misbehave in the ways a real one does."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument(
    "--load", type=float, default=0.0, help="seconds until tokens come; /health answers before"
)
parser.add_argument("--exit-at-once", type=int)
parser.add_argument("--exit-after", type=float, help="seconds until it ends with status 9")
parser.add_argument("--die-after", type=int, help="requests answered before it is killed by SIGABRT")
parser.add_argument("--hang-after", type=int, help="requests answered before it answers no more")
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--grandchild", choices=["group", "session"])
parser.add_argument("--key", help="wanted bearer token, or the YAML file of --config that has it")
parser.add_argument("--config")
parser.add_argument("--mark", default="")
options = parser.parse_args()

if options.exit_at_once is not None:
    sys.stderr.write(f"cannot load the model: {options.mark or 'no such file'}\n")
    sys.exit(options.exit_at_once)
if options.ignore_term:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.grandchild:
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = ignore + "; print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdout=subprocess.PIPE,
        start_new_session=options.grandchild == "session",
    )
    child.stdout.readline()
    print(f"grandchild {child.pid}", flush=True)
if options.exit_after is not None:
    threading.Timer(options.exit_after, lambda: os._exit(9)).start()

key = options.key
if options.config:
    key = json.loads(Path(options.config).read_text().partition('"api-key": ')[2].partition("\n")[0])
begin = time.monotonic()
requests = count(1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(200, {"mark": options.mark})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
            return self.answer(401, {"error": "no key"})
        if time.monotonic() - begin < options.load:
            return self.answer(503, {"error": "loading"})
        answered = next(requests)
        if options.die_after is not None and answered > options.die_after:
            os.abort()
        if options.hang_after is not None and answered > options.hang_after:
            time.sleep(60)
        return self.answer(
            200, {"output_ids": [7], "text": options.mark, "meta_info": {"completion_tokens": 1}}
        )

    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


print(f"serving {options.mark}", flush=True)
server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
server.daemon_threads = True
server.serve_forever()
