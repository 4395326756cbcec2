"""hosts list, hosts trust, hosts prepare."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.cli.options import Inventories, Json, Limit, Yes
from toolkit.cli.output import answer, emit, require_yes, say
from toolkit.cli.prepare import prepare
from toolkit.errors import ConfigError, UnreachableError

hosts_app = typer.Typer(help="The hosts of an inventory.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    hosts_app.command("prepare")(prepare)
    app.add_typer(hosts_app, name="hosts")


@hosts_app.command("list")
def list_hosts(inventory: Inventories = None, limit: Limit = None, as_json: Json = False) -> None:
    """Each host, how it is reached, and the profiles that it carries; connects to none."""
    from toolkit.inventory.load import load_hosts
    from toolkit.remote.options import ssh_options

    if not inventory:
        raise ConfigError("name an inventory", hint="add -i inventory.yaml")
    rows = []
    for host in load_hosts(inventory, limit=limit):
        if host.local:
            reached, through = "this machine", []
        else:
            found = ssh_options(host)
            reached = f"{found.user}@{found.hostname} port {found.port}"
            through = [f"{jump.user}@{jump.hostname}" for jump in found.jumps]
        rows.append({"host": host.name, "reached": reached, "through": through, "profiles": host.profiles})
    if as_json:
        emit(rows)
        return
    for row in rows:
        via = f" through {', '.join(row['through'])}" if row["through"] else ""
        answer(f"{row['host']}: {row['reached']}{via}: {', '.join(row['profiles']) or 'no profile'}")


@hosts_app.command("trust")
def trust(
    name: Annotated[str, typer.Argument(metavar="HOST", help="Host of the inventory.")],
    fingerprint: Annotated[
        str,
        typer.Option(
            "--fingerprint", metavar="SHA256:...", help="Read on the host itself, or from who installed it."
        ),
    ],
    inventory: Inventories = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Add a host's ed25519 key to known_hosts, if it is the one with this fingerprint."""
    from toolkit.inventory.load import load_hosts
    from toolkit.remote import keys
    from toolkit.remote.options import SshOptions, ssh_options
    from toolkit.remote.ssh import offered_key

    require_yes(yes=yes, as_json=as_json)
    if not inventory:
        raise ConfigError("name an inventory", hint="add -i inventory.yaml")
    if not keys.is_fingerprint(fingerprint):
        raise ConfigError(
            f"--fingerprint {fingerprint!r} is no SHA-256 fingerprint",
            hint="on the host: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
        )
    wanted: SshOptions = ssh_options(load_hosts(inventory, limit=name)[0])
    if not wanted.known_hosts:
        raise ConfigError(f"{name}: UserKnownHostsFile is none, so there is no place for its key")
    blob = offered_key(wanted)
    offered = keys.fingerprint(blob)
    if offered != fingerprint:
        raise UnreachableError(
            f"{name} offers {offered}, not {fingerprint}",
            hint="do not trust it before you know why: the fingerprint may be another host's, or an old one",
        )
    known = keys.known_keys(wanted.known_as, wanted.known_hosts)
    new = not any(key.blob == blob and not key.revoked for key in known)
    if new:
        keys.add(wanted.known_as, wanted.known_hosts[0], blob)
        say(f"{name}: {offered} is trusted now, in {wanted.known_hosts[0]}")
    else:
        say(f"{name}: its key is known already")
    if as_json:
        file = str(wanted.known_hosts[0])
        emit({"ok": True, "host": name, "fingerprint": offered, "added": new, "file": file})
