"""Batches for tests of tree attention, and plain softmax attention over them, on any device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.ddtree.kernels.tree_attention import Mask, Prefix, Sees, tree_attention

SPARE = 100  # cached rows of nobody


@dataclass
class Batch:
    """Requests of `lengths` cached rows and W tree rows each; what each tree row sees of the others."""

    lengths: list[int]
    query: Tensor
    key: Tensor
    value: Tensor
    prefix: Prefix
    sees: Sees
    seen: Tensor
    mask: Mask | None

    @classmethod
    def drawn(
        cls, lengths, size, sees, *, dtype=torch.float32, cached=None, latent=False, device="cpu"
    ) -> "Batch":
        """A batch of heads of `size`: heads, K/V heads, Dk, Dv, W; cached rows of another dtype if given.

        `latent`: cached values are the first Dv numbers of their keys.
        """
        heads, kv_heads, key_dim, value_dim, width = size
        generator = torch.Generator(device).manual_seed(width)
        requests, slots = len(lengths), sum(lengths) + SPARE

        def normal(*shape):
            return torch.randn(*shape, device=device, generator=generator)

        query = normal(requests * width, heads, key_dim).to(dtype)
        key = normal(requests * width, kv_heads, key_dim).to(dtype)
        value = normal(requests * width, kv_heads, value_dim).to(dtype)
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        rows = torch.randperm(slots, device=device, generator=generator)[: sum(lengths)]
        keys = normal(slots, kv_heads, key_dim).to(cached or dtype)
        values = keys[..., :value_dim] if latent else normal(slots, kv_heads, value_dim).to(cached or dtype)
        seen = torch.ones(requests, width, width, dtype=torch.bool, device=device)
        mask = None
        if sees is Sees.EARLIER:
            seen = seen.tril()
        if sees is Sees.MASKED:
            seen = (normal(requests, width, width) > 0.4) | torch.eye(width, dtype=torch.bool, device=device)
            pairs = zip(lengths, seen, strict=True)
            cells = [torch.cat([torch.zeros(width, n, device=device).bool(), own], 1) for n, own in pairs]
            places = torch.tensor([0, *(width * (n + width) for n in lengths)], device=device).cumsum(0)
            mask = Mask(torch.cat([cell.flatten() for cell in cells]).to(torch.uint8), places)
        prefix = Prefix(keys, values, starts, rows, key_scale=0.5, value_scale=2.0)
        return cls(list(lengths), query, key, value, prefix, sees, seen, mask)

    def attended(self, scale, splits=None) -> Tensor:
        """What the kernel writes, over NaN."""
        out = self.query.new_full((*self.query.shape[:2], self.value.shape[2]), float("nan"))
        args = (self.query, self.key, self.value, out, self.prefix, scale, self.sees, self.mask, splits)
        tree_attention(*args)
        return out

    def expected(self, scale) -> Tensor:
        """Softmax attention in float64."""
        width, group = self.seen.shape[1], self.query.shape[1] // self.key.shape[1]
        prefix, outs = self.prefix, []
        for request, length in enumerate(self.lengths):
            rows = prefix.rows[prefix.starts[request] : prefix.starts[request + 1]]
            own = slice(request * width, (request + 1) * width)
            keys = torch.cat([prefix.keys[rows].double() * prefix.key_scale, self.key[own].double()])
            values = torch.cat([prefix.values[rows].double() * prefix.value_scale, self.value[own].double()])
            keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
            past = torch.ones(width, length, dtype=torch.bool, device=keys.device)
            scores = (self.query[own].double().transpose(0, 1) @ keys.transpose(1, 2)) * scale
            scores = scores.masked_fill(~torch.cat([past, self.seen[request]], 1), float("-inf"))
            outs.append((scores.softmax(-1) @ values).transpose(0, 1))
        return torch.cat(outs)
