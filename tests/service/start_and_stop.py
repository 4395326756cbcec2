"""Starts a release and stops it again, or dies with its whole process group in between."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from toolkit.layout import Layout
from toolkit.service.process import ProcessManager

manager = ProcessManager(Layout(Path(sys.argv[1])).service("stub"))
manager.start(Path(sys.argv[2]))
if "--and-die" in sys.argv:
    os.killpg(0, signal.SIGKILL)
time.sleep(0.3)
report = manager.stop()
print(
    json.dumps(
        {
            "clean": report.clean,
            "words": report.describe(),
            "leftovers": [[item.pid, item.name] for item in report.leftovers],
            "state": manager.status().state,
        }
    )
)
