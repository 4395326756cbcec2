"""The input of a tree verification: DFLASH's, with a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor


@dataclass
class TreeVerifyInput(DFlashVerifyInput):  # type: ignore[misc]
    """Root, nodes and padding of each request, in tree order.

    Attributes:
        topk: above 1 where backends ask whether there are siblings.
        mask_buffer: what the captured graph reads, where that is `custom_mask` itself.
    """

    topk: int = 2
    mask_buffer: Tensor | None = None

    def prepare_for_verify(self, batch: Any, target_worker: Any) -> tuple[Any, bool]:
        """Package the forward and prepare its attention, for a graph's replay or eagerly.

        Returns:
            The forward batch, and whether a graph serves it.
        """
        batch.input_ids = self.draft_token
        batch.spec_info = self
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        runner = target_worker.model_runner
        forward_batch = ForwardBatch.init_new(
            batch,
            runner,
            capture_hidden_mode=self.capture_hidden_mode,
            return_hidden_states_before_norm=False,
        )
        graphs = runner.decode_cuda_graph_runner
        if graphs and graphs.can_run_graph(forward_batch):
            if self.mask_buffer is not None:
                # The graph reads the buffer itself; the replay would copy it onto itself.
                self.custom_mask = self.mask_buffer[:0]
            graphs.load_batch(forward_batch)
            return forward_batch, True
        runner.attn_backend.init_forward_metadata(forward_batch)
        return forward_batch, False


def mask_for(
    attn_backend: Any, requests: int, width: int, most_tokens: int, device: Any
) -> tuple[Tensor, bool]:
    """Room for the masks of a batch, and whether it is what a captured graph reads.

    Args:
        attn_backend: the target's.
        requests: R.
        width: W, rows a request.
        most_tokens: an upper bound of the sum of committed lengths, known without asking the device.
        device: where the masks go.
    """
    captured = attn_backend.verify_mask
    if captured is not None and captured.fits(requests):
        return captured.buffer, True
    return torch.empty(width * (most_tokens + requests * width), dtype=torch.uint8, device=device), False
