"""The route `/ddtree/self_check` of SGLang's HTTP server.

It decodes one request that the schedulers know by its id, then asks them, as `/server_info` does, for what
they found. The id's prefix is a secret of the server, so that no client can make it check itself.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from toolkit.ddtree.sglang.options import TreeOptions

PATH = "/ddtree/self_check"
_TOKENS = 48
_PROMPT = 24

_numbers = itertools.count()
_one_at_a_time = asyncio.Lock()


def add_routes() -> None:
    """Add the route to SGLang's application."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app.api_route(PATH, methods=["GET", "POST"])(auth_level(AuthLevel.ADMIN_OPTIONAL)(self_check))


async def self_check() -> dict[str, Any]:
    """Check the running server: {"ok": bool, "checks": [{name, ok, measured, limit, detail}]}."""
    from sglang.srt.entrypoints.http_server import _global_state

    manager = _global_state.tokenizer_manager
    async with _one_at_a_time:
        rid = f"{TreeOptions.from_environment().check_prefix}-{next(_numbers)}"
        problem = await _decode(manager, rid)
        states = await manager.get_internal_state()
    if problem is None:
        found = [state.get("ddtree", {}).get("self_check", {}) for state in states]
        checks = [check for own in found if own.get("rid") == rid for check in own["checks"]]
        problem = None if checks else "no verification of the request was seen"
    if problem is not None:
        checks = [{"name": "decode", "ok": False, "measured": 0.0, "limit": 0.0, "detail": problem}]
    return {"ok": all(check["ok"] for check in checks), "checks": checks}


async def _decode(manager: Any, rid: str) -> str | None:
    """Decode the request; why it could not be, or None."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True}
    prompt = [2 + 7 * place for place in range(_PROMPT)]
    # A salt of its own keeps it out of the prefixes of others.
    request = GenerateReqInput(input_ids=prompt, sampling_params=sampling, rid=rid, extra_key=rid)
    try:
        async for _ in manager.generate_request(request, None):
            pass
    except ValueError as error:
        return f"the request was refused: {error}"
    return None
