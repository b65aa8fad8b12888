"""The engine's own thread, and the way between it and the event loop.

One thread owns the `Engine` and steps it while there is work. The event loop hands it orders (add, cancel)
through a queue, and gets what each forward gave by one `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mars_lm.errors import MarsError
from mars_lm.serving.errors import ApiError, ClientLeftError, out_of_time, shutting_down
from mars_lm.serving.knob import Defaults, Knob
from mars_lm.settings import DecodingSettings

if TYPE_CHECKING:
    from mars_lm.decoding import Engine, GenerationResult, StepOutput
    from mars_lm.serving.metrics import Metrics

logger = logging.getLogger("mars_lm.serving")

# A forward that fails may be one request's doing; so many in a row are the machine's.
FAILURES_THAT_END = 3


@dataclasses.dataclass(frozen=True)
class Job:
    """One answer to generate.

    Attributes:
        prompt_ids: the prompt's token ids.
        settings: what the request asks for, but for the live fields.
        chosen: the live fields that the request chose itself.
    """

    prompt_ids: Sequence[int]
    settings: DecodingSettings
    chosen: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one forward gave one answer; `result` is there with the last piece."""

    index: int
    output: StepOutput
    result: GenerationResult | None


class _Answer:
    """One job while it runs. Belongs to the engine's thread."""

    def __init__(self, generation: Generation, index: int, job: Job) -> None:
        self.generation, self.index, self.job = generation, index, job
        self.live: dict[str, Any] = {}
        self.last_token = 0.0


class Generation:
    """The answers of one HTTP request, as they come. Made by `Runner.submit`; used on the event loop only."""

    def __init__(self, runner: Runner, jobs: Sequence[Job]) -> None:
        self._runner = runner
        self.submitted = time.perf_counter()
        self.answers = [_Answer(self, index, job) for index, job in enumerate(jobs)]
        self.unfinished = len(jobs)
        self.added: asyncio.Future[None] = runner.loop.create_future()
        self._pieces: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        self._failed = False
        self._timer = runner.loop.call_later(runner.seconds, lambda: self.fail(out_of_time(runner.seconds)))

    async def pieces(self, *, silence: float | None = None) -> AsyncIterator[Piece | None]:
        """Every forward's piece, until all answers have ended.

        Args:
            silence: give None whenever nothing came for so many seconds.
        Raises:
            ApiError: time is over, the server ends, or the engine failed.
            ClientLeftError: `leave` was called.
        """
        open_answers, loop = len(self.answers), self._runner.loop
        heard = loop.time()
        watch: asyncio.TimerHandle | None = None

        def look() -> None:
            """One timer for the whole stream: setting one for each piece would cost as much as sending it."""
            nonlocal heard, watch
            assert silence is not None
            if loop.time() >= heard + silence:
                heard = loop.time()
                if self._pieces.empty():  # else there is something, which a slow client has not taken yet
                    self._pieces.put_nowait(None)
            watch = loop.call_at(heard + silence, look)

        if silence is not None:
            watch = loop.call_at(heard + silence, look)
        try:
            while open_answers:
                piece = await self._pieces.get()
                heard = loop.time()
                if isinstance(piece, Exception):
                    raise piece
                open_answers -= piece is not None and piece.result is not None
                yield piece
        finally:
            if watch is not None:
                watch.cancel()

    def leave(self) -> None:
        """The client has gone: free the rows at the next forward."""
        self.fail(ClientLeftError())

    def fail(self, error: Exception) -> None:
        """End the answers that still run, and raise `error` where they are awaited."""
        if self._failed or not self.unfinished:
            return
        self._failed = True
        self._timer.cancel()
        self._pieces.put_nowait(error)
        if not self.added.done():
            self.added.set_exception(error)
            self.added.exception()  # whoever awaited may have gone
        self._runner.order_cancel(self)

    def choose(self, **chosen: Any) -> None:
        """Change live fields of the answers while they run, as if the request had chosen them."""
        self._runner.order_choose(self, chosen)

    def deliver(self, piece: Piece) -> None:
        """Take one piece from the engine's thread."""
        if piece.output.finish_reason == "error":
            assert piece.result is not None
            self.fail(ApiError(500, piece.result.error or "The model failed.", code="model_error"))
        if not self._failed:
            self._pieces.put_nowait(piece)
        if piece.result is not None:
            self.unfinished -= 1
            if not self.unfinished:
                self._timer.cancel()


