"""Secrets of a release whose values were read on another machine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from toolkit.errors import ConfigError, ToolkitError
from toolkit.profile.given import Given
from toolkit.release.store import Release
from toolkit.service.secrets import store_secrets, stored_secrets
from toolkit.service.unit import SecretSource, Unit


def keeps_secrets(unit: Unit) -> bool:
    """Whether the values lie on this host alone, since another machine had read them."""
    return any(source == SecretSource() for source in unit.secrets.values())


def with_kept_secrets(unit: Unit, base: Release | None, given: Mapping[str, str]) -> Unit:
    """Store the secrets of a release whose values come from elsewhere, or from the release before.

    Each release has its own, so that one that is undone leaves the values of the other as they were.

    Raises:
        ConfigError: a value is missing.
    """
    of_base = None
    with contextlib.suppress(ToolkitError):  # a damaged base is replaced, whatever its secrets were
        of_base = None if base is None else base.unit
    before = {} if of_base is None else stored_secrets(of_base)
    if of_base is not None and not before and of_base.secrets and set(of_base.secrets) <= set(given):
        # The base's own are gone: without them there would be no way back to it.
        store_secrets(of_base, {key: given[key] for key in of_base.secrets})
    values = {key: given.get(key) or before.get(key) for key in unit.secrets}
    if missing_keys := [key for key, value in values.items() if value is None]:
        again = (Given() if base is None else base.given).deploy(unit.name)
        raise ConfigError(
            f"{unit.name}: no value for {', '.join(missing_keys)} is on the host",
            hint=f"bring it there with: {again} -i INVENTORY",
        )
    kept = replace(unit, secrets={key: SecretSource() for key in unit.secrets})
    store_secrets(kept, {key: value for key, value in values.items() if value is not None})
    return kept
