"""test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolkit.cli import fleet
from toolkit.cli.options import (
    Batch,
    Inventories,
    Json,
    Limit,
    LockWait,
    Parallel,
    ServiceName,
    Verbose,
    Yes,
)
from toolkit.cli.output import emit, say
from toolkit.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
    from toolkit.acceptance import Report
    from toolkit.acceptance.settings import Settings

Level = Literal["quick", "full"]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("test")(run_test)


def run_test(
    name: ServiceName = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Any OpenAI-compatible server, whoever deployed it.")
    ] = None,
    level: Annotated[
        Level | None, typer.Option("--level", help="full also restarts the service as DFLASH and as a chain.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option("--api-key-env", metavar="NAME", help="Variable that has the server's API key."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.png", help="Draw the report.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Keep the report as JSON.")
    ] = None,
    inventory: Inventories = None,
    limit: Limit = None,
    batch: Batch = 1,
    parallel: Parallel = 8,
    yes: Yes = False,
    lock_wait: LockWait = 0.0,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Run the acceptance checks against what serves, here or on hosts; exit 1 when one fails."""
    for place in (out, picture):
        _require_place(place)
    where = fleet.where(inventory, limit, batch=batch, parallel=parallel)
    if where is not None:
        _refuse_beside_inventory(url, api_key_env)
        manner = fleet.Manner(yes, verbose, as_json, lock_wait)
        _on_hosts(name, where, manner, full=level == "full", out=out, picture=picture)
        return
    if level == "full" and url is None:
        _full(name, lock_wait=lock_wait, yes=yes, verbose=verbose, as_json=as_json)
        return
    settings, keys = _settings(name, url, level, api_key_env)
    _require_answer(settings.url, hint=_to_serve(name) if url is None else _to_reach(url))
    say(f"testing {settings.url} ({settings.level})")
    report = _judge(settings, keys, verbose=verbose)
    if out is not None:
        from toolkit.acceptance.report import write_json

        write_json(out, report.to_json())
    if picture is not None:
        from toolkit.acceptance.picture import draw

        draw(report, picture)
    if as_json:
        emit(report.to_json())
    if not report.accepted:
        raise typer.Exit(1)


def _judge(settings: Settings, keys: dict[str, str], *, verbose: bool) -> Report:
    from toolkit.acceptance.runner import run_acceptance
    from toolkit.acceptance.table import print_report

    def tell(event: dict[str, object]) -> None:
        if event.get("event") == "result":
            detail = f" - {event.get('detail')}" if event.get("detail") and verbose else ""
            say(f"  {event.get('name')}: {str(event.get('status')).replace('_', ' ')}{detail}")

    report = run_acceptance(settings, tell, keys=keys)
    print_report(report)
    return report


def _on_hosts(
    name: str | None,
    where: fleet.Where,
    manner: fleet.Manner,
    *,
    full: bool,
    out: Path | None,
    picture: Path | None,
) -> None:
    if not full:
        from toolkit.cli.host_tests import test_hosts

        test_hosts(name, where, manner, out=out, picture=picture)
    elif out is not None or picture is not None:
        raise ConfigError(
            "--level full on hosts keeps its report there",
            hint="without --out and --picture; --json has it",
        )
    else:
        fleet.full_test(name, where, manner)


def _require_place(path: Path | None) -> None:
    """Refuse before the checks, which take minutes, what their report could not be written to."""
    if path is None:
        return
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: no file can be written there", hint="name a file in a folder that exists")


def _to_serve(name: str | None) -> str:
    """What helps where a service of this machine does not answer."""
    service = "" if name is None else f" {name}"
    return f"ddtoolkit status{service}; then: ddtoolkit start{service}"


def _to_reach(url: str) -> str:
    """What helps where a server that this tool knows nothing of does not answer."""
    return f"is it started, and reachable from here? curl {url.rstrip('/')}/v1/models"


def _full(name: str | None, *, lock_wait: float, yes: bool, verbose: bool, as_json: bool) -> None:
    from toolkit.acceptance import load_report
    from toolkit.cli.progress import Lines, finish, show_report
    from toolkit.deploy.testing import full_test
    from toolkit.release.locate import find_service

    service = find_service(name)
    if as_json and not yes:
        raise ConfigError(
            "--level full restarts the service; --json does so only with --yes", hint="add --yes"
        )
    say(f"testing {service.name} (full): it is restarted three times, as DFLASH, as a chain, and as it is")
    outcome = full_test(service, Lines(verbose=verbose).watcher(), lock_wait=lock_wait)
    show_report(outcome)
    if as_json:
        report = None if outcome.report is None else load_report(Path(outcome.report)).to_json()
        emit({"ok": outcome.exit_code == 0, "outcome": outcome.to_json(), "report": report})
    finish(outcome)


def _refuse_beside_inventory(url: str | None, api_key_env: str | None) -> None:
    if url is not None:
        raise ConfigError(
            "--url tests one server from here, -i the service on its hosts", hint="give one of them"
        )
    if api_key_env is not None:
        raise ConfigError(
            "--api-key-env goes with --url", hint="a host's service is tested with its own keys"
        )


def _require_answer(url: str, *, hint: str) -> None:
    """Tell at once when nothing listens, instead of once a check."""
    import httpx

    from toolkit.acceptance.line import Line

    try:
        with Line() as line, line.stream("GET", url, seconds=10):
            pass
    except httpx.ConnectError as error:
        raise UnreachableError(f"{url}: nothing answers there: {error}", hint=hint) from None
    except (httpx.HTTPError, httpx.InvalidURL):
        # Whatever else is wrong is for the checks to say.
        return


def _settings(
    name: str | None, url: str | None, level: Level | None, api_key_env: str | None
) -> tuple[Settings, dict[str, str]]:
    """What is to be tested, and the keys that are stored for it."""
    from toolkit.acceptance.settings import settings_from_data
    from toolkit.deploy.testing import require_own_server, settings_of
    from toolkit.release.locate import find_service

    if url is not None:
        if name is not None:
            raise ConfigError("give a service or --url, not both")
        if level == "full":
            raise ConfigError("--level full swaps the server's config, which needs a service deployed here")
        data: dict[str, object] = {"url": url}
        if api_key_env is not None:
            if api_key_env not in os.environ:
                raise ConfigError(f"--api-key-env: the variable {api_key_env} is not set")
            data["api_key"] = {"env": api_key_env}
        return settings_from_data(data, source="--url"), {}
    service = find_service(name)
    require_own_server(service)
    return settings_of(service, level)
