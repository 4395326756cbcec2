import asyncio

import pytest

from toolkit.ddtree.server.app import EventStream


@pytest.mark.parametrize("chunks_sent", [0, 1])
def test_a_stream_that_cannot_be_sent_ends_its_requests(chunks_sent):
    closed = []

    async def events():
        for number in range(3):
            yield f"data: {number}\n\n"

    async def send(message):
        if message["type"] == "http.response.body":
            if len(sent) == chunks_sent:
                raise OSError("connection lost")
            sent.append(message["body"])

    async def receive():
        await asyncio.sleep(60)

    sent = []
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(Exception):  # noqa: B017, PT011 (starlette's own, not the point here)
        asyncio.run(EventStream(events(), lambda: closed.append(True))(scope, receive, send))
    assert len(sent) == chunks_sent
    assert closed == [True]
