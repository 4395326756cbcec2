"""Deploying a profile on the hosts that carry it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toolkit.cli.board import Board
from toolkit.cli.fleet.shown import (
    finish,
    show_plans,
    tell_waiting,
)
from toolkit.cli.fleet.where import Manner, Where, begin_listing, carrying
from toolkit.cli.output import require_yes, say, tell_doubts
from toolkit.cli.plans import confirm_loss, confirm_undone


def deploy(
    name: str,
    overlays: Sequence[Path],
    sets: Sequence[str],
    where: Where,
    manner: Manner,
    *,
    new_baseline: bool,
    seed: str | None = None,
    wheelhouse: Path | None = None,
    ignored: Sequence[str] = (),
) -> None:
    """Deploy a profile on the hosts that carry it."""
    found = begin_listing(where)
    from toolkit.fleet.bare import equip
    from toolkit.fleet.change import lock_all
    from toolkit.fleet.connections import Connections
    from toolkit.fleet.deploy import (
        bring_weights,
        build,
        deploy_in_turn,
        desired,
        examine,
        plan_everywhere,
        provision,
        untouched,
    )
    from toolkit.fleet.fanout import Spread
    from toolkit.fleet.halt import halted, leaving_out
    from toolkit.fleet.wheels import bring_wheels, check_wheels
    from toolkit.profile.loading import load_profile

    resolved = load_profile(name, overlays=overlays, sets=sets)
    tell_doubts(resolved)
    hosts = carrying(found(), where, resolved.profile.name)
    wanted = desired(resolved, wheelhouse)
    command = f"deploy profile {wanted.service}"
    with Connections(hosts, python=resolved.profile.host.python) as connections:
        names, wait, limit = list(connections.hosts), manner.lock_wait, where.parallel
        out = lock_all(
            connections,
            names,
            wanted.service,
            command,
            wait=wait,
            limit=limit,
            tell=tell_waiting,
            profile=wanted.data,
        )
        plans = plan_everywhere(wanted, connections, limit=limit, but=out)
        show_plans(plans, say)
        plans = halted(leaving_out(plans, where.limit), "not begun, since {} could not be planned")
        if all(item.value is None or item.value["plan"]["empty"] for item in plans):
            finish([untouched(item) for item in plans], manner)
            return
        require_yes(yes=manner.yes, as_json=manner.as_json)
        undone = {item.host: item.value["undone"] for item in plans if item.value is not None}
        lost = {item.host: item.value["plan"]["lost"] for item in plans if item.value is not None}
        confirm_undone(undone, lost, yes=manner.yes)
        losing = [item.host for item in plans if item.value is not None and item.value["plan"].get("loses")]
        confirm_loss([] if new_baseline else losing, wanted.service, yes=manner.yes, change="deploy")
        orders = wanted.orders(connections.hosts)
        check_wheels(orders, plans)
        options = {"lock_wait": manner.lock_wait, "new_baseline": new_baseline, "ignored": list(ignored)}
        with Board([host.name for host in hosts], verbose=manner.verbose) as board:
            plans = examine(
                resolved.profile, wanted, connections, plans, board.tell, ignored=ignored, limit=limit
            )
            plans = provision(wanted, where.inventory, plans, board.tell)
            plans = halted(plans, "not restarted, since provisioning failed on {}")
            plans = bring_wheels(orders, connections.hosts, plans, board.tell, limit=limit)
            plans = equip(
                wanted.bare,
                wanted.args(),
                connections,
                plans,
                board.tell,
                command=command,
                wait=wait,
                limit=limit,
            )
            plans = halted(plans, "not restarted, since the libraries failed on {}")
            spread = Spread(limit, seed)
            plans = bring_weights(
                wanted, connections, plans, board.tell, inventory=where.inventory, spread=spread
            )
            plans = build(wanted, connections, plans, board.tell, limit=limit)
            results = deploy_in_turn(wanted, connections, plans, options, board.tell, batch=where.batch)
    finish(results, manner)
