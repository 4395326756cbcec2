"""An acceptance program: sends requests and judges by whether each gave a token."""

import argparse
import json
import sys
import time
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("--settings", required=True)
parser.add_argument("--out", required=True)
options = parser.parse_args()
with open(options.settings) as file:
    settings = json.load(file)
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
with open(options.out, "w") as file:
    json.dump(
        {"verdict": "refused" if reasons else "accepted", "reasons": reasons, "marks": sorted(marks)}, file
    )
sys.exit(1 if reasons else 0)
