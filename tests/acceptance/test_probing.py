"""The near-tie rule's arithmetic, and judgements."""

import pytest

from toolkit.acceptance.exchange import EndpointError, Generation
from toolkit.acceptance.probing import (
    Difference,
    Judgement,
    Output,
    PlainDecoder,
    first_difference,
    near_tie_delta,
)


@pytest.mark.parametrize(
    ("dtype", "options", "delta"),
    [
        ("float32", {}, 1e-3),
        (None, {}, 1e-3),
        ("bfloat16", {}, 0.25),
        ("bfloat16", {"top_logit": 7.9}, 0.125),
        ("bfloat16", {"top_logit": 16.0}, 0.5),
        ("bfloat16", {"top_logit": 31.0}, 0.5),
        ("bfloat16", {"top_logit": 31.0, "fp8_kv_cache": True}, 1.0),
        ("float32", {"fp8_kv_cache": True}, 2e-3),
    ],
)
def test_delta(dtype, options, delta):
    assert near_tie_delta(dtype, **options) == delta


def difference(near_tie):
    return Difference(0, 1, 5, 6, near_tie)


@pytest.mark.parametrize(
    ("positions", "found", "equal", "too_many"),
    [
        (100, [], True, False),
        (100, [True], True, False),
        (99, [True], False, True),
        (1000, [True] * 10, True, False),
        (1000, [True] * 11, False, True),
        (1000, [False], False, False),
        (1000, [None], False, False),
    ],
)
def test_at_most_one_percent_of_near_ties_is_equal(positions, found, equal, too_many):
    judgement = Judgement(positions, tuple(map(difference, found)))
    assert (judgement.equal, judgement.too_many) == (equal, too_many)


class Model:
    """Answers probes: the next token is the number of tokens; token 99 lies 0.5 below it."""

    def __init__(self, *, bias=True):
        self.asked = []
        self.flushes = 0
        self.bias = bias

    def __call__(self, asks):
        self.asked += asks
        if any(ask.logit_bias for ask in asks) and not self.bias:
            raise EndpointError("no logit_bias", status=400)
        return [
            Generation("", output_ids=(99 if ask.logit_bias.get(99, 0) >= 0.5 else len(ask.prompt),))
            for ask in asks
        ]

    def flush(self):
        self.flushes += 1
        return True


def decoder(model, isolation="salt"):
    return PlainDecoder(ask=model, isolation=isolation, salt="s", flush=model.flush)


def test_each_prefix_is_probed_once_and_shortest_first():
    model = Model()
    one = decoder(model)
    outputs = [Output((7, 7), (2, 3, 4)), Output((8, 8), (2, 3, 4))]
    assert one.judge(outputs, delta=1e-3).equal
    assert [len(ask.prompt) for ask in model.asked] == [3, 3, 4, 4]
    assert one.judge(outputs, delta=1e-3).positions == 4
    assert len(model.asked) == 4
    assert {ask.max_new_tokens for ask in model.asked} == {1}


def test_the_first_token_is_not_judged_unless_asked_for():
    outputs = [Output((7, 7), (55, 3, 4))]
    assert decoder(Model()).judge(outputs, delta=1e-3).equal
    assert not decoder(Model()).judge(outputs, delta=1e-3, start=0).equal


@pytest.mark.parametrize(("delta", "near_tie"), [(0.5, True), (0.25, False)])
def test_a_near_tie_is_within_delta(delta, near_tie):
    judgement = decoder(Model()).judge([Output((7,), (1, 99, 3))], delta=delta)
    assert [d.near_tie for d in judgement.differences] == [near_tie]
    assert judgement.differences[0].plain == 2


def test_without_logit_bias_it_is_open():
    judgement = decoder(Model(bias=False)).judge([Output((7,), (1, 99, 3))], delta=1.0)
    assert judgement.open == 1
    assert not judgement.equal


def test_flushing_precedes_every_batch_of_probes():
    model = Model()
    decoder(model, "flush").judge([Output((7,), (1, 99, 3))], delta=1.0)
    assert model.flushes == 2
    assert {ask.salt for ask in model.asked} == {None}


def test_a_cache_that_will_not_flush_is_an_error():
    model = Model()
    model.flush = lambda: False
    with pytest.raises(EndpointError, match="could not be flushed"):
        decoder(model, "flush").learn([Output((7,), (1, 2))])


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (), None), ((4,), (5,), 0)],
)
def test_first_difference(first, second, place):
    assert first_difference(first, second) == place
