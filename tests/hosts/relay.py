"""Carries TCP connections into a network namespace, as late or as badly as a test wants.

    python relay.py DESCRIPTOR ADDRESS PORT

DESCRIPTOR is a listening socket made outside; this process runs inside, where ADDRESS can be reached.
Commands on standard input, a line each: `delay SECONDS` (one way), `cut` (nothing passes, nothing is told, as
with an unplugged cable), `restore`, and `break` (every connection is reset). The end of standard input ends
the relay.
"""

import asyncio
import contextlib
import socket
import sys
import time

CHUNK = 1 << 16
QUEUED = 256


class Relay:
    """One listening socket and the state of the cable behind it."""

    def __init__(self, address: str, port: int) -> None:
        self.target = (address, port)
        self.delay = 0.0
        self.plugged = asyncio.Event()
        self.plugged.set()
        self.writers: set[asyncio.StreamWriter] = set()

    def command(self, line: str) -> None:
        """Carry out one line of standard input."""
        match line.split():
            case ["delay", seconds]:
                self.delay = float(seconds)
            case ["cut"]:
                self.plugged.clear()
            case ["restore"]:
                self.plugged.set()
            case ["break"]:
                for writer in self.writers:
                    writer.transport.abort()
            case _:
                raise ValueError(f"unknown command {line!r}")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        with contextlib.suppress(OSError), contextlib.closing(writer):
            await self.plugged.wait()
            inner_reader, inner_writer = await asyncio.open_connection(*self.target)
            self.writers |= {writer, inner_writer}
            try:
                with contextlib.closing(inner_writer):
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self.carry(reader, inner_writer))
                        group.create_task(self.carry(inner_reader, writer))
            finally:
                self.writers -= {writer, inner_writer}

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: each piece leaves `delay` after it came, however many are under way."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED)

        async def receive() -> None:
            data = b"any"
            while data:
                try:
                    data = await reader.read(CHUNK)
                except OSError:
                    data = b""
                await queue.put((time.monotonic() + self.delay, data))

        receiving = asyncio.create_task(receive())
        try:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self.plugged.wait()
                if not data:
                    break
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            pass  # this side is gone; the other direction notices by itself
        finally:
            receiving.cancel()


async def main() -> None:
    """Serve until standard input ends."""
    descriptor, address, port = sys.argv[1:]
    relay = Relay(address, int(port))
    server = await asyncio.start_server(relay.serve, sock=socket.socket(fileno=int(descriptor)))
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    while line := await commands.readline():
        relay.command(line.decode())
        print("done", flush=True)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
