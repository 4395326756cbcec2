"""What is known of a change before it is tried: an experiment that it keeps was found worse already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.profile.changes import Change
from toolkit.profile.loading import differences
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.judge import uncounted
from toolkit.release.store import Release

# Keys on which neither the tokens that are drafted nor how they are judged depends.
_APART = (
    "service.admin_api_key",
    "service.allow_unauthenticated",
    "service.api_key",
    "service.bind",
    "service.load_timeout",
    "service.log_max_size",
    "service.port",
    "service.restart",
    "service.stop_timeout",
)
# A figure that comes out alike each time; tokens/s may not.
_STEADY = "acceptance_length:"


@dataclass(frozen=True, slots=True)
class Loss:
    """What a running experiment failed in that a change for good keeps.

    Attributes:
        failed: each check, and how, in words.
        base: id of the release that the change is held against.
        certain: nothing in the change could make up for it.
    """

    failed: tuple[str, ...]
    base: str
    certain: bool

    @property
    def line(self) -> str:
        """What is to be told before the change begins."""
        return (
            f"what is tried failed already, which did not count in an experiment, but does in this, held "
            f"against {self.base}: {'; '.join(self.failed)}"
        )


def loss_of(host: ServiceHost, current: Release, changes: Sequence[Change]) -> Loss | None:
    """What the experiment that the current release is failed in, where a change keeps all of it; else None.

    Args:
        host: the service.
        current: the current release.
        changes: of a swap for good, against the experiment's base.
    """
    experiment = read_experiment(host.paths)
    if experiment is None or experiment.release != current.id:
        return None
    failed = uncounted(current.judged_again or current.acceptance)
    try:
        tried = {
            item.key: item.new
            for item in differences(host.store.get(experiment.base).profile, current.profile)
        }
    except ToolkitError:  # a damaged base: the transaction says so
        return None
    new = {change.key: change.new for change in changes}
    if not failed or not tried or any(key not in new or new[key] != value for key, value in tried.items()):
        return None
    alike = all(key in tried or _within(key, _APART) for key in new)
    return Loss(failed, experiment.base, alike and any(item.startswith(_STEADY) for item in failed))


def _within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in names)
