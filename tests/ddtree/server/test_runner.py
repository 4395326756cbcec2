"""The runner around a real engine, with faults injected into it."""

import asyncio

import pytest

from toolkit.ddtree.engine import Engine
from toolkit.ddtree.server.errors import ApiError
from toolkit.ddtree.server.runner import EngineRunner
from toolkit.ddtree.types import EngineConfig, FinishReason, Request, SamplingParams


class _Ear:
    def __init__(self):
        self.tokens, self.ended = 0, 0

    def on_output(self, generation, output, now):
        self.tokens += len(output.token_ids)

    def on_end(self, generation, now):
        self.ended += 1


@pytest.fixture(scope="module")
def engine(tiny_pair):
    return Engine(EngineConfig(tiny_pair.target, tiny_pair.drafter, threads=1))


def _request(rid="r", count=8):
    return Request(rid, (5, 6, 7), SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True))


async def _finish(runner, generations):
    async for _ in runner.updates(generations):
        pass


def _run(engine, scenario):
    """Run `scenario(runner, ear)` on a runner that is started and stopped around it."""

    async def main():
        ear, deaths = _Ear(), []
        runner = EngineRunner(engine, 8, ear)
        runner.start(on_dead=lambda: deaths.append(runner.dead))
        try:
            return await asyncio.wait_for(scenario(runner, ear), 60), deaths
        finally:
            await runner.stop()

    return asyncio.run(main())


def test_a_request_runs_and_is_observed_once(engine):
    async def scenario(runner, ear):
        generations = runner.submit([_request("a"), _request("b")])
        await _finish(runner, generations)
        assert [len(generation.output_ids) for generation in generations] == [8, 8]
        assert (ear.tokens, ear.ended, runner.in_flight) == (16, 2, 0)

    _run(engine, scenario)


def test_an_id_may_be_used_again_at_once_after_an_abort(engine):
    async def scenario(runner, ear):
        (first,) = runner.submit([_request("same", 300)])
        with pytest.raises(ApiError, match="in use"):
            runner.submit([_request("same")])
        runner.abort(first)
        (second,) = runner.submit([_request("same")])
        await _finish(runner, [second])
        assert first.finish is FinishReason.ABORT
        assert second.finish is FinishReason.LENGTH
        assert len(second.output_ids) == 8

    _run(engine, scenario)


def test_closing_the_updates_aborts_what_still_runs(engine):
    async def scenario(runner, ear):
        generations = runner.submit([_request("long", 300)])
        updates = runner.updates(generations)
        await anext(updates)
        await updates.aclose()
        assert runner.in_flight == 0
        running = await runner.call(lambda engine: engine.stats.running)
        assert running == 0

    _run(engine, scenario)


def test_failures_without_a_token_in_between_make_it_dead(engine, monkeypatch):
    def fail():
        raise RuntimeError("injected")

    async def scenario(runner, ear):
        for count in range(5):
            assert runner.alive, count
            generations = runner.submit([_request()])
            with monkeypatch.context() as patch:
                patch.setattr(engine, "_prefill", lambda joined: fail())
                await _finish(runner, generations)
            assert generations[0].error.status == 500
        assert not runner.alive
        with pytest.raises(ApiError) as refused:
            runner.submit([_request()])
        assert refused.value.status == 503
        with pytest.raises(ApiError):
            await runner.call(lambda engine: None)

    _, deaths = _run(engine, scenario)
    assert len(deaths) == 1


def test_logits_that_are_no_numbers_fail_the_request_and_not_the_server(engine, monkeypatch):
    real = engine.models.target.logits

    async def scenario(runner, ear):
        with monkeypatch.context() as patch:
            patch.setattr(engine.models.target, "logits", lambda hidden: real(hidden) * float("nan"))
            (generation,) = runner.submit([_request()])
            await _finish(runner, [generation])
        assert generation.error.status == 500
        (generation,) = runner.submit([_request()])
        await _finish(runner, [generation])
        assert generation.finish is FinishReason.LENGTH

    _run(engine, scenario)


def test_a_failure_empties_the_cache_it_may_have_spoilt(engine, monkeypatch):
    def fail():
        raise RuntimeError("injected")

    async def scenario(runner, ear):
        await _finish(runner, runner.submit([_request()]))
        assert engine.stats.cached_tokens > 0
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_round", fail)
            await _finish(runner, runner.submit([_request()]))
        assert await runner.call(lambda engine: engine.stats.cached_tokens) == 0

    _run(engine, scenario)


def test_tokens_in_between_keep_it_alive(engine, monkeypatch):
    def fail(joined):
        raise RuntimeError("injected")

    async def scenario(runner, ear):
        for _ in range(6):
            with monkeypatch.context() as patch:
                patch.setattr(engine, "_prefill", fail)
                await _finish(runner, runner.submit([_request()]))
            generations = runner.submit([_request()])
            await _finish(runner, generations)
            assert generations[0].finish is FinishReason.LENGTH
        assert runner.alive

    _run(engine, scenario)


def test_a_death_answers_those_who_wait(engine, monkeypatch):
    def die(*_):
        raise SystemExit

    async def scenario(runner, ear):
        (generation,) = runner.submit([_request("r", 300)])
        with pytest.raises(ApiError) as refused:
            await runner.call(die)
        await _finish(runner, [generation])
        return refused.value.status, generation.error.status

    statuses, deaths = _run(engine, scenario)
    assert statuses == (500, 500)
    assert len(deaths) == 1
