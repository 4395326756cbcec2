"""What a transaction is asked to do, and what came of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from toolkit.errors import RolledBackError, ServiceDownError, ToolkitError
from toolkit.files import read_json
from toolkit.profile.changes import Change

REQUEST_FILE = "request.json"

Kind = Literal[
    "deploy", "swap", "rollback", "experiment", "return", "start", "stop", "restart", "test", "record"
]
Status = Literal[
    "committed", "rolled_back", "rollback_failed", "first_failed", "not_started", "failed", "interrupted"
]
# Kinds that change the release, as against those that only start or stop the one that is there.
RELEASING: frozenset[Kind] = frozenset({"deploy", "swap", "rollback", "experiment", "return"})
_EXIT_CODES: dict[Status, int] = {"committed": 0, "rolled_back": 5, "rollback_failed": 6}


def _new_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A program that judges the served release by its exit status: 0 accepted, 1 refused.

    It is run as `command --settings FILE --out FILE` with the API keys in `DDTOOLKIT_API_KEY` and
    `DDTOOLKIT_ADMIN_API_KEY`, and writes a JSON object to its `--out` file.

    Attributes:
        command: program and first arguments.
        settings: content of the settings file; no secrets.
        time_limit: seconds after which it is killed and the release counts as refused.
    """

    command: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    time_limit: float = 120.0


@dataclass(frozen=True, slots=True)
class Launch:
    """The same release started by another command, to be measured (acceptance level `full`).

    Attributes:
        name: `dflash` or `chain`; names its steps in the journal.
        unit: JSON form of its unit.
        measure: program that measures it; also given `--report FILE`, the release's report.
    """

    name: str
    unit: Mapping[str, Any]
    measure: Acceptance


@dataclass(frozen=True, slots=True)
class Comparison:
    """Further launches, and the program that holds them against the release's report.

    Attributes:
        launches: measured in this order.
        judge: also given `--report FILE` and `--launch NAME=FILE` for each launch; what it writes replaces
            the report.
    """

    launches: tuple[Launch, ...]
    judge: Acceptance


@dataclass(frozen=True, slots=True)
class Request:
    """One change of a service.

    Attributes:
        kind: what is done.
        who: `user@host`, for history and status.
        command: the command given.
        release: id of the release to go to; for `start` and `restart` the current one, None for `stop`.
        base: id of the release to return to; None for a first deploy, `start`, `stop` and `restart`.
        changes: changed keys of the profile.
        acceptance: judges `release`; None: real tokens suffice.
        base_acceptance: run and reported after a return to `base`, never judged.
        comparison: launches that are measured once `acceptance` has passed.
        experiment_seconds: time until an experiment returns to `base` by itself.
        keep_releases: releases that pruning leaves.
        new_baseline: the report of this judgement becomes the release's baseline, whatever it had before.
        recorded: whether it makes an entry in the history.
        id: id of the transaction.
    """

    kind: Kind
    who: str
    command: str = ""
    release: str | None = None
    base: str | None = None
    changes: tuple[Change, ...] = ()
    acceptance: Acceptance | None = None
    base_acceptance: Acceptance | None = None
    comparison: Comparison | None = None
    experiment_seconds: float | None = None
    keep_releases: int = 5
    new_baseline: bool = False
    recorded: bool = True
    id: str = field(default_factory=_new_id)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; `from_json` gives an equal request back."""
        return asdict(self)

    @staticmethod
    def from_json(value: Any, source: str = REQUEST_FILE) -> Request:
        """The request of `to_json`'s object.

        Raises:
            ToolkitError: it is none; names `source`.
        """
        try:
            given = dict(value)
            given["changes"] = tuple(Change(**change) for change in given["changes"])
            for key in ("acceptance", "base_acceptance"):
                given[key] = None if given[key] is None else _program(given[key])
            if given["comparison"] is not None:
                given["comparison"] = _comparison(given["comparison"])
            request = Request(**given)
        except (TypeError, ValueError, KeyError) as error:
            raise ToolkitError(f"{source}: damaged request: {error}") from error
        if request.kind not in get_args(Kind):
            raise ToolkitError(f"{source}: unknown kind {request.kind!r}")
        return request


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transaction ended.

    Attributes:
        status: `committed`; `rolled_back`: the base serves again; `rollback_failed`: nothing serves;
            `first_failed`: there was no base, the service is stopped; `not_started`: refused before anything
            was touched; `failed`: a start, stop or restart did not succeed; `interrupted`: its process died.
        message: what happened, with the reason, for people.
        reason: why it did not come to what was asked for; "" where it did.
        kind: of the request.
        release: id of the release that was asked for.
        base: id of the release before.
        serving: id of the release that serves now; None when nothing does.
        seconds: duration by step; `total` and `downtime` among them.
        log: last lines of the server's output, when it failed.
        hint: the next step.
        report: path of the acceptance report.
        transaction: id of the transaction.
        uncounted: checks of an experiment that failed, and refused nothing.
    """

    status: Status
    message: str
    kind: str
    release: str | None = None
    base: str | None = None
    serving: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    hint: str | None = None
    report: str | None = None
    transaction: str = ""
    reason: str = ""
    uncounted: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit status of the command."""
        return _EXIT_CODES.get(self.status, 1)

    def raise_for_status(self) -> None:
        """Raise what the outcome amounts to; nothing when it was committed.

        Raises:
            RolledBackError: the base serves again.
            ServiceDownError: nothing serves and it could not be undone.
            ToolkitError: any other failure.
        """
        kinds: dict[str, type[ToolkitError]] = {
            "rolled_back": RolledBackError,
            "rollback_failed": ServiceDownError,
        }
        if self.status != "committed":
            raise kinds.get(self.status, ToolkitError)(self.message, hint=self.hint)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, with the exit code."""
        return {**asdict(self), "exit_code": self.exit_code}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Outcome:
        """The outcome of `to_json`'s object."""
        known = {item.name for item in fields(Outcome)}
        given = {key: item for key, item in value.items() if key in known}
        return Outcome(
            **{**given, "log": tuple(given.get("log", ())), "uncounted": tuple(given.get("uncounted", ()))}
        )


def _program(value: Mapping[str, Any]) -> Acceptance:
    return Acceptance(**{**value, "command": tuple(value["command"])})


def _comparison(value: Mapping[str, Any]) -> Comparison:
    launches = tuple(
        Launch(item["name"], item["unit"], _program(item["measure"])) for item in value["launches"]
    )
    return Comparison(launches, _program(value["judge"]))


def read_request(folder: Path) -> Request:
    """The request of the transaction in `folder`.

    Raises:
        ToolkitError: it is absent or damaged.
    """
    path = folder / REQUEST_FILE
    return Request.from_json(read_json(path), str(path))
