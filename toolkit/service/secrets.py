"""Secrets: read where a unit's references point, handed to the server in a private file.

The values reach the server through `--config` (SGLang's YAML form: keys are flag names), never through
arguments, the release, or an error message.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.service.files import make_private, replace_file
from toolkit.service.unit import SecretSource, Unit

_COMMAND_LIMIT = 30.0
_MAX_BYTES = 65536


def read_secret(key: str, source: SecretSource) -> str:
    """The secret that `source` points to, without one final newline.

    Raises:
        ToolkitError: it cannot be read, is empty or no text; names the key and the place, never the value.
    """
    where = f"secret {key} from {source.describe()}"
    if source.env is not None:
        value = os.environ.get(source.env)
        if value is None:
            raise ToolkitError(f"{where}: the variable is not set", hint=f"export {source.env} and try again")
    elif source.file is not None:
        value = _decode(where, _read_file(where, source.file))
    else:
        value = _decode(where, _run(where, source.command or ()))
    if not value:
        raise ToolkitError(f"{where}: it is empty")
    if not value.isprintable():
        raise ToolkitError(f"{where}: it holds control characters or line breaks")
    return value


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
        values = {key: read_secret(key, source) for key, source in unit.secrets.items()}
    except ToolkitError:
        if path.is_file() and not path.is_symlink():
            return
        raise
    import yaml

    data = yaml.safe_dump(values, allow_unicode=True, width=_MAX_BYTES, default_style='"').encode()
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


def _read_file(where: str, name: str) -> bytes:
    try:
        with Path(name).expanduser().open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise ToolkitError(f"{where}: {error.strerror}") from error


def _run(where: str, command: tuple[str, ...]) -> bytes:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise ToolkitError(f"{where}: it did not end within {_COMMAND_LIMIT:.0f} s") from None
    except OSError as error:
        raise ToolkitError(f"{where}: {error.strerror}") from error
    if done.returncode != 0:
        # What it printed may hold the secret.
        said = f"{where}: it ended with status {done.returncode}"
        raise ToolkitError(said, hint="run it by hand to see why")
    return done.stdout


def _decode(where: str, data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ToolkitError(f"{where}: it is no UTF-8 text") from None
    return text[:-1] if text.endswith("\n") else text