class Runner:
    """Runs an engine for an event loop.

    Args:
        engine: the engine; from `start` on the runner's thread alone may touch it.
        knob: the live defaults.
        metrics: what is counted.
        max_queue: answers that may wait for a row; more are refused.
        seconds: the time that a request may take, waiting included.
    """

    def __init__(
        self, engine: Engine, knob: Knob, metrics: Metrics, *, max_queue: int = 64, seconds: float = 300.0
    ) -> None:
        self.engine, self.knob, self.metrics = engine, knob, metrics
        self.max_queue, self.seconds = max_queue, seconds
        self.rows: int = engine.max_rows
        self.in_flight = 0  # answers that are accepted and have not left their row yet
        self.draining = False
        self.broken: str | None = None
        self.loop: asyncio.AbstractEventLoop
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[int, _Answer] = {}
        self._open: set[Generation] = set()
        self._seen: Defaults | None = None
        self._seconds_per_answer = 1.0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._thread = threading.Thread(target=self._run, name="mars-engine", daemon=True)

    # On the event loop.

    def start(self) -> None:
        """Start the engine's thread; called on the event loop."""
        self.loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def running(self) -> int:
        """Occupied rows."""
        return min(self.in_flight, self.rows)

    @property
    def waiting(self) -> int:
        """Accepted answers without a row."""
        return self.in_flight - self.running

    async def submit(self, jobs: Sequence[Job]) -> Generation:
        """Hand answers to the engine; all of them or none.

        Raises:
            ApiError: the queue is full, the server ends, or more answers than could ever wait.
            MarsError: the engine refuses one.
        """
        if self.draining:
            raise shutting_down()
        if self.broken:
            raise ApiError(503, self.broken, code="engine_failed")
        room = self.rows + self.max_queue
        if len(jobs) > room:
            raise ApiError(
                400,
                f"The request asks for {len(jobs)} answers, and this server takes {room} at a time: ask for "
                "fewer.",
                code="too_many_answers",
            )
        if self.in_flight + len(jobs) > room:
            raise ApiError(
                429,
                f"The server is busy: {self.waiting} answers wait already; try again later.",
                code="queue_full",
                headers={"Retry-After": str(self._retry_after())},
            )
        generation = Generation(self, jobs)
        self.in_flight += len(jobs)
        self._quiet.clear()
        self._open.add(generation)
        self._orders.put(partial(self._add, generation))
        try:
            await generation.added
        except asyncio.CancelledError:
            generation.leave()
            raise
        return generation

    def order_cancel(self, generation: Generation) -> None:
        self._orders.put(partial(self._cancel, generation))

    def order_choose(self, generation: Generation, chosen: Mapping[str, Any]) -> None:
        self._orders.put(partial(self._choose, generation, chosen))

    async def drain(self, seconds: float) -> None:
        """Take nothing more; let what runs finish, and end after `seconds` what has not."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), seconds)
            return
        for generation in list(self._open):
            generation.fail(shutting_down())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), 10.0)

    async def stop(self) -> None:
        """End the engine's thread, with whatever runs."""
        self.draining = True
        for generation in list(self._open):
            generation.fail(shutting_down())
        self._orders.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 30.0)

    def _retry_after(self) -> int:
        """Seconds in which the queue should be half as long."""
        seconds = self._seconds_per_answer * max(self.waiting, 1) / 2 / self.rows
        return min(max(math.ceil(seconds), 1), 60)

    def _deliver(self, pieces: list[tuple[Generation, Piece]]) -> None:
        for generation, piece in pieces:
            generation.deliver(piece)
            if piece.result is not None:
                took = time.perf_counter() - generation.submitted
                self._seconds_per_answer += 0.1 * (took - self._seconds_per_answer)
                self._settle(generation, 1)

    def _settle(self, generation: Generation, answers: int) -> None:
        """These answers are over: their rows are free."""
        self.in_flight -= answers
        if not generation.unfinished:
            self._open.discard(generation)
        if not self.in_flight:
            self._quiet.set()

    def _accepted(self, generation: Generation) -> None:
        if not generation.added.done():
            generation.added.set_result(None)

    def _drop(self, generation: Generation, error: Exception | None, answers: int) -> None:
        """Answers that ended without a last piece: refused, cancelled, or lost with the engine."""
        if error is not None:
            if not generation.added.done():
                generation.added.set_exception(error)
                generation.added.exception()
            generation.fail(error)
        generation.unfinished -= answers
        self._settle(generation, answers)

    # On the engine's thread.

    def _run(self) -> None:
        failures = 0
        while True:
            try:
                if not self._take_orders():
                    return
                self._turn_knob()
                if self.engine.has_work:
                    self._hand_out(self.engine.step())
                    failures = 0
            except Exception as error:
                failures += 1
                self._fall(error, failures)
                if failures >= FAILURES_THAT_END:
                    return

    def _take_orders(self) -> bool:
        """Carry out what was ordered; wait for an order if there is nothing else to do. False: the end."""
        while True:
            try:
                order = self._orders.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _turn_knob(self) -> None:
        defaults = self.knob.defaults
        if defaults is self._seen:
            return
        self._seen = defaults
        for request_id, answer in self._answers.items():
            self._set_live(request_id, answer)

    def _set_live(self, request_id: int, answer: _Answer) -> None:
        live = self.knob.resolve(answer.job.chosen)
        if live == answer.live:
            return
        try:
            self.engine.update(request_id, **live)
            answer.live = live
        except MarsError as error:  # its own choice does not go with the new defaults: it keeps the old ones
            logger.info("a running request keeps its settings (%s)", type(error).__name__)

    def _add(self, generation: Generation) -> None:
        if generation._failed:  # gone before its turn; `order_cancel` follows, and finds nothing
            return self._post(self._drop, generation, None, len(generation.answers))
        added = []
        try:
            for answer in generation.answers:
                answer.live = self.knob.resolve(answer.job.chosen)
                settings = dataclasses.replace(answer.job.settings, **answer.live)
                added.append(self.engine.add(answer.job.prompt_ids, settings))
        except Exception as error:
            for request_id in added:
                self._forget(request_id)
            if not isinstance(error, MarsError):
                logger.error("adding a request failed:\n%s", where(error))
                error = ApiError(500, "The server failed at this request.", code="internal_error")
            return self._post(self._drop, generation, error, len(generation.answers))
        self._answers.update(zip(added, generation.answers, strict=True))
        self._post(self._accepted, generation)

    def _cancel(self, generation: Generation) -> None:
        mine = [i for i, answer in self._answers.items() if answer.generation is generation]
        for request_id in mine:
            del self._answers[request_id]
            self._count(self._forget(request_id))
        if mine:
            self._post(self._drop, generation, None, len(mine))

    def _choose(self, generation: Generation, chosen: Mapping[str, Any]) -> None:
        for request_id, answer in self._answers.items():
            if answer.generation is generation:
                answer.job = dataclasses.replace(answer.job, chosen={**answer.job.chosen, **chosen})
                self._set_live(request_id, answer)

    def _forget(self, request_id: int) -> GenerationResult | None:
        self.engine.cancel(request_id)
        return self.engine.result(request_id)

    def _hand_out(self, outputs: list[StepOutput]) -> None:
        now = time.perf_counter()
        pieces, given = [], []
        for output in outputs:
            answer = self._answers[output.request_id]
            tokens = len(output.new_token_ids)
            result = None
            if output.finish_reason is not None:
                del self._answers[output.request_id]
                result = self.engine.result(output.request_id)
                self._count(result)
            waited = now - (answer.last_token or answer.generation.submitted)
            given.append((tokens, waited, not answer.last_token))
            answer.last_token = now
            pieces.append((answer.generation, Piece(answer.index, output, result)))
        self.metrics.forward(given)
        self._post(self._deliver, pieces)

    def _count(self, result: GenerationResult | None) -> None:
        if result is not None:
            self.metrics.rejected_drafts.inc(result.rejected_drafts)

    def _fall(self, error: Exception, failures: int) -> None:
        """A forward failed: no row's state can be trusted, so every answer that runs ends with an error."""
        logger.error("a forward failed:\n%s", where(error))
        lost, self._answers = self._answers, {}
        for request_id in lost:
            with contextlib.suppress(Exception):
                self._forget(request_id)
        told = ApiError(500, "The server failed while it answered this request.", code="internal_error")
        for answer in lost.values():
            self._post(self._drop, answer.generation, told, 1)
        if failures >= FAILURES_THAT_END:
            self.broken = "The server's engine has failed and must be restarted."

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self.loop.call_soon_threadsafe(function, *arguments)


def where(error: BaseException) -> str:
    """An exception's type and place, without its message: that may hold a piece of somebody's prompt."""
    frames = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)))
    return f"{frames}{type(error).__name__}"
