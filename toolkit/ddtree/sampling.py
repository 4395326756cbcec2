"""The target's choice of a token, greedy or sampled, the same in every decoding mode.

Sampling is the Gumbel-max trick: argmax(log p + g), with g independent standard Gumbel noise, is a draw from
p. The noise is a pure function of (seed, position of the token to choose, token id). So the choice at a
position depends on the prefix and the seed alone: neither on the decoding mode, nor on the tree, nor on the
other requests. Drawing at every node of a draft tree and walking along the matches is then exact: on the
accepted path each token is the one that plain decoding would have drawn there, its noise is independent of
all earlier noise, and the draft never saw it. Nodes of one depth share their noise, but a path has one node a
depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit.ddtree.types import SamplingParams

_KEPT_NOISE = 64


class Sampler:
    """One request's choices.

    Args:
        params: what the request asks.
        seed: its seed.
        stop_ids: tokens that may not be chosen before `min_new_tokens`.
        prompt: prompt tokens; only the repetition penalty counts them.
        vocabulary: logits a row.
        device: where the logits are.
    """

    def __init__(
        self, params: SamplingParams, seed: int, stop_ids: frozenset[int],
        prompt: Sequence[int], vocabulary: int, device: torch.device,
    ) -> None:  # fmt: skip
        self._params = params
        self._seed = seed
        self._vocabulary = vocabulary
        self._device = device
        self._noise: dict[int, Tensor] = {}
        self._produced = 0
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
        bias = params.logit_bias
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._penalised = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
        if self._penalised:
            self._counts = torch.zeros(vocabulary, device=device)
            self._in_prompt = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._in_prompt[torch.tensor(prompt, dtype=torch.int64, device=device)] = True

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the plain argmax of the logits, now and later."""
        held_back = self._produced < self._params.min_new_tokens
        return self._params.temperature == 0 and not (self._penalised or len(self._bias_ids) or held_back)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take note of output tokens."""
        self._produced += len(tokens)
        if self._penalised:
            ids = torch.tensor(tokens, dtype=torch.int64, device=self._device)
            self._counts.index_add_(0, ids, torch.ones(len(tokens), device=self._device))

    def choose(
        self, logits: Tensor, tokens: Tensor, depths: Tensor, ancestors: Tensor, position: int
    ) -> Tensor:
        """The target's token after each node of a tree.

        Args:
            logits: [Q, vocabulary] after root and nodes.
            tokens: int64 [Q], the nodes' tokens; the root's is committed already.
            depths: int64 [Q], 0 for the root.
            ancestors: bool [Q, Q], ancestors of each node and itself, see `tree.ancestor_mask`.
            position: position of the root.

        Returns:
            int64 [Q].
        """
        scores = self._adjusted(logits.float(), tokens, depths, ancestors)
        params = self._params
        if params.temperature == 0:
            return argmax(scores)
        scores = _filtered(scores / params.temperature, params)
        deepest = int(depths.max())
        noise = torch.stack([self._gumbel(position + 1 + depth) for depth in range(deepest + 1)])
        return argmax(scores + noise[depths])

    def _adjusted(self, logits: Tensor, tokens: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
        """Logits after penalties, then bias, then the ban of stop tokens."""
        if self._penalised:
            logits = self._penalise(logits, tokens, ancestors)
        if len(self._bias_ids):
            logits = logits.index_add(1, self._bias_ids, self._bias.expand(len(logits), -1))
        banned = self._produced + depths < self._params.min_new_tokens
        if len(self._stop_ids) and bool(banned.any()):
            logits = logits.clone()
            logits[banned[:, None] & torch.isin(_columns(logits), self._stop_ids)] = -math.inf
        return logits

    def _penalise(self, logits: Tensor, tokens: Tensor, ancestors: Tensor) -> Tensor:
        """Apply the penalties; the tokens of a node's path count as output there."""
        params = self._params
        drafted = ancestors.clone()
        drafted[:, 0] = False
        on_path = torch.zeros_like(logits).scatter_add_(
            1, tokens.expand(len(tokens), -1), drafted.to(logits.dtype)
        )
        counts = self._counts + on_path
        seen = (counts > 0) | self._in_prompt
        factor = params.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

    def _gumbel(self, position: int) -> Tensor:
        """Noise of one position, float32 [vocabulary]; kept, for a rejected depth is drawn again."""
        noise = self._noise.get(position)
        if noise is None:
            if len(self._noise) >= _KEPT_NOISE:
                self._noise.clear()
            noise = gumbel_noise(self._seed, position, self._vocabulary).to(self._device)
            self._noise[position] = noise
        return noise


def gumbel_noise(seed: int, position: int, count: int) -> Tensor:
    """Standard Gumbel noise, float32 [count], a function of its arguments alone.

    The counter-based generator Philox (Salmon et al., SC 2011) is keyed by the seed; the position is the
    high word of its counter.
    """
    generator = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=[0, 0, 0, position]))
    exponential = np.maximum(generator.standard_exponential(count), np.finfo(np.float64).tiny)
    return torch.from_numpy(-np.log(exponential).astype(np.float32))


def _filtered(scores: Tensor, params: SamplingParams) -> Tensor:
    """Set to -inf what top-k, top-p and min-p leave out; each judges the whole distribution."""
    vocabulary = scores.shape[-1]
    if params.min_p > 0:
        floor = scores.max(-1, keepdim=True).values + math.log(params.min_p)
        kept = scores.masked_fill(scores < floor, -math.inf)
    else:
        kept = scores
    top_k = params.top_k if 0 < params.top_k < vocabulary else vocabulary
    if top_k == vocabulary and params.top_p >= 1:
        return kept
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    cut = (probabilities.cumsum(-1) - probabilities) >= params.top_p
    cut[:, top_k:] = True
    cut[:, 0] = False
    return kept.masked_fill(torch.zeros_like(cut).scatter_(1, order, cut), -math.inf)


def _columns(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[-1], device=logits.device)


def argmax(logits: Tensor) -> Tensor:
    """Index of the greatest value of the last dimension, the lowest of equals: int64 [...]."""
    if logits.dtype == torch.float32 and logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))  # torch's own is tens of times slower here
    return logits.argmax(-1)


def only_numbers(logits: Tensor, choices: Tensor) -> Tensor:
    """Replace a request's choices by -1 if one has a logit that is not finite.

    Args:
        logits: [R, Q, vocabulary].
        choices: int64 [R, Q].

    Returns:
        int64 [R, Q].
    """
    chosen = logits.gather(2, choices.unsqueeze(2))
    if math.isfinite(chosen.sum().item()):
        return choices
    finite = chosen.isfinite().flatten(1).all(1, keepdim=True)
    return torch.where(finite, choices, -1)
