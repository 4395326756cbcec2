"""`python -m toolkit.ddtree.server`: load a model, serve it, end cleanly on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn

from toolkit.ddtree.server.app import create_app
from toolkit.ddtree.server.args import ServerArgs, UsageError, parse_args
from toolkit.ddtree.server.chat import ChatTemplate
from toolkit.ddtree.server.connections import TimedProtocol
from toolkit.ddtree.server.debug_log import DebugLog
from toolkit.ddtree.server.service import Service
from toolkit.ddtree.types import EngineConfig

if TYPE_CHECKING:
    from toolkit.ddtree.engine import Engine

log = logging.getLogger("toolkit.ddtree.server")

_BACKLOG = 2048
_CLOSE_SECONDS = 1  # for answers to reach their clients once generation has ended


class StartError(Exception):
    """The server cannot start; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; returns its exit code: 0 stopped, 1 failed, 2 refused to start."""
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        logging.basicConfig(
            level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        for warning in args.warnings:
            log.warning("%s", warning)
        with bind(args.host, args.port) as sock:
            service = _load(args)
            listen(sock)
            return asyncio.run(_serve(service, sock))
    except (UsageError, StartError) as error:
        print(f"ddtree server: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, before the slow loading; it listens once the model is there.

    Raises:
        StartError: the address is in use or not this machine's.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return sock


def listen(sock: socket.socket) -> None:
    """Start listening; another server may have come first since `bind`.

    Raises:
        StartError: the address is in use; two servers can both bind it until one of them listens.
    """
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def _load(args: ServerArgs) -> Service:
    """Load everything, what is quick to refuse first."""
    for path in (args.engine.model_path, args.engine.draft_model_path):
        if path is not None and not path.is_dir():
            raise UsageError(f"{path}: no such checkpoint directory")
    debug_log = _open_debug_log(args)
    try:
        chat_template = ChatTemplate(args.engine.model_path)
        return Service(args, _load_engine(args.engine), chat_template, debug_log)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        raise StartError(f"{args.engine.model_path}: there is not enough memory to load it") from None


def _lacks_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch's for the CPU raises nothing narrower than RuntimeError."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _open_debug_log(args: ServerArgs) -> DebugLog | None:
    if args.debug_file is None:
        return None
    try:
        return DebugLog(args.debug_file, args.debug_file_bytes)
    except OSError as error:
        raise UsageError(f"--speculative-ddtree-debug-file {args.debug_file}: {error.strerror}") from None


def _load_engine(config: EngineConfig) -> Engine:
    import torch

    from toolkit.ddtree.engine import Engine

    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu")
    return Engine(config)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process by the signal, not with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(service: Service, sock: socket.socket) -> int:
    config = uvicorn.Config(
        create_app(service),
        http=TimedProtocol,
        log_config=None,
        access_log=service.args.log_level == "debug",
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(service.args.shutdown_timeout) + _CLOSE_SECONDS,
    )
    server = _Server(config)
    service.runner.start(on_dead=lambda: _stop_soon(server))
    drain = _Drain(service, server)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain.begin)
    serving = asyncio.ensure_future(server.serve([sock]))
    await _announce(service, server, sock, serving)
    await serving
    await service.runner.stop()
    service.close()
    return 0 if service.runner.alive else 1


async def _announce(
    service: Service, server: _Server, sock: socket.socket, serving: asyncio.Future[None]
) -> None:
    """Print the ready line once connections are accepted."""
    while not (server.started or serving.done()):
        await asyncio.sleep(0.01)
    if server.started:
        host, port = sock.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"ready: http://{address} {service.describe()}", flush=True)


def _stop_soon(server: _Server) -> None:
    """Leave a moment in which `/health` says 503, then end."""

    def stop() -> None:
        server.should_exit = True

    asyncio.get_running_loop().call_later(1.0, stop)


class _Drain:
    """Ends serving: requests in flight get `shutdown_timeout` seconds, a second signal ends them at once."""

    def __init__(self, service: Service, server: _Server) -> None:
        self._service = service
        self._server = server
        self._deadline: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Accept nothing more."""
        runner = self._service.runner
        self._server.should_exit = True
        runner.draining = True
        if self._deadline is not None:
            runner.abort_all()
            return
        seconds = self._service.args.shutdown_timeout
        log.info("stopping; %d request(s) in flight get %g s", runner.in_flight, seconds)
        self._deadline = asyncio.get_running_loop().call_later(seconds, runner.abort_all)


if __name__ == "__main__":
    sys.exit(main())
