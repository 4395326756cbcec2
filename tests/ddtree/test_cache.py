"""K/V slots that grow, and the prefix cache."""

import numpy as np
import torch

from toolkit.ddtree.cache import Prefix, PrefixCache, SlotCache

CPU = torch.device("cpu")


def slot_cache():
    return SlotCache(2, 2, 4, torch.float32, CPU)


def test_slots_grow_and_keep_what_they_hold():
    cache = slot_cache()
    cache.reserve(1, 10)
    assert cache.capacity == 256
    row = torch.arange(16.0).view(1, 4, 4)
    cache.rows[1].index_copy_(0, torch.tensor([9]), row)
    cache.reserve(3, 300)
    assert cache.capacity == 512
    assert torch.equal(cache.save(0, 10)[1, 9], row[0])
    (_, (keys, values)) = cache.visible(0, 1, 10)
    assert keys.shape == values.shape == (1, 2, 10, 4)
    assert torch.equal(keys[0, :, 9], row[0, :2])
    assert torch.equal(values[0, :, 9], row[0, 2:])
    kept = cache.rows
    cache.reserve(2, 100)
    assert cache.rows is kept  # nothing to do


def test_rows_of_all_layers_are_written_where_they_belong():
    cache = slot_cache()
    cache.reserve(2, 8)
    rows = torch.randn(2, 2, 4, 4)  # two rows of two layers
    cache.write(torch.tensor([cache.capacity + 3, 1]), rows)
    for layer in range(2):
        assert torch.equal(cache.save(1, 8)[layer, 3], rows[0, layer])
        assert torch.equal(cache.save(0, 8)[layer, 1], rows[1, layer])
        assert cache.rows[layer].count_nonzero() == 32  # nothing else


def test_rows_move_as_if_all_were_read_first():
    cache = slot_cache()
    cache.reserve(2, 8)
    every = torch.arange(512.0)[:, None, None].expand(-1, 4, 4)
    for rows in cache.rows:
        rows.copy_(every)
    start = cache.capacity  # second slot
    cache.move_rows(start + torch.tensor([2, 3, 1]), start + torch.tensor([1, 2, 3]))
    moved = (cache.save(1, 5)[:, :, 0, 0] - start).tolist()
    assert moved == [[0, 2, 3, 1, 4]] * 2
    assert cache.save(0, 5)[0, :, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_slots_move_and_clear():
    cache = slot_cache()
    cache.reserve(3, 8)
    cache.restore(2, torch.ones(2, 6, 4, 4))
    cache.move_slot(2, 0, 6)
    cache.clear(2, 4)
    assert cache.save(0, 8)[:, :, 0, 0].tolist() == [[1.0] * 6 + [0.0] * 2] * 2
    assert cache.save(2, 8)[:, :, 0, 0].tolist() == [[0.0] * 4 + [1.0] * 2 + [0.0] * 2] * 2


def prefix(*tokens):
    return Prefix(np.array(tokens), (torch.tensor(tokens),))


def found(cache, salt, *tokens):
    count, saved = cache.longest(salt, tokens)
    return (count, saved[0].tolist()) if count else 0


def test_longest_common_prefix_within_one_salt():
    cache = PrefixCache(100)
    cache.insert("", prefix(1, 2, 3, 4))
    cache.insert("", prefix(1, 2, 5))
    cache.insert("salt", prefix(1, 2, 5, 6, 7))
    assert found(cache, "", 1, 2, 5, 6, 7) == (3, [1, 2, 5])
    assert found(cache, "", 1, 2, 3) == (3, [1, 2, 3, 4])
    assert found(cache, "salt", 1, 2, 3) == (2, [1, 2, 5, 6, 7])
    assert found(cache, "other", 1, 2, 3) == 0
    assert found(cache, "", 9) == 0
    assert found(cache, "") == 0


def test_continuations_replace_and_repetitions_add_nothing():
    cache = PrefixCache(100)
    cache.insert("", prefix(1, 2))
    cache.insert("", prefix(1, 2, 3))
    assert cache.tokens == 3
    cache.insert("", prefix(1, 2))
    cache.insert("", prefix(1, 2, 3))
    assert cache.tokens == 3
    cache.insert("salt", prefix(1, 2, 3))
    assert cache.tokens == 6
    cache.clear()
    assert cache.tokens == 0
    assert found(cache, "", 1, 2) == 0


def test_least_recently_used_goes_first():
    cache = PrefixCache(10)
    cache.insert("", prefix(1, 1, 1, 1))
    cache.insert("", prefix(2, 2, 2, 2))
    assert found(cache, "", 1)  # used again
    cache.insert("", prefix(3, 3, 3, 3))
    assert found(cache, "", 2) == 0
    assert found(cache, "", 1)
    assert found(cache, "", 3)
    assert cache.tokens == 8
    cache.insert("", prefix(*range(11)))  # longer than the whole cache
    assert cache.tokens == 8


def test_a_cache_of_no_tokens_keeps_nothing():
    cache = PrefixCache(0)
    cache.insert("", prefix(1))
    assert cache.tokens == 0
    assert found(cache, "", 1) == 0
