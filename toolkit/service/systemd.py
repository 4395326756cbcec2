"""A systemd unit file from a unit.

Escaping follows systemd.syntax(7) and systemd.service(5), "Command lines": every word is double-quoted with
C escapes, `%` is doubled against specifiers, and `$` is doubled in ExecStart= only, where it would be
replaced.
Keys that the host's systemd does not know are left out, since it would only warn about them; what the service
cannot do without is refused on a systemd that lacks it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from toolkit.errors import ConfigError, Problem, ToolkitError
from toolkit.service.unit import Unit

OLDEST = 240
RECOVER_UNIT = "ddtoolkit-recover.service"
_CREDENTIALS_SINCE = 247
_CREDENTIAL = "config.yaml"
_VERIFY_LIMIT = 60.0
_HOMES = ("/home/", "/root/", "/run/user/")
_TEMPORARY = ("/tmp/", "/var/tmp/")  # noqa: S108  named, not used
_PLAIN_PATH = re.compile(r"^/[A-Za-z0-9._@+/-]*$")

# Hardening that leaves the GPU visible. Not here: PrivateDevices= and DevicePolicy=, which hide /dev/nvidia*,
# and MemoryDenyWriteExecute=, which forbids what a JIT compiler does. Second: systemd version that added it.
_HARDENING: tuple[tuple[str, int], ...] = (
    ("NoNewPrivileges=yes", 187),
    ("ProtectSystem=strict", 232),
    ("ProtectKernelTunables=yes", 232),
    ("ProtectKernelModules=yes", 232),
    ("ProtectKernelLogs=yes", 244),
    ("ProtectControlGroups=yes", 232),
    ("ProtectClock=yes", 245),
    ("ProtectHostname=yes", 242),
    ("RestrictSUIDSGID=yes", 242),
    ("RestrictRealtime=yes", 231),
    ("RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK", 211),
    ("LockPersonality=yes", 235),
    ("UMask=0077", 0),
)


def unit_name(service: str) -> str:
    """File name of the unit of a service."""
    return f"ddtoolkit-{service}.service"


def quote(value: str) -> str:
    r"""One word as systemd reads it back byte for byte in Environment=: `a"b%s` becomes `"a\"b%%s"`."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t").replace("%", "%%")
    return f'"{escaped}"'


def quote_argument(value: str) -> str:
    """One word of ExecStart=, where `$` would begin a variable."""
    return quote(value).replace("$", "$$")


def render_unit(unit: Unit, systemd_version: int) -> str:
    """The text of the unit file for a host with this systemd.

    Raises:
        ConfigError: systemd is too old, or a value cannot be expressed in a unit file; names the key.
    """
    _check(unit, systemd_version)
    sections = {
        "Unit": _unit_section(unit),
        "Service": _service_section(unit, systemd_version),
        "Install": ["WantedBy=multi-user.target"],
    }
    return "\n".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())


