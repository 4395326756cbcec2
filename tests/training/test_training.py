"""The parts of the pair's training that can be wrong without a GPU noticing."""

import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from toolkit.ddtree.policies import expand
from toolkit.ddtree.types import TreeLimits
from training import data
from training.evaluate import distinct_bigram_ratio, replay
from training.generate import continue_rows
from training.modules import Dimensions, Drafter, Target, draft_blocks, rope_table
from training.optimiser import Optimiser, orthogonalise

torch.set_num_threads(1)
DIMS = Dimensions(
    vocab=97, hidden=48, intermediate=64, layers=3, heads=4, kv_heads=2, head_dim=16, max_positions=64
)
TABLE = rope_table(DIMS, torch.device("cpu"))


@pytest.fixture
def target():
    torch.manual_seed(0)
    model = Target(DIMS)
    for parameter in model.parameters():  # far from the initial values, where every norm weight is one
        torch.nn.init.normal_(parameter, mean=0.1 if parameter.dim() == 1 else 0.0, std=0.3)
    return model.requires_grad_(False)


def test_the_target_is_qwen3(target):
    config = Qwen3Config(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
        rope_theta=10000.0, rms_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    reference = Qwen3ForCausalLM(config).eval()
    reference.model.load_state_dict(target.state_dict())
    reference.tie_weights()
    ids = torch.randint(2, 97, (2, 33))
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True)
    hidden, features = target(ids, TABLE, (0, 1))
    torch.testing.assert_close(target.logits(hidden), expected.logits, rtol=1e-4, atol=1e-4)
    captured = torch.cat(expected.hidden_states[1:3], -1)
    torch.testing.assert_close(features, captured, rtol=1e-4, atol=1e-4)


def test_decoding_with_a_cache_equals_the_full_forward(target):
    prompts = torch.randint(2, 97, (3, 9))
    rows = continue_rows(target, prompts, torch.tensor([4, 9, 1]), 24, 0.0, TABLE, torch.Generator())
    choices = target.logits(target(rows.clone(), TABLE)[0]).argmax(-1)
    for row, (prompt, length) in enumerate(zip(prompts, (4, 9, 1), strict=True)):
        assert rows[row, :length].tolist() == prompt[:length].tolist()
        assert rows[row, length:].tolist() == choices[row, length - 1 : -1].tolist()


def test_a_block_sees_its_own_context_and_slots_only():
    ids = torch.arange(10, 22)[None]
    slots, positions, mask = draft_blocks(ids, torch.tensor([[2, 5]]), 4, 1)
    assert slots.tolist() == [[12, 1, 1, 1, 15, 1, 1, 1]]
    assert positions.tolist() == [[2, 3, 4, 5, 5, 6, 7, 8]]
    assert mask.shape == (1, 1, 8, 20)
    for query in range(8):
        seen = mask[0, 0, query].nonzero()[:, 0].tolist()
        context, own = ([0, 1], range(12, 16)) if query < 4 else ([0, 1, 2, 3, 4], range(16, 20))
        assert seen == [*context, *own]


def test_blocks_drafted_together_equal_blocks_drafted_alone(target):
    torch.manual_seed(1)
    drafter = Drafter(DIMS, 2).requires_grad_(False)
    ids = torch.randint(2, 97, (1, 40))
    features = target(ids, TABLE, (0, 1))[1]

    def draft(anchors, known):
        slots, positions, mask = draft_blocks(ids[:, :known], torch.tensor([anchors]), 4, 1)
        noise = target.embed_tokens(slots)
        return drafter(noise, features[:, :known], positions, mask, TABLE).unflatten(1, (-1, 4))[0]

    together = draft([3, 17, 30], 40)
    for index, anchor in enumerate((3, 17, 30)):
        torch.testing.assert_close(draft([anchor], anchor + 1)[0], together[index], rtol=1e-4, atol=1e-5)


def test_replay_counts_the_bonus_token():
    tokens = [[[5, 6], [7, 8]]] * 6
    scores = [[[math.log(0.6), math.log(0.4)]] * 2] * 6
    text = [1, 5, 7, 3, 6, 8, 3, 9, 9]

    def replayed(budget, cap):
        return replay(text, tokens, lambda anchor: expand(scores[anchor], TreeLimits(budget, cap)))

    assert replayed(budget=2, cap=1) == (6, 4)  # 5 7 accepted, then misses
    assert replayed(budget=6, cap=2) == (6, 2)


def test_distinct_bigram_ratio():
    assert distinct_bigram_ratio([1, 2, 1, 2, 1]) == 0.5
    assert distinct_bigram_ratio([1, 2, 3]) == 1.0


def test_orthogonalise_levels_the_singular_values():
    matrices = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_the_optimiser_learns(target):
    model = Target(DIMS)
    optimiser = Optimiser(model, muon_lr=0.02, adam_lr=0.003)
    rows = torch.arange(2, 34).repeat(2)[None, :48] % 31 + 2
    losses = []
    for _ in range(40):
        hidden, _ = model(rows[:, :-1], TABLE)
        loss = torch.nn.functional.cross_entropy(model.logits(hidden)[0], rows[0, 1:])
        loss.backward()
        optimiser.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def source(label, lines=40):
    return "".join(f"def {label}_number_{i}(argument, other):\n    return argument\n" for i in range(lines))


def test_the_split_is_by_package_and_keeps_copies_out(tmp_path):
    write(tmp_path, "networkx/graph.py", source("graph"))
    write(tmp_path, "other/own.py", source("own"))
    write(tmp_path, "other/again.py", source("own").replace("\n", "  \n"))
    write(tmp_path, "other/vendored.py", source("graph", 30) + source("extra", 30))
    write(tmp_path, "other/numbers.py", "x = [" + "1234567890, " * 100 + "]\n")
    write(tmp_path, "other/empty.py", "")
    corpus = data.collect([tmp_path])
    assert corpus.held_out == [source("graph")]
    assert len(corpus.train) == 1
    assert corpus.train[0].replace("  \n", "\n") == source("own")
    assert corpus.dropped == {"unsuitable": 2, "duplicate": 1, "near-copy of held-out": 1}


def test_a_side_without_files_is_an_error(tmp_path):
    write(tmp_path, "other/own.py", source("own"))
    with pytest.raises(ValueError, match="held out"):
        data.collect([tmp_path])


def test_the_stream_ends_every_text():
    tokenizer = data.train_tokenizer([source("graph")], 300)
    stream = data.encode(tokenizer, ["def a():", "def b():"])
    assert stream.tolist().count(data.EOS) == 2
    assert stream[-1] == data.EOS
    assert tokenizer.decode(stream.tolist()) == "def a():def b():"
