"""The changes that are struck, and the states that they begin from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import hook
from tests.faults.bench import KEY, NAME, PYTHON, STATE, Bench, Result
from tests.faults.points import Moment, moments

SETS = (
    f"host.python={PYTHON}", "service.api_key.env=SERVER_KEY", "host.min_free_disk=1MiB",
    "service.load_timeout={limit}s", "acceptance.time_limit={limit}s", "service.keep_releases=2",
)  # fmt: skip
DEPLOY = ("deploy", "profile", NAME, *(word for item in SETS for word in ("--set", item)))


@dataclass(frozen=True)
class Scenario:
    """One change.

    Attributes:
        name: what it is called in results.
        base: snapshot that it begins from: `bare`, `provisioned` (nothing deployed yet) or `served`.
        arguments: the command.
        roles: whose moments are struck.
        outcome: how it ends undisturbed.
        again: the command that is given afterwards, for which there is little or nothing to do.
        since: only moments after this step of the transaction has begun.
    """

    name: str
    base: str
    arguments: tuple[str, ...]
    roles: Collection[str]
    outcome: str = "committed"
    again: tuple[str, ...] = ()
    since: str | None = None

    @property
    def repeat(self) -> tuple[str, ...]:
        """The command that is given afterwards."""
        return self.again or self.arguments


SWAP = ("swap", NAME, "--set", "speculative.budget=20", "--yes", "--json")
SCENARIOS = {
    item.name: item
    for item in (
        Scenario("provision", "bare", (*DEPLOY, "--yes", "--json"), ("control", "bootstrap", "ansible")),
        Scenario("deploy", "provisioned", (*DEPLOY, "--yes", "--json"), ("agent", "transaction")),
        Scenario("swap", "served", SWAP, ("control", "bootstrap", "agent", "transaction")),
        Scenario(
            "rollback", "served", ("rollback", NAME, "--yes", "--json"),
            ("control", "bootstrap", "agent", "transaction"), again=(*DEPLOY, "--yes", "--json"),
        ),
        Scenario(
            "refused", "served",
            ("swap", NAME, "--set", "acceptance.min_acceptance_length=7", "--yes", "--json"),
            ("transaction",), outcome="rolled_back", since="acceptance",
        ),
    )
}  # fmt: skip


def prepare(bench: Bench) -> None:
    """Make the snapshots of a bench.

    Raises:
        RuntimeError: a command failed.
    """
    bench.snapshot("bare")
    # Everything is done once, so that what is compiled and cached is there in every run.
    _done(bench.command(*DEPLOY, "--yes", "--json"))
    forget = f"systemctl disable -q --now ddtoolkit-{NAME}; rm -rf {STATE}/* /opt/ddtoolkit/envs/*; "
    forget += f"rm -rf /opt/ddtoolkit/services/{NAME}/current /opt/ddtoolkit/services/{NAME}/releases/*; "
    forget += "rm -rf /root/.local /etc/systemd/system/*ddtoolkit* /etc/systemd/system/*/ddtoolkit*; "
    forget += f"rm -rf /var/cache/ddtoolkit/{NAME}/* /var/cache/ddtoolkit/.build"
    bench.host.root(["sh", "-c", forget])
    bench.snapshot("provisioned")
    bench.reset("provisioned")
    _done(bench.command(*DEPLOY, "--yes", "--json"))
    _done(bench.command("swap", NAME, "--set", "speculative.budget=12", "--yes", "--json"))
    bench.snapshot("served")


def _done(result: Result) -> None:
    if result.code != 0:
        raise RuntimeError(f"exit status {result.code}: {result.err[-2000:]}")


def count(bench: Bench, scenario: Scenario) -> list[Moment]:
    """Run a scenario undisturbed; the moments at which it can be struck.

    Raises:
        RuntimeError: it did not end as it should.
    """
    bench.reset(scenario.base)
    arm(bench, None)
    trace = bench.folder / "trace"
    trace.unlink(missing_ok=True)
    (bench.folder / "counting").touch()
    bench.host.path(f"{hook.FOLDER}/counting").touch()
    try:
        result = bench.start(*scenario.arguments, plan={}).wait(120)
    finally:
        (bench.folder / "counting").unlink()
    wanted = {"committed": 0, "rolled_back": 5}[scenario.outcome]
    if result.code != wanted:
        raise RuntimeError(f"{scenario.name}: exit status {result.code}: {result.err[-2000:]}")
    lines = trace.read_text().splitlines()
    lines += bench.host.path(f"{hook.FOLDER}/trace").read_text().splitlines()
    found = moments(lines)
    if scenario.since is not None:
        begun = [index for index, moment in enumerate(found) if moment.step == scenario.since]
        found = found[begun[0] :]
    return [moment for moment in found if moment.role in scenario.roles]


def arm(bench: Bench, plan: dict[str, Any] | None) -> None:
    """Lay a plan ready on the host; with None its processes only count."""
    import json

    folder = bench.host.path(hook.FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan or {}))
    for name in ("reached", "go", "struck"):
        Path(folder / name).unlink(missing_ok=True)


__all__ = ["KEY", "SCENARIOS", "Scenario", "arm", "count", "prepare"]
