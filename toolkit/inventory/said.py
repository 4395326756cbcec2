"""What Ansible says of a wrong inventory, in this tool's words: file, line, what, and the next step.

Ansible tries several plugins on a source and tells what each came to. The one that is meant by the source's
name is the one to listen to; its own words are kept as the detail.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import Problem

EXAMPLE = "inventory.example.yaml shows a whole one"
_YAML = (".yaml", ".yml", ".json")
_FAILED = re.compile(
    r"^\[WARNING\]: Failed to parse inventory with '(\w+)' plugin: (.*?)(?=^\[(?:WARNING|ERROR)\]: |\Z)",
    re.MULTILINE | re.DOTALL,
)
_SOURCE = re.compile(r"^\[ERROR\]: Completely failed to parse inventory source (.+)$", re.MULTILINE)
_ORIGIN = re.compile(r"^Origin: (/[^\n]*?)(?::(\d+)(?::(\d+))?)?$", re.MULTILINE)
_UNMATCHED = re.compile(r"^\[WARNING\]: Could not match supplied host pattern, ignoring: (.+)$", re.MULTILINE)
_SKIPPED = re.compile(r"^\[WARNING\]: Skipping (.+)$", re.MULTILINE)
_UNDEFINED_GROUP = re.compile(r"Section \[(\S+)\] includes undefined group '(.+)'")
_MAX_TOLD = 400


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What one plugin made of a source."""

    plugin: str
    reason: str
    source: Path | None
    line: int | None
    column: int | None


def unreadable(said: str, sources: Sequence[Path]) -> list[Problem]:
    """Why Ansible could not read an inventory.

    Args:
        said: its standard error.
        sources: the files, folders and scripts that it was given.
    """
    attempts = list(_attempts(said))
    failed = [Path(name) for name in _SOURCE.findall(said)] or list(sources)
    problems = []
    for source in failed:
        own = [item for item in attempts if item.source in (None, source)] or attempts
        meant = [item for item in own if item.plugin in _plugins(source)]
        placed = [item for item in meant if item.line is not None]
        problems.append(_problem(source, next(iter(placed or meant or own), None), said))
    return problems


def unmatched(said: str) -> list[str]:
    """Parts of a `--limit` pattern that match no host and no group."""
    return list(dict.fromkeys(name.strip() for name in _UNMATCHED.findall(said)))


def skipped(said: str) -> str:
    """What Ansible left out of an inventory, as it says it; "" for nothing."""
    return "; ".join(dict.fromkeys(_SKIPPED.findall(said)))[:_MAX_TOLD]


def limit_problem(limit: str, unknown: Sequence[str], known: Collection[str]) -> Problem:
    """A part of a `--limit` pattern that names nothing: a slip there touches hosts that were not meant."""
    wrong = ", ".join(map(repr, unknown))
    near = difflib.get_close_matches(unknown[0].lstrip("!&"), sorted(known), n=1, cutoff=0.6)
    if near:
        hint = f"did you mean {near[0]}?"
    else:
        listed = ", ".join(sorted(known)[:10])
        hint = f"hosts and groups there: {listed or 'none'}"
    words = f"{wrong} matches no host and no group of the inventory"
    return Problem(words, source=f"--limit {limit}", hint=hint)


def unresolved(host: str, key: str, text: str, said: str, sources: Sequence[Path]) -> Problem:
    """A variable of a host whose template gives no value.

    Args:
        host: name of the host.
        key: the variable.
        text: its value as it is written.
        said: Ansible's words; "" where it has none.
        sources: the inventory, which is searched for where the value is written.
    """
    path, line = _place(text, sources)
    lookup = "lookup" in text or "query(" in text
    hint = (
        "mend what the lookup reads, or write the value itself"
        if lookup
        else "define it for the host, in a group or in group_vars, or write the value itself"
    )
    detail = re.sub(r"^(Task failed: )?(Error processing keyword '\w+': )?", "", said).strip()
    what = f"{text!r} gives no value" + (f" (Ansible: {detail})" if detail else "")
    source = "" if path is None else str(path)
    return Problem(what, key=f"{host}: {key}", source=source, line=line, hint=hint)


