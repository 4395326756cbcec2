"""validate, profiles list | show | schema, render."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolkit.cli import fleet
from toolkit.cli.options import Inventories, Json, Limit, Overlays, ProfileName, Sets
from toolkit.cli.output import answer, emit, say, table, tell_doubts
from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from toolkit.profile.memory.estimate import Estimate
    from toolkit.profile.schema import Profile

_SYSTEMD = 255  # of Ubuntu 24.04

profiles_app = typer.Typer(
    help="List profiles, show one, print the schema.", no_args_is_help=True, rich_markup_mode=None
)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("validate")(validate)
    app.add_typer(profiles_app, name="profiles")
    app.command("render")(render)


def validate(name: ProfileName, overlays: Overlays = None, sets: Sets = None, as_json: Json = False) -> None:
    """Check a profile; every problem is shown with file, line, column and key."""
    from toolkit.profile.loading import load_profile
    from toolkit.profile.memory.layouts import as_json as memory_json
    from toolkit.profile.memory.layouts import layouts

    resolved = load_profile(name, overlays=overlays or (), sets=sets or ())
    tell_doubts(resolved)
    own = layouts(resolved.profile)[:1]
    if as_json:
        emit(
            {
                "ok": True,
                "name": resolved.profile.name,
                "warnings": [str(item) for item in resolved.warnings],
                "overrides": [item.to_json() for item in resolved.overrides],
                "memory": memory_json(*own[0]) if own else None,
            }
        )
    else:
        answer(f"{resolved.profile.name}: valid{_memory_words(resolved.profile, own)}")


def _memory_words(profile: Profile, own: list[tuple[str, Estimate]]) -> str:
    """What of a GPU's memory it takes; nothing for an engine without GPUs."""
    if own:
        need, free = own[0][1].static_bytes + own[0][1].dynamic_bytes, own[0][1].free
        return f"; it takes {need / 2**30:.1f} of {free / 2**30:.1f} GiB of each GPU"
    if profile.engine.kind == "sglang":
        return "; memory is not judged yet: name the shapes of the checkpoints and the GPU"
    return ""


@profiles_app.command("list")
def list_(as_json: Json = False) -> None:
    """List the profiles that a name finds."""
    from toolkit.profile.loading import list_profiles

    listings = list_profiles()
    if as_json:
        emit(
            [
                {
                    "name": item.name,
                    "description": item.description,
                    "path": str(item.path),
                    "problem": item.problem,
                }
                for item in listings
            ]
        )
        return
    rows = table("profile", "description", "file")
    for item in listings:
        rows.add_row(
            item.name, item.description if item.problem is None else f"broken: {item.problem}", str(item.path)
        )
    answer(rows)


@profiles_app.command()
def show(
    name: ProfileName,
    overlays: Overlays = None,
    sets: Sets = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="All keys, defaults too, with where each comes from.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="The sum of memory on a GPU, for each way to spread the model.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a profile: its file; with --resolved every value and its origin; with --memory a GPU's."""
    from toolkit.profile.loading import load_profile

    loaded = load_profile(name, overlays=overlays or (), sets=sets or ())
    tell_doubts(loaded)
    if memory:
        _show_memory(loaded.profile, as_json=as_json)
    elif as_json:
        emit(
            {
                "profile": loaded.data,
                "origins": {key: str(origin) for key, origin in loaded.origins.items()},
                "overrides": [item.to_json() for item in loaded.overrides],
            }
        )
    elif resolved:
        from toolkit.profile.show import resolved_text

        typer.echo(resolved_text(loaded))
    else:
        for source in loaded.sources:
            typer.echo(source.path.read_text(encoding="utf-8"), nl=False)


def _show_memory(profile: Profile, *, as_json: bool) -> None:
    from toolkit.profile.memory import layouts

    found = layouts.layouts(profile)
    if as_json:
        emit([layouts.as_json(*item) for item in found])
        return
    if not found:
        said = f"{profile.name}: what a GPU holds is not known"
        raise ConfigError(said, hint="it needs engine.kind sglang, hardware.gpu, and the checkpoints' shapes")
    header, lines = layouts.table(found)
    rows = table(*header)
    for line in lines:
        rows.add_row(*line)
    answer(rows)


@profiles_app.command()
def schema() -> None:
    """Print the JSON schema of profiles, for editors."""
    from toolkit.profile.show import json_schema

    emit(json_schema())


def render(
    name: ProfileName,
    form: Annotated[
        Literal["systemd", "argv", "ansible"],
        typer.Option(
            "--format", help="A systemd unit, the server's argument list, or the playbooks' settings."
        ),
    ] = "systemd",
    overlays: Overlays = None,
    sets: Sets = None,
    inventory: Inventories = None,
    limit: Limit = None,
    systemd_version: Annotated[
        int | None, typer.Option(min=240, help="The host's systemd; 255 where no host is asked.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="With ansible: write settings.json and the toolkit's archive."
        ),
    ] = None,
) -> None:
    """Print what a deploy would write, without touching any host; with -i, as one host would have it."""
    from toolkit.profile.loading import load_profile

    where = fleet.where(inventory, limit)
    loaded = load_profile(name, overlays=overlays or (), sets=sets or ())
    tell_doubts(loaded)
    if out is not None and form != "ansible":
        raise ConfigError("--out goes with --format ansible", hint="redirect the others: > FILE")
    if form == "ansible":
        if where is not None:
            raise ConfigError("the playbooks' settings are the same for every host", hint="leave out -i")
        from toolkit.deploy.preview import playbook_settings, write_settings

        if out is not None:
            answer(str(write_settings(loaded, out)))
        else:
            emit(playbook_settings(loaded))
        return
    if where is not None:
        if systemd_version is not None:
            raise ConfigError("the host tells its own systemd", hint="leave out --systemd-version")
        found = fleet.render(loaded, where, form)
    else:
        from toolkit.deploy.rendering import render_anywhere

        found = render_anywhere(loaded.profile, form, version=systemd_version or _SYSTEMD).to_json()
    if isinstance(found["content"], str):
        if loaded.profile.service.manager == "process":
            say("note: with service.manager: process no unit is written; this one systemd would have")
        typer.echo(found["content"], nl=False)
        return
    for note in found["notes"]:
        say(f"note: {note}")
    emit(found["content"])
