"""Secrets: read where a unit's references point, handed to the server in a private file.

The values reach the server through `--config` (SGLang's YAML form: keys are flag names), never through
arguments, the release, or an error message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from toolkit.errors import ConfigError, ToolkitError
from toolkit.files import make_private, read_bytes, replace_file
from toolkit.service.unit import SecretSource, Unit

_NO_FOLDING = 1 << 20


def read_secret(source: SecretSource) -> str:
    """The secret that `source` points to.

    Raises:
        ToolkitError: it cannot be read or is no usable text; names the place, never the value.
    """
    from toolkit.profile.schema import SecretRef
    from toolkit.profile.secrets import resolve_secret

    if source == SecretSource():
        raise ToolkitError(
            "it came with the deploy and is read nowhere else", hint="deploy the profile again"
        )
    return resolve_secret(SecretRef(env=source.env, file=source.file, command=source.command)).reveal()


def write_secrets(unit: Unit) -> None:
    """Read the unit's secrets anew and put them into its secrets file.

    Where a secret cannot be read now (a variable of another shell) and the file has one from before, the
    file is kept: a restart or a return to this release must not depend on who asks for it.

    Raises:
        ToolkitError: a secret cannot be read and there is none from before.
    """
    if unit.secrets_file is None:
        return
    path = Path(unit.secrets_file)
    try:
        values = {key: read_secret(source) for key, source in unit.secrets.items()}
    except ToolkitError:
        if path.is_file() and not path.is_symlink():
            return
        raise
    store_secrets(unit, values)


def store_secrets(unit: Unit, values: Mapping[str, str]) -> None:
    """Put values into the unit's secrets file.

    Raises:
        ToolkitError: it cannot be written.
    """
    if unit.secrets_file is None:
        return
    path = Path(unit.secrets_file)
    import yaml

    data = yaml.safe_dump(dict(values), allow_unicode=True, width=_NO_FOLDING, default_style='"').encode()
    try:
        make_private(path.parent)
        if not path.is_file() or path.read_bytes() != data:
            replace_file(path, data)
    except OSError as error:
        raise ToolkitError(f"{path}: cannot write the secrets file: {error.strerror}") from error


def stored_secrets(unit: Unit) -> dict[str, str]:
    """The values in the unit's secrets file; empty without one that can be read."""
    with contextlib.suppress(ToolkitError):
        return _read_stored(unit)
    return {}


def serving_secrets(unit: Unit) -> dict[str, str]:
    """The values that the server was started with; those that are not stored are read where they come from.

    Raises:
        ConfigError: one can be had in neither way; says why for both.
    """
    stored, why = {}, f"{unit.secrets_file} does not hold it"
    try:
        stored = _read_stored(unit)
    except ToolkitError as error:
        why = error.message
    return {key: stored.get(key) or _from_source(key, source, why) for key, source in unit.secrets.items()}


def _from_source(key: str, source: SecretSource, why_not_stored: str) -> str:
    try:
        return read_secret(source)
    except ToolkitError as error:
        hint = "run it as the user who deployed the service"
        raise ConfigError(
            f"no {key} for the server: {why_not_stored}; {error.message}",
            hint=f"{hint}, or: {error.hint}" if error.hint else hint,
        ) from None


def _read_stored(unit: Unit) -> dict[str, str]:
    if unit.secrets_file is None:
        return {}
    import yaml

    try:
        value = yaml.safe_load(read_bytes(Path(unit.secrets_file)))
    except OSError as error:
        raise ToolkitError(f"{unit.secrets_file} cannot be read: {error.strerror}") from None
    except yaml.YAMLError:
        raise ToolkitError(f"{unit.secrets_file} is damaged") from None
    return {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else {}
