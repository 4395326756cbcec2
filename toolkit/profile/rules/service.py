"""Rules of the long-running server and of its acceptance."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from toolkit.profile.rules.finding import Finding, doubt, error
from toolkit.profile.rules.tables import DOUBTFUL_ENVIRONMENT, SECRET_NAME
from toolkit.profile.schema import Profile
from toolkit.profile.units import format_duration

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = "recover"  # its unit would be ddtoolkit-recover.service


def service_rules(profile: Profile) -> Iterator[Finding]:
    """Address and keys, manager, environment, restarts, acceptance."""
    yield from _address(profile)
    yield from _manager(profile)
    yield from _environment(profile)
    yield from _restart(profile)
    yield from _acceptance(profile)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address (an IP address or `localhost`)."""
    return address == "localhost" or ipaddress.ip_address(address).is_loopback


def _address(profile: Profile) -> Iterator[Finding]:
    service = profile.service
    missing = [name for name in ("api_key", "admin_api_key") if getattr(service, name) is None]
    if is_loopback(service.bind) or not missing:
        return
    keys = ("service.bind", "service.api_key", "service.admin_api_key", "service.allow_unauthenticated")
    what = f"{service.bind} is reached from other machines, and there is no {' and no '.join(missing)}"
    if service.allow_unauthenticated:
        yield doubt(f"{what}: anyone who reaches it can use the server", *keys)
    else:
        hint = "set both keys, bind 127.0.0.1, or set service.allow_unauthenticated"
        yield error(what, *keys, hint=hint)


def _manager(profile: Profile) -> Iterator[Finding]:
    host = profile.host
    if profile.service.manager == "process":
        if host.user is not None:
            yield error(
                "is for the systemd manager: a process keeps the user who deploys it",
                "host.user",
                "service.manager",
                hint="take it out",
            )
        return
    if profile.name == _RESERVED:
        yield error("is the name of the toolkit's own unit", "name", "service.manager", hint="choose another")
    if host.user == "root":
        yield error("the service must not run as root", "host.user", hint="a system user such as ddtree")
    if host.root is not None:
        yield error(
            "a systemd unit and its releases lie in the system's places, owned by root",
            "host.root",
            "service.manager",
            hint="take it out",
        )


def _environment(profile: Profile) -> Iterator[Finding]:
    for name, value in profile.service.environment.items():
        key = ("service", "environment", name)
        if not _VARIABLE.fullmatch(name):
            yield error("is no name of an environment variable", key, hint="letters, digits and _ only")
        if SECRET_NAME.fullmatch(name) and value:
            hint = "keep secrets out of profiles; service.api_key takes a reference"
            yield doubt("looks like a secret; it will stand in the release and in the unit", key, hint=hint)
        pattern, reason = DOUBTFUL_ENVIRONMENT.get(name, (None, ""))
        if pattern is not None and pattern.fullmatch(value):
            yield doubt(reason, key)


def _restart(profile: Profile) -> Iterator[Finding]:
    restart, load = profile.service.restart, profile.service.load_timeout
    least = restart.burst * (load + restart.delay)
    if restart.interval <= least and restart.burst:
        yield error(
            f"{format_duration(restart.interval)} is not above burst x (load_timeout + delay) = "
            f"{restart.burst} x ({format_duration(load)} + {format_duration(restart.delay)}): a server that "
            "dies while it loads would be restarted for ever",
            "service.restart.interval",
            "service.restart.burst",
            "service.restart.delay",
            "service.load_timeout",
            hint=f"more than {format_duration(least)}",
        )


def _acceptance(profile: Profile) -> Iterator[Finding]:
    acceptance, service = profile.acceptance, profile.service
    running, places = service.max_running_requests, service.max_running_requests + service.max_queued_requests
    keys = ("acceptance.concurrency", "service.max_running_requests", "service.max_queued_requests")
    if acceptance.concurrency > places:
        yield error(
            f"{acceptance.concurrency} at once: the server takes {places} and answers the rest 503", *keys
        )
    elif acceptance.concurrency > running:
        yield doubt(f"{acceptance.concurrency} at once: the server decodes {running}, the rest wait", *keys)
    yield from _acceptance_length(profile)


def _acceptance_length(profile: Profile) -> Iterator[Finding]:
    least, spec = profile.acceptance.min_acceptance_length, profile.speculative
    keys = ("acceptance.min_acceptance_length", "speculative.algorithm", "speculative.block_size")
    if least is None:
        return
    if spec.algorithm == "NONE":
        yield doubt("has no meaning without speculative decoding", *keys)
    elif least > spec.block_size:
        yield error(
            f"{least:g} cannot be reached: a step commits block_size = {spec.block_size} at most", *keys
        )
