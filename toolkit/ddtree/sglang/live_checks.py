"""Where the worker's decode step meets a self-check: nothing, unless a request of the batch is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.distributed import get_tp_group
from torch import Tensor

from toolkit.ddtree.sglang.draft import Draft
from toolkit.ddtree.sglang.kernels import Commit, VerifyRows
from toolkit.ddtree.sglang.options import TreeOptions
from toolkit.ddtree.sglang.requests import limits_of
from toolkit.ddtree.sglang.self_check import SelfCheck, Verified, Verify


class LiveChecks:
    """Watches the requests whose id says that they are self-checks, the latest at a time.

    Args:
        runner: the target's model runner.
        mask_token: the drafter's.
        options: the server's.
        buffers: the K/V buffers that a commit moves rows in.
    """

    def __init__(self, runner: Any, mask_token: int, options: TreeOptions, buffers: list[Tensor]) -> None:
        self._runner = runner
        self._mask_token = mask_token
        self._options = options
        self._buffers = buffers
        self._check = SelfCheck("", mask_token, runner.dtype)

    def results(self) -> dict[str, Any]:
        """The latest self-check: its request's id, and its checks; empty where there was none."""
        return {"rid": self._check.rid, "checks": self._check.results()} if self._check.rid else {}

    def see(
        self, batch: Any, draft: Draft, block: Tensor, rows: VerifyRows, output: Any, mask: Tensor
    ) -> Verified | None:
        """What a self-check sees of this step; None where no request of the batch is one."""
        prefix = self._options.check_prefix
        if not prefix:
            return None
        index = next((index for index, req in enumerate(batch.reqs) if req.rid.startswith(prefix)), None)
        if index is None:
            return None
        if batch.reqs[index].rid != self._check.rid:
            self._check = SelfCheck(batch.reqs[index].rid, self._mask_token, self._runner.dtype)
        requests, width = draft.trees.tokens.shape
        logits = output.logits_output.next_token_logits.view(requests, width, -1)
        table = self._runner.req_to_token_pool.req_to_token[batch.reqs[index].req_pool_idx]
        limits = limits_of(batch.reqs, self._options)
        return Verified(index, draft, limits, block, rows, logits, batch.seq_lens, mask, table)

    def look(self, seen: Verified, verify: Verify) -> tuple[VerifyRows, Any, bool] | None:
        """Look through a request's first verification; gives it anew, for parts of it are run again."""
        if self._check.steps:
            return None
        self._check.look_through(seen)
        self._check.verify_again(seen, verify)
        self._check.compare_ranks(seen, get_tp_group())
        return verify(seen.draft.trees, seen.draft.links)

    @contextmanager
    def watch(self, seen: Verified | None, chosen: Tensor, commit: Commit) -> Iterator[None]:
        """Compare the walk, and the K/V rows before and after the commit inside."""
        if seen is None:
            yield
            return
        self._check.follow(seen, chosen, commit)
        before = self._check.rows_before(seen, commit, self._buffers)
        yield
        self._check.rows_after(seen, commit, self._buffers, before)