@cache
def verify_unit(text: str, service: str) -> tuple[str, ...]:
    """What `systemd-analyze verify` of this machine says about the unit; asked once for each text.

    Its exit status is 0 for most warnings, and it also speaks of other units: only lines about this one
    count.

    Raises:
        ToolkitError: it cannot be run.
    """
    name = unit_name(service)
    with tempfile.TemporaryDirectory(prefix="ddtoolkit-verify-") as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)]
        try:
            done = subprocess.run(
                command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_VERIFY_LIMIT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolkitError(f"systemd-analyze verify cannot be run: {error}") from error
    said = done.stderr.decode("utf-8", "replace").splitlines()
    found = [line.replace(f"{folder}/", "") for line in said if name in line]
    if done.returncode != 0 and not found:
        found = said or [f"systemd-analyze verify ended with status {done.returncode}"]
    return tuple(found)


def _unit_section(unit: Unit) -> list[str]:
    lines = [f"Description={_plain(unit.description)}"]
    wanted = ["network-online.target"]
    if unit.gpus:
        wanted.append("nvidia-persistenced.service")
    lines += [f"Wants={' '.join(wanted)}", f"After={' '.join([*wanted, RECOVER_UNIT])}"]
    if unit.gpus and unit.nvlink:
        lines += ["Requires=nvidia-fabricmanager.service", "After=nvidia-fabricmanager.service"]
    if unit.restart.burst > 1:
        lines.append(f"StartLimitIntervalSec={_time(unit.restart.interval)}")
        lines.append(f"StartLimitBurst={unit.restart.burst}")
    return lines


def _service_section(unit: Unit, version: int) -> list[str]:
    words = [quote_argument(word) for word in unit.argv]
    lines = ["Type=exec"]
    if unit.secrets_file is not None:
        # The service's user cannot read the secrets file; systemd hands it a copy of its own.
        words = [
            f'"${{CREDENTIALS_DIRECTORY}}/{_CREDENTIAL}"' if argument == unit.secrets_file else word
            for argument, word in zip(unit.argv, words, strict=True)
        ]
        lines.append(f"LoadCredential={_CREDENTIAL}:{unit.secrets_file}")
    lines.append("ExecStart=" + " ".join(words))
    lines += [f"Environment={quote(f'{name}={value}')}" for name, value in _environment(unit).items()]
    lines.append(f"WorkingDirectory={unit.working_directory}")
    if unit.user is not None:
        lines.append(f"User={unit.user}")
    lines.append(f"TimeoutStartSec={_time(unit.load_timeout)}")
    lines.append(f"TimeoutStopSec={_time(unit.stop_timeout)}")
    lines.append("KillMode=mixed")
    if unit.restart.burst > 1:
        lines += ["Restart=on-failure", f"RestartSec={_time(unit.restart.delay)}"]
    else:
        lines.append("Restart=no")
    lines += [
        f"Limit{name.upper()}={'infinity' if value is None else value}" for name, value in unit.limits.items()
    ]
    lines.append("TasksMax=infinity")
    # What a server says last matters most, and journald would drop it behind a flood.
    # Zero would mean journald's own limit.
    lines += ["LogRateLimitIntervalSec=1s", "LogRateLimitBurst=100000000"]
    lines += _cache(unit)
    lines += [line for line, since in _HARDENING if version >= since]
    lines.append(f"ProtectHome={'read-only' if _lies_in(unit, _HOMES) else 'yes'}")
    if _lies_in(unit, _TEMPORARY):
        lines += ["PrivateTmp=no", "ReadWritePaths=/tmp /var/tmp"]  # strict has them read-only
    else:
        lines.append("PrivateTmp=yes")
    return lines


def _environment(unit: Unit) -> dict[str, str]:
    return {"LANG": "C.UTF-8", **unit.environment}


def _cache(unit: Unit) -> list[str]:
    system = "/var/cache/"
    if unit.cache.startswith(system):
        return [f"CacheDirectory={unit.cache.removeprefix(system)}", "CacheDirectoryMode=0750"]
    return [f"ReadWritePaths={unit.cache}"] if unit.cache else []


def _lies_in(unit: Unit, folders: tuple[str, ...]) -> bool:
    """Whether an engine or a checkpoint lies there, where hardening would hide it."""
    words = (*unit.argv, *unit.environment.values())
    # A virtual environment's interpreter is a link, and often one into the home of who made it.
    places = [place for word in words if word.startswith("/") for place in (word, os.path.realpath(word))]
    return any(place.startswith(folders) for place in places)


def _check(unit: Unit, version: int) -> None:
    problems = []
    if version < OLDEST:
        problems.append(Problem(f"systemd {version} is too old: {OLDEST} or newer is needed", key="host"))
    if unit_name(unit.name) == RECOVER_UNIT:
        problems.append(Problem(f"{RECOVER_UNIT} is the toolkit's own unit: choose another", key="name"))
    if unit.secrets and version < _CREDENTIALS_SINCE:
        said = f"secrets need systemd {_CREDENTIALS_SINCE} (LoadCredential=), the host has {version}"
        problems.append(Problem(said, key="service.api_key"))
    program = unit.argv[0]
    if not program.startswith("/") or "$" in program:
        said = f"the program {program!r} must be an absolute path without $ (systemd.service(5))"
        problems.append(Problem(said, key="argv"))
    for key, path in (
        ("working_directory", unit.working_directory),
        ("cache", unit.cache or "/"),
        ("secrets_file", unit.secrets_file or "/"),
    ):
        if not _PLAIN_PATH.match(path):
            problems.append(Problem(f"{path!r} is no plain absolute path", key=key))
    texts = [("engine.extra_args", word) for word in unit.argv]
    texts += [(f"service.environment.{name}", value) for name, value in unit.environment.items()]
    problems += [
        Problem("holds a Unicode noncharacter, which systemd does not read", key=key)
        for key, text in texts
        if _has_noncharacter(text)
    ]
    if problems:
        raise ConfigError(problems)


def _has_noncharacter(text: str) -> bool:
    return any(0xFDD0 <= ord(item) <= 0xFDEF or ord(item) & 0xFFFE == 0xFFFE for item in text)


def _plain(text: str) -> str:
    """A value that is taken as it stands but for specifiers; a final backslash would join the next line."""
    return text.replace("%", "%%").rstrip("\\")


def _time(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