def _attempts(said: str) -> Iterator[_Attempt]:
    for plugin, body in _FAILED.findall(said):
        origin = _ORIGIN.search(body)
        path, line, column = origin.groups() if origin else (None, None, None)
        reason = body.split("\n", 1)[0].removeprefix("Failed to parse inventory: ").strip()
        yield _Attempt(
            plugin,
            reason,
            None if path is None else Path(path),
            int(line) if line else None,
            int(column) if column else None,
        )


def _plugins(source: Path) -> tuple[str, ...]:
    """The plugins that are meant by a source's name, as Ansible's own plugins tell theirs."""
    if source.suffix in _YAML:
        return ("yaml", "auto")
    if source.is_file() and os.access(source, os.X_OK):
        return ("script",)
    return ("ini",)


def _problem(source: Path, attempt: _Attempt | None, said: str) -> Problem:
    if attempt is None:
        reason = " ".join(line.strip() for line in said.splitlines() if line.strip())[:_MAX_TOLD]
        return Problem(f"Ansible cannot read it: {reason or 'it does not say why'}", source=str(source))
    reason = attempt.reason[:_MAX_TOLD]
    detail = f" (Ansible: {reason})"
    if attempt.plugin == "script":
        tail = said.partition("Standard error from inventory script:\n")[2].split("\n\n", 1)[0].strip()
        words = f"the inventory script failed{f', and said: {tail[:_MAX_TOLD]}' if tail else ''}{detail}"
        return Problem(words, source=str(source), hint=f"run it by hand: {source} --list")
    if attempt.plugin == "ini":
        return _ini(source, reason, detail)
    path = source if attempt.source is None or attempt.line is None else attempt.source
    if "YAML parsing failed" not in reason:
        words = f"it has not the form of an inventory: its top level must be groups, such as `all:`{detail}"
        return Problem(words, source=str(path), line=attempt.line, column=attempt.column, hint=EXAMPLE)
    if "Tabs" in reason:
        words, hint = "it is indented with a tab, and YAML takes only spaces", "write spaces there"
    else:
        words = "it is not YAML"
        hint = "look for indentation, a quote or a bracket in that line and the ones above it"
    return Problem(f"{words}{detail}", source=str(path), line=attempt.line, column=attempt.column, hint=hint)


def _ini(source: Path, reason: str, detail: str) -> Problem:
    """An INI inventory; Ansible does not tell the line, so what it names is looked for."""
    lines = _lines(source)
    if (match := _UNDEFINED_GROUP.search(reason)) is not None:
        section, group = match.groups()
        line = next((number for number, text in lines if text.strip() == group), None)
        words = f"section [{section}] names the group {group!r}, which is not defined"
        hint = f"define it with a section [{group}], or correct the name"
        return Problem(f"{words}{detail}", source=str(source), line=line, hint=hint)
    for number, text in lines:
        if text.lstrip().startswith("[") and "]" not in text:
            words = f"the section header {text.strip()!r} is not closed"
            return Problem(f"{words}{detail}", source=str(source), line=number, hint="close it with ]")
    named = reason.rpartition("got: ")[2].strip() if "got: " in reason else ""
    line = next((number for number, text in lines if named and named in text), None)
    words = f"it is not an INI inventory{detail}"
    hint = f"name it .yaml if it is YAML; {EXAMPLE}" if any(":" in text for _, text in lines[:1]) else EXAMPLE
    return Problem(words, source=str(source), line=line, hint=hint)


def _place(text: str, sources: Sequence[Path]) -> tuple[Path | None, int | None]:
    """File and line in which a value is written, as far as it can be found."""
    wanted = text.strip()
    for source in sources:
        folder = source if source.is_dir() else source.parent
        files = [source] if source.is_file() else sorted(folder.glob("*"))
        files += [path for name in ("group_vars", "host_vars") for path in sorted((folder / name).rglob("*"))]
        for path in files:
            for number, line in _lines(path) if path.is_file() else ():
                if wanted in line:
                    return path, number
    return None, None


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        return list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
    except (OSError, UnicodeDecodeError):
        return []
