"""An acceptance program: sends requests and judges by whether each gave a token."""

import argparse
import json
import sys
import time
import urllib.request
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--settings", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--report")
parser.add_argument("--launch", action="append", default=[])
options = parser.parse_args()
settings = json.loads(Path(options.settings).read_text())
time.sleep(settings.get("sleep", 0))
if settings.get("crash"):
    raise RuntimeError("the acceptance program is broken")
reasons = list(settings.get("reasons", []))
marks = set()
try:
    for number in range(settings.get("requests", 3)):
        request = urllib.request.Request(
            settings["url"] + "/generate",
            json.dumps({"text": "a"}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=1) as answer:
            marks.add(json.load(answer)["text"])
        print(json.dumps({"message": f"request {number}"}), flush=True)
except OSError as error:
    reasons.append(f"no token: {error}")
for launch in options.launch:
    name, _, file = launch.partition("=")
    marks.add(f"{name}: {json.loads(Path(file).read_text())['marks'][0]}")
if options.report and not json.loads(Path(options.report).read_text())["marks"]:
    reasons.append("the report is empty")
report = {"verdict": "refused" if reasons else "accepted", "reasons": reasons, "marks": sorted(marks)}
Path(options.out).write_text(json.dumps(report))
sys.exit(1 if reasons else 0)
