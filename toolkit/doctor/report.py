"""Judging a host's facts for a profile."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.doctor.catalogue import CHECKS, silent
from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Finding, Level
from toolkit.doctor.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found on a host.

    Attributes:
        profile: name of the profile.
        findings: of all checks, in their order.
        ignored: names of checks whose failures do not count.
        load: what was measured under load, as JSON; None where that was not asked for.
    """

    profile: str
    findings: tuple[Finding, ...]
    ignored: tuple[str, ...] = ()
    load: dict[str, Any] | None = None

    def of(self, *levels: Level) -> list[Finding]:
        """The findings of these levels."""
        return [item for item in self.findings if item.level in levels]

    @property
    def failures(self) -> list[Finding]:
        """The failures that count."""
        return [item for item in self.of("fail") if item.check not in self.ignored]

    @property
    def exit_code(self) -> int:
        """0, or 1 with a failure that counts."""
        return 1 if self.failures else 0

    def lines(self) -> list[str]:
        """The failures that count, a line each, with what mends them."""
        return [f"{item}; fix: {item.fix}" if item.fix else str(item) for item in self.failures]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "profile": self.profile,
            "ok": not self.failures,
            "counts": {level: len(self.of(level)) for level in ("pass", "warn", "fail", "skip")},
            "ignored": list(self.ignored),
            "findings": [item.to_json() for item in self.findings],
            "load": self.load,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Report:
        """What `to_json` gave."""
        findings = tuple(Finding(**item) for item in value["findings"])
        return Report(value["profile"], findings, tuple(value["ignored"]), value["load"])


def judge(raw: Mapping[str, Any], profile: Wanted, *, ignored: Collection[str] = ()) -> Report:
    """What the facts of a host mean for a profile; pure.

    Args:
        raw: as `collect` gave them, and `load` where it was measured.
        profile: what the profile wants.
        ignored: names of checks whose failures do not count.
    """
    facts = Facts(raw)
    found: list[Finding] = []
    for check in CHECKS:
        why = check.unconcerned(profile) or silent(check, facts, profile)
        if why is not None:
            found.append(Finding(check.name, "skip", why))
            continue
        results: Sequence[Any] = list(check.run(facts, profile))
        found += [Finding(check.name, item.level, item.seen, item.expected, item.fix) for item in results]
    load = None if facts.load is None else facts.load.to_json()
    return Report(profile.name, tuple(found), tuple(sorted(set(ignored))), load)
