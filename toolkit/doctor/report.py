"""Judging a host's facts for a profile."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.doctor.catalogue import CHECKS, silent
from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Finding, Level
from toolkit.profile.schema import Profile


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found on a host.

    Attributes:
        profile: name of the profile.
        findings: of all checks, in their order.
        ignored: names of checks whose failures do not count.
    """

    profile: str
    findings: tuple[Finding, ...]
    ignored: tuple[str, ...] = ()

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

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "profile": self.profile,
            "ok": not self.failures,
            "counts": {level: len(self.of(level)) for level in ("pass", "warn", "fail", "skip")},
            "ignored": list(self.ignored),
            "findings": [item.to_json() for item in self.findings],
        }


def judge(raw: Mapping[str, Any], profile: Profile, *, ignored: Collection[str] = ()) -> Report:
    """What the facts of a host mean for a profile; pure.

    Args:
        raw: as `collect` gave them.
        profile: the profile.
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
    return Report(profile.name, tuple(found), tuple(sorted(ignored)))
