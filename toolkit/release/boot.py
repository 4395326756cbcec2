"""After a reboot: finish or reverse interrupted transactions, and time experiments again.

`python -m toolkit.release.boot` is what `ddtoolkit-recover.service` runs, which is ordered before the
services. A recovery starts such a service and waits for it, so that unit must not wait for the recovery: it
starts it as a unit of its own (`--now`) and is done.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.release.controller import hold, unfinished
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.request import read_request
from toolkit.release.spawn import under_systemd
from toolkit.service import transient

_LOCK_WAIT = 600.0


def interrupted(layout: Layout) -> Iterator[ServiceHost]:
    """Services under systemd that have an unfinished transaction, or an experiment that nobody times."""
    try:
        names = sorted(path.name for path in layout.services.iterdir())
    except OSError:
        return
    for name in names:
        host = ServiceHost(layout, name)
        if not host.lock.transaction_running() and under_systemd(host, *_concerned(host)):
            yield host


def recover(layout: Layout) -> bool:
    """Recover every interrupted service, one after the other; whether none was left out.

    A service that someone else has locked is waited for: he recovers it too.
    """
    done = True
    for host in list(interrupted(layout)):
        try:
            with hold(layout, host.name, "recovery after a reboot", wait=_LOCK_WAIT) as session:
                outcome = session.recovered
        except ToolkitError as error:
            sys.stderr.write(f"{host.name}: {error.message}\n")
            done = False
        else:
            sys.stderr.write(
                f"{host.name}: {outcome.message if outcome else 'the experiment is timed again'}\n"
            )
    return done


def _concerned(host: ServiceHost) -> list[str | None]:
    """Ids of the releases that something is to be done about."""
    found: list[str | None] = []
    experiment = read_experiment(host.paths)
    if experiment is not None and not experiment.timed:
        found.append(experiment.release)
    if unfinished(host.paths.transaction):
        with contextlib.suppress(ToolkitError):
            request = read_request(host.paths.transaction)
            found += [request.release, request.base]
    return found


def main() -> int:
    """Start the recovery where there is something to recover; with `--now`, be the recovery."""
    parser = argparse.ArgumentParser(prog="toolkit.release.boot")
    parser.add_argument("--now", action="store_true", help="recover, instead of starting a unit that does")
    layout = Layout()
    if parser.parse_args().now:
        return 0 if recover(layout) else 1
    if not any(True for _ in interrupted(layout)):
        return 0
    why = transient.start_program("ddtoolkit-recover", "ddtoolkit recovery", "toolkit.release.boot", "--now")
    if why:
        sys.stderr.write(f"the recovery cannot be started: {why}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
