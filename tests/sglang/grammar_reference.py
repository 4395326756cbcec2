"""`python grammar_reference.py < CASES`: constrained decoding by other means; runs in SGLang's environment.

Reads {"decode": [{"prompt", "tokens", "json_schema" or "regex"}], "trees": seeds}. Prints the plain greedy
tokens of each case, one full forward of the target a token, masked by xgrammar itself; and, for each seed,
how many rows of a random tree's masks differ from those of a grammar that is led along each node's path.
"""

import json
import sys

import on_cpu  # first: it stands for packages that the next ones import
import torch
import xgrammar
from safetensors.torch import load_file
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from transformers import AutoTokenizer

from toolkit.ddtree.models.config import read_target_config
from toolkit.ddtree.models.reference import target_forward
from toolkit.ddtree.sglang import grammar

BUNDLED = on_cpu.Path(__file__).parents[2] / "toolkit/ddtree/bundled/target"
CONFIG = read_target_config(BUNDLED)
TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED)
EOS, VOCABULARY = TOKENIZER.eos_token_id, CONFIG.vocab_size


def compiled(case):
    info = xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=VOCABULARY, stop_token_ids=[EOS])
    compiler = xgrammar.GrammarCompiler(info)
    if "regex" in case:
        return compiler.compile_regex(case["regex"])
    return compiler.compile_json_schema(case["json_schema"], any_whitespace=False)


def decode(case, weights):
    matcher = xgrammar.GrammarMatcher(compiled(case))
    tokens, mask = [], xgrammar.allocate_token_bitmask(1, VOCABULARY)
    while len(tokens) < case["tokens"] and not matcher.is_terminated():
        logits, _ = target_forward(CONFIG, weights, [*case["prompt"], *tokens])
        matcher.fill_next_token_bitmask(mask)
        row = logits[-1:].clone()
        xgrammar.apply_token_bitmask_inplace(row, mask)
        tokens.append(int(row.argmax()))
        assert matcher.accept_token(tokens[-1])
    return tokens


def random_tree(generator, matcher, nodes):
    """Tokens, parents and links of a tree, of which most tokens are allowed where they stand."""
    parents, tokens = [0], [0]
    paths = {0: []}
    for node in range(1, nodes + 1):
        parent = int(torch.randint(0, node, (), generator=generator))
        mask = rows_of(matcher, paths[parent])
        allowed = [t for t in range(VOCABULARY) if mask is not None and mask[t // 32] >> (t % 32) & 1]
        pick = allowed or list(range(VOCABULARY))
        if torch.rand((), generator=generator) < 0.2:
            pick = list(range(VOCABULARY))
        tokens.append(pick[int(torch.randint(0, len(pick), (), generator=generator))])
        parents.append(parent)
        paths[node] = [*paths[parent], tokens[-1]]
    children, siblings = [-1] * (nodes + 1), [-1] * (nodes + 1)
    for node in range(nodes, 0, -1):
        siblings[node], children[parents[node]] = children[parents[node]], node
    return tokens, children, siblings, paths


def rows_of(matcher, path):
    """The mask after a path of a matcher's fork, as integers; None where the path is not allowed or ends."""
    fork = matcher.fork()
    for token in path:
        if fork.is_terminated() or not fork.accept_token(token):
            return None
    if fork.is_terminated():
        return None
    mask = xgrammar.allocate_token_bitmask(1, VOCABULARY)
    fork.fill_next_token_bitmask(mask)
    return mask[0].tolist()


def wrong_rows(seed):
    """Of a tree behind a few committed tokens: rows that differ, and how many rows had a mask."""
    generator = torch.Generator().manual_seed(seed)
    backend = XGrammarGrammarBackend(TOKENIZER, VOCABULARY, [EOS], any_whitespace=False)
    own = backend.dispatch_regex(r'\{"(a|bb|ccc)": (true|false|[0-9]{1,3})\}')
    matcher = xgrammar.GrammarMatcher(own.ctx)
    for token in TOKENIZER.encode('{"')[: seed % 3]:
        own.accept_token(token)
        assert matcher.accept_token(token)
    tokens, children, siblings, paths = random_tree(generator, matcher, 24)
    first, free = 5, -1
    masks = torch.full((first + 25, (VOCABULARY + 31) // 32), free, dtype=torch.int32)
    grammar.fill(own, masks, first, tokens, children, siblings, VOCABULARY)
    expected = [rows_of(matcher, paths[node]) for node in range(25)]
    wrong = sum(
        masks[first + node].tolist() != (row or [free] * masks.shape[1]) for node, row in enumerate(expected)
    )
    wrong += int((masks[:first] != free).any())
    assert rows_of(own.matcher, []) == rows_of(matcher, [])  # it ends where it began
    return wrong, sum(row is not None for row in expected)


if __name__ == "__main__":
    told = json.load(sys.stdin)
    loaded = {name: value.float() for name, value in load_file(BUNDLED / "model.safetensors").items()}
    decoded = [decode(case, loaded) for case in told["decode"]]
    print(json.dumps({"decode": decoded, "trees": [wrong_rows(seed) for seed in told["trees"]]}))
