"""Settings, clock and optimisation loop of a training run."""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from training.modules import Dimensions
from training.optimiser import Optimiser


class Run:
    """One training run: settings, text, and the state that its phases share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.monotonic()
        self.earlier: dict[str, float] = {"steps": 0, "seconds": 0}  # of a drafter to start from
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        self.record: dict[str, Any] = {
            "machine": {
                "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "seconds": {},
        }
        tiny = options.dry_run
        vocab, hidden, head_dim = (512, 64, 32) if tiny else (2048, 192, 64)
        shared = {"vocab": vocab, "hidden": hidden, "heads": 4, "kv_heads": 2, "head_dim": head_dim}
        self.target_dims = Dimensions(intermediate=128 if tiny else 384, layers=5 if tiny else 12, **shared)
        self.drafter_dims = Dimensions(intermediate=128 if tiny else 448, layers=2, **shared)
        self.row_length = 256 if tiny else 2048
        self.batch_rows = 4 if tiny else 64
        self.generated_rows = 8 if tiny else 8192  # that the target writes for its drafter, a temperature

    def say(self, *words: object) -> None:
        """Print with the seconds since the start."""
        print(f"{time.monotonic() - self.started:6.1f}s", *words, flush=True)

    def autocast(self) -> torch.autocast:
        """bfloat16 matrix products on a GPU, float32 on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def compiled(self, model: nn.Module) -> nn.Module:
        """Compile each layer of a model in place, on a GPU."""
        if self.device.type == "cuda":
            for layer in model.layers:
                layer.compile(dynamic=False)
        return model

    def train(
        self, label: str, model: nn.Module, loss_of: Callable[[int], Tensor], seconds: float, lr: float
    ) -> int:
        """Minimise ``loss_of(step)`` for ``seconds`` of wall clock; returns the number of steps.

        The rate rises over 100 steps, then falls linearly to zero over the last 60 % of the time.
        """
        optimiser = Optimiser(model, muon_lr=lr, adam_lr=lr * 0.15)
        limit = self.options.time_limit + self.started
        step, smoothed, start = 0, math.nan, time.monotonic()
        while (progress := (time.monotonic() - start) / seconds) < 1:
            with self.autocast():
                loss = loss_of(step)
            loss.backward()
            optimiser.step(min(1.0, (step + 1) / 100) * min(1.0, (1 - progress) / 0.6))
            step += 1
            if step % 20 == 0:
                value = loss.item()
                if not math.isfinite(value):
                    raise FloatingPointError(f"{label}: loss is {value} at step {step}")
                smoothed = value if math.isnan(smoothed) else 0.9 * smoothed + 0.1 * value
            if step == 8:  # compilation is over: the schedule starts here
                start = time.monotonic()
                seconds = min(seconds, limit - start)
            if step % 1000 == 0:
                self.say(label, "step", step, "loss", round(smoothed, 3))
        self.say(label, "steps", step, "loss", round(smoothed, 3))
        self.record["seconds"][label] = round(time.monotonic() - start, 1)
        self.record.setdefault("training_loss", {})[label] = round(smoothed, 4)
        return step
