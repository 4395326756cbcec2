"""Grammar masks of a tree: at every node, the tokens that the grammar allows after the node's path.

SGLang's grammar objects stand behind the committed tokens of a request and can step forward and back. The
tree travels to the host while the target verifies it; each request's grammar then visits the nodes that it
allows. A node that it forbids keeps a row without a mask: its parent's mask lets no walk reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

_BITS = 32


def mask_of(
    reqs: Sequence[Any], tree: Any, vocabulary: int, device: Any, barrier: Callable[[], None] | None
) -> Any:
    """Masks of a batch, on the device; the host waits for the tree, and for the step before.

    Args:
        reqs: SGLang's requests.
        tree: SGLang's `GrammarTree` of the batch: first child, next sibling and token of R * W rows.
        vocabulary: tokens.
        device: where the logits are.
        barrier: SGLang's, which lets the grammars take the tokens of the step before; None where they have.

    Returns:
        SGLang's `GrammarMask` for [R * W, vocabulary], or None where no request has a grammar.
    """
    from sglang.srt.constrained.base_grammar_backend import GrammarMask

    if barrier is not None:
        barrier()
    children, siblings, tokens = (part.tolist() for part in tree.resolve())
    masks: Tensor | None = None
    last = None
    for index, req in enumerate(reqs):
        if req.grammar is None:
            continue
        last, width = req.grammar, len(tokens[index])
        if masks is None:
            masks = last.allocate_vocab_mask(
                vocab_size=vocabulary, batch_size=len(reqs) * width, device="cpu"
            )
        fill(last, masks, index * width, tokens[index], children[index], siblings[index], vocabulary)
    return None if masks is None else GrammarMask(last, masks.to(device, non_blocking=True))


def fill(
    grammar: Any, masks: Tensor, first: int, tokens: list[int], children: list[int], siblings: list[int],
    vocabulary: int,
) -> None:  # fmt: skip
    """Fill the rows of one tree; the grammar ends where it began.

    Args:
        grammar: SGLang's grammar object.
        masks: int32 [rows, ceil(vocabulary / 32)], bit t % 32 of word t // 32 is set where t is allowed.
        first: the root's row.
        tokens: of root, nodes and padding.
        children: index of each one's first child, -1 for none.
        siblings: index of the next node with the same parent, -1 for none.
        vocabulary: tokens.
    """
    if grammar.is_terminated():
        return
    words = masks.numpy()
    grammar.fill_vocab_mask(masks, first)
    path, node = [0], children[0]
    while True:
        if node < 0:  # no sibling is left: back to the parent
            done = path.pop()
            if not path:
                return
            grammar.rollback(1)
            node = siblings[done]
            continue
        if not _allows(words[first + path[-1]], tokens[node], vocabulary) or not _step(grammar, tokens[node]):
            node = siblings[node]
        elif grammar.is_terminated():  # nothing may follow
            grammar.rollback(1)
            node = siblings[node]
        else:
            grammar.fill_vocab_mask(masks, first + node)
            path.append(node)
            node = children[node]


def _allows(words: Any, token: int, vocabulary: int) -> bool:
    return 0 <= token < vocabulary and bool(int(words[token // _BITS]) >> (token % _BITS) & 1)


def _step(grammar: Any, token: int) -> bool:
    """Whether the grammar took the token; SGLang's raise where they do not, and stay where they are."""
    try:
        grammar.accept_token(token)
    except ValueError:
        return False
    return True
