"""Random argument lists and environments, and what a process under a real systemd got of them."""

import random
import shutil
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.hosts.machines import Host
from toolkit.service.systemd import render_unit
from toolkit.service.unit import Unit

BATCH = 500
START_LIMIT = 120.0
UNITS = "/run/systemd/system"
OUTPUT = "/run/bytes"
DUMP = "/usr/local/bin/dump"
# `cat` reads what this shell was started with, whatever it made of its own copy.
DUMP_SCRIPT = f"#!/bin/sh\ncat /proc/$$/cmdline /proc/$$/environ > {OUTPUT}/$1\n"
# systemd.exec(5), "Environment variables in spawned processes".
ADDED_BY_SYSTEMD = frozenset([
    b"PATH", b"USER", b"INVOCATION_ID", b"JOURNAL_STREAM", b"SYSTEMD_EXEC_PID",
    b"MEMORY_PRESSURE_WATCH", b"MEMORY_PRESSURE_WRITE",
])  # fmt: skip
# Punctuation three times as often as letters.
AWKWARD = ["\t", " ", " ", *string.punctuation * 3, *string.ascii_letters, *string.digits]
PIECES = [
    "%s", "%%", "%n", "%", "$X", "${X}", "$$", "$1", "\\", "\\n", "\\x41", "\\u00e9", " ;", "; ", '"', "'",
    "#", "{\"a\": \"b c\"}",
    "http://h/%s", "100%FREE", "pa$1wor$D", "u?options=-c search_path=app", "é", "日本",
    "\u2028", "\U0001f600", "\u0085", "\xa0", "\ufeff",
]  # fmt: skip
WHOLE = ["", " ", ";", "\t", "-", "--", "#", "\\", "'", '"', "*", "@", "!", "+", "$", "%", "A=b", "[Service]"]


@dataclass(frozen=True, slots=True)
class Case:
    """What a process is to get.

    Attributes:
        words: arguments after the first.
        environment: its variables, apart from those that systemd adds.
    """

    words: tuple[str, ...]
    environment: dict[str, str]


def character(source: random.Random) -> str:
    """Any character that a unit takes; see Unit and render_unit for those that it refuses."""
    while True:
        code = source.randrange(0x80, 0x110000) if source.random() < 0.5 else source.randrange(0x80, 0x3000)
        surrogate = 0xD800 <= code <= 0xDFFF
        noncharacter = 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE
        if not surrogate and not noncharacter:
            return chr(code)


def text(source: random.Random) -> str:
    """One value: mostly short, with what systemd, a shell or an INI reader would take for syntax."""
    if source.random() < 0.1:
        return source.choice(WHOLE)
    parts = []
    for _ in range(source.randrange(9)):
        kind = source.random()
        if kind < 0.5:
            parts.append(source.choice(AWKWARD))
        elif kind < 0.85:
            parts.append(source.choice(PIECES))
        else:
            parts.append(character(source))
    return "".join(parts)


def cases(count: int, seed: int) -> list[Case]:
    """`count` cases, always the same for a seed."""
    source = random.Random(seed)
    return [
        Case(
            tuple(text(source) for _ in range(source.randrange(6))),
            {f"V{number}": text(source) for number in range(source.randrange(5))},
        )
        for _ in range(count)
    ]


def unit_text(number: int, case: Case, systemd: int) -> str:
    """The unit file of a case as it is rendered, but run once and without the sandbox, which costs time."""
    unit = Unit(
        name="bytes",
        release="r",
        description="bytes",
        argv=(DUMP, str(number), *case.words),
        environment=case.environment,
        working_directory="/",
        host="127.0.0.1",
        port=1,
        manager="systemd",
    )
    kept = ("[Service]", "ExecStart=", "Environment=", "WorkingDirectory=")
    lines = [line for line in render_unit(unit, systemd).split("\n") if line.startswith(kept)]
    return "\n".join([*lines, "Type=oneshot", "StandardOutput=null", ""])


def differences(host: Host, wanted: Sequence[Case]) -> Iterator[str]:
    """Run every case in the host; yields those whose process got something else, in words."""
    systemd = int(host.root(["systemctl", "--version"]).stdout.split()[1])
    host.path(DUMP).write_text(DUMP_SCRIPT)
    host.path(DUMP).chmod(0o755)
    host.root(["systemctl", "log-level", "warning"])
    for start in range(0, len(wanted), BATCH):
        batch = {number: wanted[number] for number in range(start, min(start + BATCH, len(wanted)))}
        run_batch(host, {number: unit_text(number, case, systemd) for number, case in batch.items()})
        for number, case in batch.items():
            got = host.path(f"{OUTPUT}/{number}")
            said = difference(number, case, got.read_bytes() if got.exists() else None)
            if said:
                yield f"case {number} on systemd {systemd}: {said}"


def run_batch(host: Host, texts: Mapping[int, str]) -> None:
    """Let systemd load these units at once and start each."""
    units, output = host.path(UNITS), host.path(OUTPUT)
    for folder in (units, output):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    names = [f"bytes-{number}.service" for number in texts]
    for name, text_ in zip(names, texts.values(), strict=True):
        (units / name).write_text(text_, encoding="utf-8")
    (units / "bytes.target").write_text(f"[Unit]\nWants={' '.join(names)}\n")
    host.root(["systemctl", "stop", "bytes.target"], check=False)
    host.root(["systemctl", "daemon-reload"])
    host.root(["systemctl", "start", "bytes.target"], timeout=START_LIMIT)


def difference(number: int, case: Case, got: bytes | None) -> str | None:
    """What a process got besides or instead of its case, None: nothing."""
    if got is None:
        return f"did not run: {case}"
    words = [b"/bin/sh", DUMP.encode(), str(number).encode(), *(word.encode() for word in case.words)]
    cmdline = b"".join(word + b"\0" for word in words)
    if not got.startswith(cmdline):
        return f"arguments {words} arrived as {got!r}"
    variables = dict(entry.partition(b"=")[::2] for entry in got[len(cmdline) :].split(b"\0")[:-1])
    arrived = {name: value for name, value in variables.items() if name not in ADDED_BY_SYSTEMD}
    environment = {b"LANG": b"C.UTF-8"}
    environment |= {name.encode(): value.encode() for name, value in case.environment.items()}
    return None if arrived == environment else f"environment {environment} arrived as {arrived}"
