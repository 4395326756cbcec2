"""Ends an experiment: `python -m toolkit.release.timer NAME [--root FOLDER]`, detached.

It waits until the time is over, and goes away as soon as the record names another experiment or none. The
return is a transaction like any other; while someone else holds the lock it waits.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import LockedError, ToolkitError
from toolkit.layout import Layout
from toolkit.profile.changes import Change
from toolkit.profile.loading import differences
from toolkit.release.controller import begin, follow, hold
from toolkit.release.experiment import Experiment, read_experiment, set_timer
from toolkit.release.host import ServiceHost
from toolkit.release.request import Request
from toolkit.service.detach import detach
from toolkit.service.processes import identify

_POLL = 1.0
_RETRY = 600.0
_COMMAND = "end of the experiment"


def _same(host: ServiceHost, experiment: Experiment) -> Experiment | None:
    """The record of this experiment as it is now; None where it names another or is gone."""
    now = read_experiment(host.paths)
    if now is None or (now.release, now.started) != (experiment.release, experiment.started):
        return None
    return now


def _wait(host: ServiceHost, begun: Callable[[], None]) -> None:
    """Body of the detached process."""
    me = identify(os.getpid())
    experiment = read_experiment(host.paths)
    if experiment is None or me is None:
        raise ToolkitError("no experiment is recorded")
    experiment = set_timer(host.paths, experiment, me)
    begun()
    # Read anew each time: it may be prolonged.
    while (now := _same(host, experiment)) is not None:
        if now.remaining > 0:
            time.sleep(min(now.remaining, _POLL))
            continue
        time.sleep(_return(host, now))


def _return(host: ServiceHost, experiment: Experiment) -> float:
    """Return to the base unless someone else is at work; seconds until the next look at the record."""
    try:
        with hold(host.layout, host.name, _COMMAND, keep_timer=True):
            now = _same(host, experiment)
            if now is None or now.remaining > 0:
                return 0.0
            request = Request(
                kind="return",
                who=experiment.who,
                command=_COMMAND,
                release=experiment.base,
                base=experiment.release,
                changes=_changes(host, experiment),
                keep_releases=experiment.keep_releases,
            )
            folder = begin(host.layout, host.name, request)
            for _ in follow(folder):
                pass
    except LockedError:
        return _POLL
    except ToolkitError:
        return _RETRY
    # The record is gone, unless the base was refused before anything was touched.
    return _RETRY if _same(host, experiment) else 0.0


def _changes(host: ServiceHost, experiment: Experiment) -> tuple[Change, ...]:
    """What the return takes back, for the history."""
    try:
        tried, base = (host.store.get(item).profile for item in (experiment.release, experiment.base))
    except ToolkitError:
        return ()  # damaged: the transaction says so
    return tuple(differences(tried, base))


def main() -> int:
    """Start the detached process; exit status 0 once it is on record."""
    parser = argparse.ArgumentParser(prog="toolkit.release.timer")
    parser.add_argument("name", help="name of the service")
    parser.add_argument("--root", type=Path, help="root of a layout for local use")
    options = parser.parse_args()
    host = ServiceHost(Layout(options.root), options.name)
    if why := detach(lambda begun: _wait(host, begun)):
        sys.stderr.write(why)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
