"""test on the hosts of an inventory: on each against its own bind address, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cli import fleet
from toolkit.cli.board import Board
from toolkit.cli.output import answer, emit, say, table
from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from toolkit.fleet.results import HostResult


def test_hosts(
    name: str | None,
    where: fleet.Where,
    manner: fleet.Manner,
    *,
    out: Path | None,
    picture: Path | None,
) -> None:
    """Run the checks on all hosts that carry the service, at the same time.

    Args:
        name: the service; None for the only one that the hosts carry.
        where: which hosts.
        manner: how it is shown.
        out: file that keeps the reports, a JSON object by host.
        picture: file for the picture of the report, of one host.

    Raises:
        ConfigError: it is not said which service, no host carries it, or a picture is asked for of several.
        Exit: with the worst of the hosts; 1 where one was refused.
    """
    found = fleet.begin_listing(where)
    from toolkit.fleet.connections import Connections
    from toolkit.fleet.many import at_once
    from toolkit.fleet.results import to_json

    service = fleet.service_of(name, where, found)
    hosts = fleet.carrying(found(), where, service)
    if picture is not None and len(hosts) > 1:
        raise ConfigError(
            f"--picture draws one report, and {len(hosts)} hosts match", hint="add --limit HOST"
        )
    names = [host.name for host in hosts]
    with Connections(hosts) as connections, Board(names, verbose=manner.verbose) as board:

        def one(host: str) -> Any:
            tell = partial(board.tell, host)
            report = connections.call(host, "test", {"service": service}, tell)
            board.done(host, report["verdict"])
            return report

        results = at_once(names, one, limit=where.parallel, grade=_grade)
    if out is not None:
        from toolkit.acceptance.report import write_json

        write_json(out, {item.host: item.value for item in results if item.value is not None})
    if picture is not None and results[0].value is not None:
        from toolkit.acceptance.picture import draw
        from toolkit.acceptance.report import report_from_json

        draw(report_from_json(results[0].value), picture)
    if manner.as_json:
        emit(to_json(results))
    else:
        _show(results)
    fleet.finish_looking(results)


def _grade(report: Any) -> int:
    return 0 if report["verdict"] == "accepted" else 1


def _show(results: Sequence[HostResult]) -> None:
    rows = table("host", "result", "acceptance length", "chain", "tokens/s", "not passed", whole=("host",))
    for item in results:
        if item.value is None:
            rows.add_row(item.host, "not tested", "", "", "", "")
            continue
        report = item.value
        lengths, speed = report["acceptance_length"], report["tokens_per_second"]
        others = [check for check in report["checks"] if check["status"] != "passed"]
        rows.add_row(
            item.host,
            report["verdict"],
            _length(lengths.get("tree")),
            _length(lengths.get("chain")),
            "" if speed is None else f"{speed:.0f}",
            ", ".join(f"{check['name']} {check['status'].replace('_', ' ')}" for check in others),
        )
    answer(rows)
    for item in results:
        for reason in (item.value or {}).get("reasons", ()):
            say(f"{item.host}: {reason}")


def _length(found: dict[str, Any] | None) -> str:
    return "" if not found else f"{found['value']:.2f}"
