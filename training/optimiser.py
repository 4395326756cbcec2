"""Muon for the hidden matrices beside AdamW for the rest, under one learning-rate schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Replace each matrix's singular values by about one (quintic Newton-Schulz iteration, in bfloat16).

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.

    Args:
        matrices: [n, rows, columns].
        steps: Iterations.

    Returns:
        bfloat16 [n, rows, columns].
    """
    x = matrices.bfloat16()
    transposed = x.shape[1] > x.shape[2]
    x = x.mT if transposed else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if transposed else x


class Optimiser:
    """Muon on matrices inside layers, AdamW on embeddings, projections outside layers and norms."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float = 0.05) -> None:
        named = list(model.named_parameters())
        hidden = [p for name, p in named if p.dim() == 2 and "layers." in name]
        others = [p for name, p in named if not (p.dim() == 2 and "layers." in name)]
        self._parameters = [p for _, p in named]
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in hidden:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        self._groups = list(by_shape.values())
        self._momenta = [torch.zeros_like(torch.stack(list(group))) for group in self._groups]
        self._muon_lr, self._adam_lr, self._weight_decay = muon_lr, adam_lr, weight_decay
        fused = others[0].is_cuda
        self._adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply and clear the gradients, at ``factor`` times the base learning rates."""
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = self._adam_lr * factor
        self._adam.step()
        rate = self._muon_lr * factor
        for parameters, momentum in zip(self._groups, self._momenta, strict=True):
            gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
            momentum.lerp_(gradients, 0.05)
            rows, columns = gradients.shape[1:]
            update = orthogonalise(gradients.lerp(momentum, 0.95)) * max(1.0, rows / columns) ** 0.5
            data: list[Tensor] = list(parameters)
            torch._foreach_mul_(data, 1.0 - rate * self._weight_decay)
            torch._foreach_add_(data, list(update.to(data[0].dtype).unbind()), alpha=-rate)
        for parameter in self._parameters:
            parameter.grad = None
