"""One engine on one thread, and the asyncio side that submits requests and hears of their tokens."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from toolkit.ddtree.server.errors import ApiError
from toolkit.ddtree.server.generation import Generation
from toolkit.ddtree.types import FinishReason, Output, Request

if TYPE_CHECKING:
    from toolkit.ddtree.engine import Engine

log = logging.getLogger(__name__)
Result = TypeVar("Result")

_FAILED = "The engine failed while decoding this request; see the server's log."
_MAX_FAILED_STEPS = 5  # without a token in between, before the engine counts as dead
_JOIN_SECONDS = 10.0


class Observer(Protocol):
    """Hears of every round's outputs on the event loop, before the clients do."""

    def on_output(self, generation: Generation, output: Output, now: float) -> None:
        """Called before `output` is added to `generation`."""

    def on_end(self, generation: Generation, now: float) -> None:
        """Called once a generation has ended, for whatever reason."""


class EngineRunner:
    """Runs `engine.step()` on a thread of its own while there is work.

    All methods except the thread's own belong to the event loop's thread. Commands reach the engine
    between rounds through a queue, so the engine itself needs no lock.

    A round that raises fails the requests in the engine, and it goes on. A thread that dies, or a fifth
    failure without a token in between, makes it dead: `on_dead` is called and nothing is accepted any more.

    Args:
        engine: used by the thread alone from `start` on.
        capacity: requests in flight, running and waiting; more are refused with 503.
        observer: hears of outputs.
    """

    def __init__(self, engine: Engine, capacity: int, observer: Observer) -> None:
        self.engine = engine
        self.capacity = capacity
        self.dead: str | None = None
        self.draining = False
        self._observer = observer
        self._on_dead: Callable[[], None] = lambda: None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._generations: dict[str, Generation] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._ids = itertools.count()
        self._live: set[str] = set()  # the thread's own: requests inside the engine
        self._stopping = False
        self._failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def in_flight(self) -> int:
        """How many requests were accepted and have not ended."""
        return len(self._generations)

    @property
    def alive(self) -> bool:
        """Whether the engine still works."""
        return self.dead is None

    def start(self, on_dead: Callable[[], None]) -> None:
        """Start the thread; call it on the event loop that will use this object.

        `on_dead` is called on that loop when the engine can no longer work.
        """
        self._on_dead = on_dead
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current round."""
        self._commands.put(self._end)
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)

    def submit(self, requests: Sequence[Request], *, counted: bool = True) -> list[Generation]:
        """Hand all of `requests` to the engine, or none.

        Raises:
            ApiError: 503 if the queue is full, the server is stopping, or the engine is dead; 400 if a
                request id is in use.
        """
        self._check_open(len(requests))
        self._check_ids([request.rid for request in requests])
        changed = asyncio.Event()
        return [self._submit(request, changed, counted) for request in requests]

    def _submit(self, request: Request, changed: asyncio.Event, counted: bool) -> Generation:
        # A client may reuse an id while the thread still works on the aborted first use of it.
        own = replace(request, rid=str(next(self._ids)))
        generation = Generation(request.rid, own, changed, counted)
        self._generations[own.rid] = generation
        self._commands.put(lambda: self._add(own))
        return generation

    def abort(self, generation: Generation) -> None:
        """End a request whose client no longer waits; its tokens so far stay counted."""
        if self._generations.pop(generation.request.rid, None) is None:
            return
        generation.finish = FinishReason.ABORT
        self._observer.on_end(generation, time.monotonic())
        self._commands.put(lambda: self._abort(generation.request.rid))

    def abort_all(self) -> None:
        """End every request in flight and tell their clients."""
        for generation in list(self._generations.values()):
            self.abort(generation)
            generation.fresh = True
            generation.changed.set()

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run `function(engine)` on the engine's thread, between two rounds."""
        if self.dead is not None:
            raise ApiError(503, self.dead)
        future: asyncio.Future[Result] = self._loop.create_future()

        def command() -> None:
            try:
                settle = partial(future.set_result, function(self.engine))
            except Exception as error:
                settle = partial(future.set_exception, error)
            self._loop.call_soon_threadsafe(_settle, future, settle)

        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._commands.put(command)
        return await future

    async def updates(
        self, generations: Sequence[Generation]
    ) -> AsyncGenerator[tuple[int, Generation], None]:
        """Yield (index, generation) whenever one has new tokens or ended; aborts the rest when closed."""
        changed = generations[0].changed
        pending = dict(enumerate(generations))
        try:
            while pending:
                await changed.wait()
                changed.clear()
                for index, generation in list(pending.items()):
                    if not generation.fresh:
                        continue
                    generation.fresh = False
                    if generation.done:
                        del pending[index]
                    yield index, generation
        finally:
            for generation in pending.values():
                self.abort(generation)

    def _check_open(self, count: int) -> None:
        if self.dead is not None:
            raise ApiError(503, self.dead)
        if self.draining:
            raise ApiError(503, "The server is shutting down.")
        if count > self.capacity:
            raise ApiError(
                400, f"A batch of {count} requests is more than this server queues ({self.capacity})."
            )
        if self.in_flight + count > self.capacity:
            raise ApiError(503, "The queue is full: try again later.", code="queue_full")

    def _check_ids(self, rids: Sequence[str]) -> None:
        used = {generation.rid for generation in self._generations.values()}
        for rid in rids:
            if rid in used:
                raise ApiError(400, f"The request id `{rid}` is in use.", param="rid")
            used.add(rid)

    def _deliver(self, outputs: Sequence[Output], now: float) -> None:
        for output in outputs:
            generation = self._generations.get(output.rid)
            if generation is None:
                continue  # aborted while the round ran
            self._observer.on_output(generation, output, now)
            generation.take(output, now)
            if output.finish is FinishReason.ABORT:  # not asked for here: the engine gave it up
                log.error("request %r (%s in the engine) was given up", generation.rid, output.rid)
                generation.error = ApiError(500, _FAILED)
            self._tell(generation, now)

    def _fail(self, rids: Sequence[str], error: ApiError) -> None:
        for rid in rids:
            generation = self._generations.get(rid)
            if generation is not None:
                generation.error = error
                self._tell(generation, time.monotonic())

    def _tell(self, generation: Generation, now: float) -> None:
        if generation.done:
            del self._generations[generation.request.rid]
            self._observer.on_end(generation, now)
        generation.fresh = True
        generation.changed.set()

    def _died(self, reason: str) -> None:
        self.dead = reason
        self._fail(list(self._generations), ApiError(500, reason))
        for future in list(self._calls):
            _settle(future, partial(future.set_exception, ApiError(500, reason)))
        self._on_dead()

    # From here on: the engine's thread.

    def _run(self) -> None:
        reason = "The engine thread ended."
        try:
            while not self._stopping:
                self._take_commands()
                if self.engine.has_work and not self._stopping:
                    self._step()
        except BaseException:
            log.critical("the engine thread died", exc_info=True)
            reason = "The engine failed; the server is restarting."
        if not self._stopping:
            self._loop.call_soon_threadsafe(self._died, reason)

    def _take_commands(self) -> None:
        if not self.engine.has_work:
            self._obey(self._commands.get())
        while not self._stopping:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            self._obey(command)

    def _obey(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:
            self._recover()

    def _end(self) -> None:
        self._stopping = True

    def _add(self, request: Request) -> None:
        try:
            self.engine.add(request)
        except ValueError as error:
            refusal = ApiError(400, str(error))
        except Exception:
            log.exception("request %s could not be added", request.rid)
            refusal = ApiError(500, "The engine could not take this request; see the server's log.")
        else:
            self._live.add(request.rid)
            return
        self._loop.call_soon_threadsafe(self._fail, [request.rid], refusal)

    def _abort(self, rid: str) -> None:
        if rid in self._live:
            self._live.discard(rid)
            self.engine.abort(rid)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception:
            self._recover()
            return
        if any(output.token_ids for output in outputs):
            self._failed_steps = 0
        self._live -= {output.rid for output in outputs if output.finish is not None}
        if outputs:
            self._loop.call_soon_threadsafe(self._deliver, outputs, time.monotonic())

    def _recover(self) -> None:
        """Drop every request in the engine after it raised, and the cache it may have spoilt."""
        log.exception("the engine failed; ending its %d request(s)", len(self._live))
        self._failed_steps += 1
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise RuntimeError(f"the engine failed {self._failed_steps} times without a token in between")
        failed = sorted(self._live)
        for rid in failed:
            self._abort(rid)
        self.engine.flush_cache()
        self._loop.call_soon_threadsafe(self._fail, failed, ApiError(500, _FAILED))


def _settle(future: asyncio.Future[Result], settle: Callable[[], None]) -> None:
    if not future.done():  # cancelled meanwhile
        settle()
