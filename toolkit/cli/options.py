"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _profile_names(incomplete: str) -> list[str]:
    from toolkit.profile.loading import list_profiles

    return [entry.name for entry in list_profiles() if entry.name.startswith(incomplete)]


def _overlay_names(incomplete: str) -> list[str]:
    from toolkit.profile.lookup import overlay_files

    return [name for name in overlay_files() if name.startswith(incomplete)]


def _service_names(incomplete: str) -> list[str]:
    from toolkit.release.locate import deployed_services

    return [service.name for service in deployed_services() if service.name.startswith(incomplete)]


ProfileName = Annotated[
    str, typer.Argument(metavar="NAME", help="Profile name or file.", autocompletion=_profile_names)
]
ServiceName = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="Service; by default the only one deployed here, or with -i that the hosts carry.",
        autocompletion=_service_names,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; --json changes something only with it.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be repeated.")
]
Overlays = Annotated[
    list[Path] | None,
    typer.Option(
        "--overlay",
        "-f",
        metavar="NAME|FILE",
        help="Overlay, or YAML file, merged over the profile; may be repeated.",
        autocompletion=_overlay_names,
    ),
]
LockWait = Annotated[float, typer.Option("--lock-wait", min=0, help="Seconds to wait for the lock.")]
NewBaseline = Annotated[
    bool,
    typer.Option(
        "--new-baseline", help="Do not compare with the release before; the profile's thresholds still hold."
    ),
]
IgnoredChecks = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-check",
        metavar="NAME",
        help="A check of the doctor whose failure does not count; may be repeated.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every line of progress.")]
Inventories = Annotated[
    list[Path] | None,
    typer.Option(
        "--inventory", "-i", metavar="PATH", help="Ansible inventory; may be repeated. Unset: this machine."
    ),
]
Limit = Annotated[
    str | None, typer.Option("--limit", "-l", metavar="PATTERN", help="Hosts of the inventory, as Ansible's.")
]
Batch = Annotated[
    int, typer.Option("--batch", min=1, max=256, help="Hosts that are restarted at the same time.")
]
Seed = Annotated[
    str | None,
    typer.Option(
        "--seed",
        metavar="HOST",
        help="Host from which the others fetch checkpoints; `none`: each from the source. Unset: the first.",
    ),
]
Wheelhouse = Annotated[
    Path | None,
    typer.Option(
        "--wheelhouse",
        metavar="DIR",
        help="Folder here, made by `ddtoolkit wheelhouse`: the hosts are brought the wheels that they lack.",
    ),
]
Parallel = Annotated[
    int, typer.Option("--parallel", min=1, max=256, help="Hosts that are looked at at the same time.")
]
