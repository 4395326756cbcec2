"""Chat messages -> prompt text, through the checkpoint's own template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.ddtree.models.config import read_json
from toolkit.ddtree.models.errors import CheckpointError
from toolkit.ddtree.server.errors import ApiError
from toolkit.ddtree.server.protocol import ChatMessage


class ChatTemplate:
    """Renders messages as `chat_template` of the checkpoint says (Hugging Face layout, Jinja2).

    A checkpoint without a template gets lines of `role: content`, with `assistant:` at the end.

    Args:
        model_path: checkpoint directory; `chat_template.jinja` is read before `tokenizer_config.json`.

    Raises:
        ValueError: the template or the configuration cannot be read.
    """

    def __init__(self, model_path: Path) -> None:
        config = _read_config(model_path / "tokenizer_config.json")
        source = _template_source(model_path, config)
        self._tokens = {
            key: _token(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        self._template = _compile(source) if source is not None else None

    @property
    def own(self) -> bool:
        """Whether the checkpoint brings a template."""
        return self._template is not None

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt for the assistant's next message; raises ApiError (400) if the template refuses."""
        plain = [_plain(message) for message in messages]
        if self._template is None:
            return "".join(_line(item) for item in plain) + "assistant:"
        try:
            text: str = self._template.render(
                messages=plain, add_generation_prompt=True, tools=None, **self._tokens
            )
        except Exception as error:  # a template can raise anything
            raise ApiError(
                400, f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None
        return text


def _plain(message: ChatMessage) -> dict[str, str]:
    content = (
        message.content
        if isinstance(message.content, str)
        else "".join(part.text for part in message.content)
    )
    result = {"role": message.role, "content": content}
    if message.name is not None:
        result["name"] = message.name
    return result


def _line(message: dict[str, str]) -> str:
    speaker = f"{message['role']} {message['name']}" if "name" in message else message["role"]
    return f"{speaker}: {message['content']}\n"


def _compile(source: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # A template comes with the checkpoint, so it runs in the sandbox, as in transformers.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"chat template of the checkpoint: {error}") from None


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _read_config(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _template_source(model_path: Path, config: dict[str, Any]) -> str | None:
    path = model_path / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(path, f"cannot be read: {error}") from None
    source = config.get("chat_template")
    if isinstance(source, list):  # named templates; the default one is for chat
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _token(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
