"""The checkpoints that a profile asks for: what is missing of them, and having them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.profile.checkpoints import sources_of
from toolkit.profile.schema import Profile
from toolkit.weights.pace import size_words


@dataclass(frozen=True, slots=True)
class Lacking:
    """What has to come to a host.

    Attributes:
        items: as `work.plan` tells them, one a checkpoint.
        short: what does not fit on the disk, in words; None where all does.
    """

    items: Sequence[Mapping[str, Any]] = ()
    short: str | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """For people, a line a checkpoint."""
        return tuple(map(_line, self.items))

    @property
    def folders(self) -> list[str]:
        """Names of the checkpoints."""
        return [str(item["folder"]) for item in self.items]

    def require_space(self) -> None:
        """Refuse what does not fit, before anything is copied.

        Raises:
            ToolkitError: the sum of what is needed against what is free.
        """
        if self.short is not None:
            raise ToolkitError(
                self.short,
                hint="free some space, or remove a checkpoint: ddtoolkit models list; ddtoolkit models rm",
            )


def _line(item: Mapping[str, Any]) -> str:
    size = "of unknown size" if item["bytes"] is None else size_words(item["bytes"])
    problem = f"; its source cannot be asked from here: {item['problem']}" if item["problem"] else ""
    return f"{item['folder']}: {item['why']}; {size} from {item['from']}{problem}"


def requests(profile: Profile) -> list[dict[str, Any]]:
    """What a host is asked for (`request.wish_of`), one a checkpoint, its peer aside."""
    host = profile.host
    common = {
        "root": host.root,
        "endpoint": host.model_hub,
        "rate": host.download_rate,
        "parallel": host.download_files,
        "min_free": host.min_free_disk,
    }
    found: dict[str, dict[str, Any]] = {}
    for role, source in sources_of(profile).items():
        checkpoint = getattr(profile.model, role)
        found[source.folder] = {**common, "source": checkpoint.source, "revision": checkpoint.revision}
    return list(found.values())


def lacking(profile: Profile) -> Lacking:
    """What has to come to this machine for a profile; asks the sources of what is not there."""
    wanted = requests(profile)
    if not wanted:
        return Lacking()
    from toolkit.weights import work  # takes a while to load, and most hosts lack nothing

    answer = work.plan({"requests": wanted}, _nobody)
    return Lacking(answer["lacking"], answer["short"])


def fetch(profile: Profile, step: Callable[[str, str], None], line: Callable[[str], None]) -> None:
    """Have the checkpoints of a profile complete on this machine.

    Args:
        profile: the profile.
        step: called with the name of the step and what comes.
        line: called with lines of progress.

    Raises:
        ToolkitError: one cannot be had; what serves was not touched.
    """
    missing = lacking(profile)
    if not missing.items:
        return
    from toolkit.weights import work
    from toolkit.weights.request import wish_of

    missing.require_space()
    for request in requests(profile):
        wish = wish_of(request)
        for item in missing.items:
            if item["folder"] == wish.folder.name:
                step("weights", _line(item))
                work.add(request, lambda value: line(str(value["line"])) if "line" in value else None)


def _nobody(_: dict[str, Any]) -> None:
    """For what is over in a moment."""
