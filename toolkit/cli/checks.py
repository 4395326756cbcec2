"""test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolkit.cli.options import Json, LockWait, ServiceName, Verbose, Yes
from toolkit.cli.output import emit, say
from toolkit.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
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
    yes: Yes = False,
    lock_wait: LockWait = 0.0,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Run the acceptance checks against what serves; exit 1 when one fails."""
    from toolkit.acceptance.runner import run_acceptance
    from toolkit.acceptance.table import print_report

    if level == "full" and url is None:
        _full(name, lock_wait=lock_wait, yes=yes, verbose=verbose, as_json=as_json)
        return
    settings, keys = _settings(name, url, level, api_key_env)
    _require_answer(settings.url)
    say(f"testing {settings.url} ({settings.level})")

    def tell(event: dict[str, object]) -> None:
        if event.get("event") == "result":
            detail = f" - {event.get('detail')}" if event.get("detail") and verbose else ""
            say(f"  {event.get('name')}: {str(event.get('status')).replace('_', ' ')}{detail}")

    report = run_acceptance(settings, tell, keys=keys)
    print_report(report)
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


def _full(name: str | None, *, lock_wait: float, yes: bool, verbose: bool, as_json: bool) -> None:
    from toolkit.acceptance import load_report
    from toolkit.cli.progress import Lines, finish, show_report
    from toolkit.deploy.flow import full_test
    from toolkit.deploy.locate import find_service

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


def _require_answer(url: str) -> None:
    """Tell at once when nothing listens, instead of once a check."""
    import httpx

    try:
        httpx.get(url, timeout=10)
    except httpx.ConnectError as error:
        raise UnreachableError(
            f"{url}: nothing answers there: {error}", hint="ddtoolkit status; ddtoolkit start"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL):
        # Whatever else is wrong is for the checks to say.
        return


def _settings(
    name: str | None, url: str | None, level: Level | None, api_key_env: str | None
) -> tuple[Settings, dict[str, str]]:
    """What is to be tested, and the keys that are stored for it."""
    from toolkit.acceptance.settings import settings_for, settings_from_data
    from toolkit.deploy.locate import current_release, find_service
    from toolkit.profile.loading import profile_from_data
    from toolkit.service.secrets import serving_secrets

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
    release = current_release(find_service(name))
    keys = {key.replace("-", "_"): value for key, value in serving_secrets(release.unit).items()}
    return settings_for(profile_from_data(release.profile), release.unit.url, level=level), keys
