"""Secrets: read where a unit's references point, handed to the server in a private file.

The values reach the server through `--config` (SGLang's YAML form: keys are flag names), never through
arguments, the release, or an error message.
"""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.service.files import make_private, replace_file
from toolkit.service.unit import SecretSource, Unit

_NO_FOLDING = 1 << 20


def read_secret(source: SecretSource) -> str:
    """The secret that `source` points to.

    Raises:
        ToolkitError: it cannot be read or is no usable text; names the place, never the value.
    """
    from toolkit.profile.schema import SecretRef
    from toolkit.profile.secrets import resolve_secret

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
    import yaml

    data = yaml.safe_dump(values, allow_unicode=True, width=_NO_FOLDING, default_style='"').encode()
    try:
        make_private(path.parent)
        if not path.is_file() or path.read_bytes() != data:
            replace_file(path, data)
    except OSError as error:
        raise ToolkitError(f"{path}: cannot write the secrets file: {error.strerror}") from error


def stored_secrets(unit: Unit) -> dict[str, str]:
    """The values in the unit's secrets file; empty without one."""
    if unit.secrets_file is None:
        return {}
    import yaml

    try:
        value = yaml.safe_load(Path(unit.secrets_file).read_bytes())
    except (OSError, yaml.YAMLError):
        return {}
    return {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else {}
