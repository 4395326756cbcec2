"""The DDTREE worker: SGLang's DFLASH worker with a tree between its draft and its verification.

Loading, prefill and the drafter's context are DFLASH's. A decode step drafts a block, grows a tree of each
request's candidates, verifies the trees in one forward and commits the accepted paths. The host never waits
for the device in it, so the scheduler prepares the next step meanwhile.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from sglang.kernels.ops.speculative.dflash import _prepare_dflash_draft_block_unchecked
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import GrammarTree
from torch import Tensor

from toolkit.ddtree.kernels.tree_builder import TreeLinks
from toolkit.ddtree.sglang import attention, grammar, penalties, plan
from toolkit.ddtree.sglang.debug import DebugRecorder
from toolkit.ddtree.sglang.draft import Draft, TreeDrafter
from toolkit.ddtree.sglang.kernels import Commit, RowMover, VerifyRows, place_rows, walk_trees
from toolkit.ddtree.sglang.live_checks import LiveChecks
from toolkit.ddtree.sglang.loading import load_tree_drafter
from toolkit.ddtree.sglang.options import Attention, TreeOptions
from toolkit.ddtree.sglang.penalties import Penalties
from toolkit.ddtree.sglang.requests import limits_of
from toolkit.ddtree.sglang.sampling import target_tokens
from toolkit.ddtree.sglang.tail import Tails, Verified
from toolkit.ddtree.sglang.verify import TreeVerifyInput, mask_for
from toolkit.ddtree.tree import DraftTrees

log = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):  # type: ignore[misc]
    """Drafts with a DFlash drafter, verifies trees.

    Args:
        server_args: SGLang's, after `DDTreeAlgorithm.handle_server_args`.
        gpu_id: this rank's device.
        ps: this rank's place in the parallel groups.
        nccl_port: of the draft worker.
        target_worker: the target's.
    """

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        self._options = TreeOptions.from_environment()
        self._tree_drafter: TreeDrafter | None = None
        self._mover: RowMover | None = None
        self._tails: Tails | None = None
        self._recorder: DebugRecorder | None = None
        if self._options.debug_file is not None and ps.tp_rank == 0:
            self._recorder = DebugRecorder(Path(self._options.debug_file), self._options.debug_file_bytes)
        # The drafter is a chain of its block, whatever the tree.
        draft_args = deepcopy(server_args)
        draft_args.override(
            "ddtree.draft",
            speculative_num_draft_tokens=server_args.speculative_dflash_block_size,
            speculative_eagle_topk=1,
        )
        super().__init__(draft_args, gpu_id, ps, nccl_port, target_worker)
        # The drafter looks its tokens up in the target's embedding, inside its graph. Embeddings handed to a
        # forward without a graph are rounded to bfloat16 by SGLang, whatever the model's dtype.
        embed = target_worker.model_runner.model.get_input_embeddings()
        self.draft_model.forward_embed = embed.forward  # a method, not a part of the drafter's weights
        self.server_args = server_args
        vocabulary = target_worker.model_runner.model_config.vocab_size
        self._penalties = Penalties(vocabulary, torch.device(target_worker.device))
        self.speculative_num_draft_tokens = self._options.width
        if self._options.width != server_args.speculative_num_draft_tokens:
            raise ValueError(
                f"the launcher resolved a verify width of {server_args.speculative_num_draft_tokens}, this "
                f"process has {self._options.width}: its environment lost the options"
            )

    def init_attention_backends(self) -> None:
        """Also find the K/V rows that a commit moves, and give the backends DDTREE's own kernels."""
        super().init_attention_backends()
        asked = self._options.attention
        splits = self.device != "cpu" if asked is None else asked is Attention.SPLIT
        for runner in (self.model_runner, self.draft_model_runner):
            plan.install(runner.attn_backend)
            if splits:
                attention.install(runner.attn_backend)
        buffers = _row_buffers(self.model_runner.token_to_kv_pool)
        self._mover = RowMover(buffers)
        self._checks = LiveChecks(self.model_runner, int(self._mask_token_id), self._options, buffers)

    def init_cuda_graphs(self) -> None:
        """Capture the drafter's graph, check what was captured for the target, and record a step's end."""
        super().init_cuda_graphs()
        self._check_captured()
        self._record_tails()

    def _check_captured(self) -> None:
        """Refuse a graph of another width or without a mask: it would decode wrong tokens."""
        graphs = self.model_runner.decode_cuda_graph_runner
        if graphs is None:
            return
        width = graphs.captured_req_width
        if width != self._options.width:
            raise RuntimeError(f"verification was captured for {width} rows, not {self._options.width}")
        if (
            graphs.get_spec_info(width).custom_mask is None
            or self.model_runner.attn_backend.verify_mask is None
        ):
            raise RuntimeError("verification was captured without a tree mask")
        most = max(graphs.capture_bs)
        running = self.server_args.max_running_requests
        if running is not None and running > most and self.ps.tp_rank == 0:
            log.warning(
                "CUDA graphs end at %d requests, %d may run: larger batches verify without a graph",
                most,
                running,
            )

    def _record_tails(self) -> None:
        """Record the end of a step for every number of requests that both graphs serve."""
        target = self.model_runner.decode_cuda_graph_runner
        draft = self.draft_model_runner.decode_cuda_graph_runner
        if target is None or draft is None:
            return
        try:
            self._tails = self._recorded(target, draft)
        except torch.OutOfMemoryError:  # they save time, and are no reason not to serve
            log.warning("no memory is left to record how steps end: they end eagerly")

    def _recorded(self, target: Any, draft: Any) -> Tails | None:
        """Tails of the target's and the drafter's graphs; None, said, where a graph keeps no output."""
        width, most = self._options.width, min(max(target.capture_bs), max(draft.capture_bs))
        tails = Tails(self._keep, most, width, self.block_size, self.device)
        with torch.inference_mode():
            for requests in range(most, 0, -1):  # the largest first: it makes the workspaces of all
                drafted, verified = (
                    min(size for size in runner.capture_bs if size >= requests) for runner in (draft, target)
                )
                hidden = _captured_hidden(target, verified, width)
                if hidden is None:
                    log.warning("the graph of %d requests keeps no output: steps end eagerly", verified)
                    return None
                trees = self._drafter().replayed(drafted, requests).trees
                tails.add(Verified(trees, hidden[: requests * width]))
        if self._fused_kv_helper is not None:
            tails.hold(self._fused_kv_helper)
        return tails

    def _maybe_build_draft_sampler(self) -> TreeDrafter:
        """What the drafter's graph ends with."""
        return self._drafter()

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Sampled requests are drawn exactly: there is nothing to warn about."""

    def _drafter(self) -> TreeDrafter:
        if self._tree_drafter is None:
            most = max(get_exec().graph.cuda_graph_config.decode.bs or [1])
            target = self.target_worker.model_runner.model
            folder = self.server_args.speculative_draft_model_path
            self._tree_drafter = load_tree_drafter(target, folder, self.block_size, self._options, most)
        return self._tree_drafter

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None
    ) -> GenerationBatchResult:
        """Prefill and idle steps as DFLASH; a decode step with trees."""
        is_extend = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if not (is_extend or batch.forward_mode.is_idle()) and batch.spec_info is not None:
            return self._decode(batch, on_publish, grammar_barrier)
        if batch.sampling_info is not None:
            penalties.restore(batch.sampling_info, batch.reqs)
        result = super().forward_batch_generation(batch, on_publish, grammar_barrier)
        if is_extend:
            self._penalties.begin(batch.reqs, result.next_token_ids)
        return result

    def _decode(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        draft_input: DFlashDraftInputV2 = batch.spec_info
        # The lengths may come from another stream, of the step before.
        batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())

        draft = self._draft(batch, draft_input)
        trees, links = draft.trees, draft.links
        on_host = None
        if batch.has_grammar:  # its copy starts ahead of the verification
            on_host = GrammarTree.from_device(links.first_child, links.next_sibling, trees.tokens)
        rows, output, is_graph = self._verify(batch, draft_input, trees, links)
        seen = self._checks.see(batch, draft, self._draft_block_ids_buf, rows, output, self._mask)
        if seen is not None:
            rows, output, is_graph = self._checks.look(
                seen, lambda again, linked: self._verify(batch, draft_input, again, linked)
            ) or (rows, output, is_graph)

        logits = output.logits_output
        self._adjust(logits.next_token_logits, batch, trees, on_host, grammar_barrier)
        if logits.hidden_states is None:
            raise RuntimeError("verification gave no hidden states: the drafter's layers are not captured")
        tails = self._tails
        if tails is not None and not tails.serves(trees, rows, logits.hidden_states):
            tails = None
        place = None if tails is None else tails.chosen_of(len(rows.lengths))
        chosen = target_tokens(logits.next_token_logits, batch.sampling_info, self._options.width, place)
        self._agree(chosen, batch.sampling_info)
        commit = self._commit(draft, chosen, rows, logits.hidden_states, tails, seen, on_publish)
        self._penalties.commit(batch.reqs, commit)
        if self._recorder is not None:
            self._recorder.record(draft, commit)
        logits.hidden_states = None  # large; the overlapped scheduler would copy it to the host
        return GenerationBatchResult(
            logits_output=logits,
            next_token_ids=commit.tokens.reshape(-1),
            accept_lens=commit.lengths,
            can_run_cuda_graph=is_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=commit.bonus, new_seq_lens=commit.seq_lens
            ),
            speculative_num_draft_tokens=self.block_size,
            new_seq_lens=commit.seq_lens,
        )

    def _commit(
        self, draft: Draft, chosen: Tensor, rows: VerifyRows, hidden: Tensor, tails: Tails | None,
        seen: Any, on_publish: Any,
    ) -> Commit:  # fmt: skip
        """Walk the trees and keep what was accepted, by a recorded tail where there is one."""
        if tails is None or seen is not None:  # a self-check compares a tail with a walk of its own
            commit = walk_trees(draft.trees, chosen, rows.slots, rows.lengths, self.block_size)
        if tails is None:
            if on_publish is not None:
                on_publish(commit.seq_lens)
            positions = self._draft_block_positions_buf[: len(chosen)].reshape(-1)
            with self._checks.watch(seen, chosen, commit):
                self._keep(commit, rows, hidden, positions)
            return commit
        if seen is None:
            commit = tails.run(len(chosen))
        else:
            with self._checks.watch(seen, chosen, commit):
                commit = tails.run(len(chosen))
        if on_publish is not None:
            on_publish(commit.seq_lens)
        return commit

    def _adjust(
        self, logits: Tensor, batch: Any, trees: DraftTrees, on_host: GrammarTree | None, barrier: Any
    ) -> None:
        """Apply what a request asks for beside sampling: penalties, then its grammar."""
        self._penalties.apply(logits, batch.reqs, trees)
        if on_host is None:
            return
        mask = grammar.mask_of(batch.reqs, on_host, self._penalties.vocabulary, logits.device, barrier)
        if mask is not None:
            mask.apply(logits)

    def _draft(self, batch: Any, draft_input: DFlashDraftInputV2) -> Draft:
        """Run the drafter over each request's block, and grow a tree of its candidates."""
        requests = len(batch.seq_lens)
        self._ensure_draft_block_buffers(requests)
        block_ids = self._draft_block_ids_buf[:requests]
        positions = self._draft_block_positions_buf[:requests]
        slots = self._draft_verify_out_cache_loc_buf[:requests]
        _prepare_dflash_draft_block_unchecked(
            bonus_tokens=draft_input.bonus_tokens.view(-1),
            prefix_lens=batch.seq_lens.view(-1),
            req_pool_indices=batch.req_pool_indices.view(-1),
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            block_ids_out=block_ids,
            positions_out=positions,
            cache_loc_out=slots,
            mask_token_id=int(self._mask_token_id),
        )
        bounds, bound = self._length_bounds(batch, draft_input, self.block_size)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=block_ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=slots.reshape(-1),
            seq_lens_sum=bound,
            seq_lens_cpu=bounds.to(torch.int32),
            positions=positions.reshape(-1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        limits = limits_of(batch.reqs, self._options)
        drafter = self._drafter()
        drafter.prepare(limits)
        with torch.inference_mode():
            output = self.draft_model_runner.forward(forward_batch)
            if output.can_run_graph:
                return drafter.replayed(self.draft_model_runner.decode_cuda_graph_runner.bs, requests)
            return drafter.grow(output.logits_output.hidden_states, block_ids[:, 0], limits)

    def _verify(
        self, batch: Any, draft_input: DFlashDraftInputV2, trees: DraftTrees, links: TreeLinks
    ) -> tuple[VerifyRows, Any, bool]:
        """Run the trees through the target."""
        requests, width = trees.tokens.shape
        runner = self.model_runner
        bounds, bound = self._length_bounds(batch, draft_input, width)
        mask, in_graph = mask_for(runner.attn_backend, requests, width, bound, trees.tokens.device)
        self._mask = mask
        table = runner.req_to_token_pool.req_to_token
        place = None if self._tails is None else self._tails.rows_of(requests)
        rows = place_rows(trees, links, batch.seq_lens, table, batch.req_pool_indices, mask, place)
        verify_input = TreeVerifyInput(
            draft_token=trees.tokens.reshape(-1),
            positions=rows.positions.reshape(-1),
            draft_token_num=width,
            custom_mask=mask,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            mask_buffer=mask if in_graph else None,
        )
        batch.out_cache_loc = rows.slots.reshape(-1)
        kept = (batch.seq_lens_cpu, batch.seq_lens_sum)
        batch.seq_lens_cpu, batch.seq_lens_sum = bounds, bound
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = kept
        output = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        return rows, output, output.can_run_cuda_graph

    def _keep(self, commit: Commit, rows: VerifyRows, hidden_states: Tensor, positions: Tensor) -> None:
        """Move accepted K/V rows behind the committed ones, and give their hidden states to the drafter."""
        if self._mover is None:
            raise RuntimeError("the K/V rows are not known: the attention backends were not initialised")
        targets = rows.slots[:, : self.block_size].contiguous()
        self._mover(commit.sources, targets)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden_states.index_select(0, commit.rows.reshape(-1)),
            cache_loc=targets.reshape(-1),
            cache_loc_2d=targets,
            positions=positions,
            commit_lens=commit.lengths,
        )

    def _agree(self, chosen: Tensor, sampling_info: Any) -> None:
        """Let every rank walk by the draws of the first."""
        group = get_tp_group()
        if group.world_size > 1 and sampling_info is not None and not sampling_info.is_all_greedy:
            group.broadcast(chosen, src=0)

    def _length_bounds(self, batch: Any, draft_input: DFlashDraftInputV2, rows: int) -> tuple[Tensor, int]:
        """Upper bounds of the lengths plus `rows`, int64 [R], and of their sum, without asking the device."""
        if batch.seq_lens_cpu is not None:
            bounds = batch.seq_lens_cpu + rows
            return bounds, int(bounds.sum())
        return draft_input.reserved_seq_lens_cpu, int(draft_input.reserved_seq_lens_sum)

    def state(self) -> dict[str, Any]:
        """What `/server_info` tells of this worker, JSON-safe."""
        dropped = 0 if self._recorder is None else self._recorder.dropped
        return {"debug_lines_dropped": dropped, "self_check": self._checks.results()}


def _captured_hidden(graphs: Any, requests: int, width: int) -> Tensor | None:
    """The hidden states [requests * W, hidden] that a captured graph leaves; None where it keeps none."""
    size = graphs._capture_graph_size(bs=requests, num_tokens=requests * width)
    outputs: dict[Any, Any] = getattr(graphs.backend, "_outputs", {})
    hidden: Tensor | None = getattr(outputs.get(graphs._make_graph_key(size)), "hidden_states", None)
    return hidden


def _row_buffers(pool: Any) -> list[Tensor]:
    """What holds the K/V rows of a pool, one tensor a layer and kind.

    Raises:
        ValueError: the pool keeps its rows in another way than one after another.
    """
    if type(pool) is MHATokenToKVPool and pool.k_buffer[0].dim() == 3:
        return [*pool.k_buffer, *pool.v_buffer]
    if type(pool) is MLATokenToKVPool:
        return list(pool.kv_buffer)
    raise ValueError(
        f"K/V of {type(pool).__name__} cannot be moved row by row; DDTREE needs a plain MHA or MLA pool"
    )
