"""What the routes share: the runner, the model's facts, metrics, and how a body becomes an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit import __version__
from toolkit.ddtree.server.answers import Answer
from toolkit.ddtree.server.args import ServerArgs
from toolkit.ddtree.server.chat import ChatTemplate
from toolkit.ddtree.server.debug_log import DebugLog
from toolkit.ddtree.server.errors import ApiError
from toolkit.ddtree.server.generation import Generation
from toolkit.ddtree.server.metrics import Metrics
from toolkit.ddtree.server.protocol import ChatMessage
from toolkit.ddtree.server.requests import Job, ModelLimits
from toolkit.ddtree.server.runner import EngineRunner
from toolkit.ddtree.types import Algorithm, Output

if TYPE_CHECKING:
    from toolkit.ddtree.engine import Engine

_DEFAULT_MODEL = "default"  # SGLang's name for "the one that is served"


class Service:
    """One served model.

    Args:
        args: the server's arguments.
        engine: loaded; the service's runner uses it alone from `runner.start` on.
        chat_template: the checkpoint's.
        debug_log: where debug lines go, or None.

    Raises:
        ValueError: the checkpoint has no tokenizer.
    """

    def __init__(
        self, args: ServerArgs, engine: Engine, chat_template: ChatTemplate, debug_log: DebugLog | None
    ) -> None:
        if engine.tokenizer is None:
            raise ValueError(f"{args.engine.model_path}: no tokenizer.json; the server needs one")
        self.args = args
        self.tokenizer = engine.tokenizer
        self.chat_template = chat_template
        self.metrics = Metrics(args.served_model_name, args.engine)
        self.started = time.time()
        self.limits = args.engine.limits if args.engine.algorithm is Algorithm.DDTREE else None
        self.model = ModelLimits(
            context_length=engine.context_length,
            vocab_size=engine.model_info["vocab_size"],
            tree=self.limits,
            encode=engine.encode,
        )
        capacity = args.engine.max_running_requests + args.max_queued_requests
        self.runner = EngineRunner(engine, capacity, self)
        self._debug_log = debug_log

    def on_output(self, generation: Generation, output: Output, now: float) -> None:
        """Count one round of one request and write its debug line."""
        self.metrics.on_output(generation, output, now)
        if self._debug_log is not None and output.round is not None:
            self._debug_log.write(output.round)

    def on_end(self, generation: Generation, now: float) -> None:
        """Count the end of one request."""
        self.metrics.on_end(generation, now)

    def describe(self) -> str:
        """One line on what is served."""
        tree = f" budget={self.limits.budget} topk_cap={self.limits.topk_cap}" if self.limits else ""
        expansion = f" expansion={self.limits.expansion}" if self.limits else ""
        return f"model={self.args.served_model_name} algorithm={self.args.engine.algorithm}{tree}{expansion}"

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) unless `name` is the served model, or left out."""
        served = self.args.served_model_name
        if name not in (None, _DEFAULT_MODEL, served):
            raise ApiError(
                404,
                f"The model `{str(name)[:200]}` does not exist; this server has `{served}`.",
                param="model",
                code="model_not_found",
            )

    def tokenize(self, prompt: str | list[str], *, special: bool) -> dict[str, Any]:
        """SGLang's `/tokenize`: token ids of a text, or of each of many, as a prompt would have them."""
        texts = [prompt] if isinstance(prompt, str) else prompt
        tokens = [list(self.tokenizer.encode(text, add_special_tokens=special).ids) for text in texts]
        counts = [len(ids) for ids in tokens]
        single = isinstance(prompt, str)
        return {
            "tokens": tokens[0] if single else tokens,
            "count": counts[0] if single else counts,
            "max_model_len": self.model.context_length,
        }

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The prompt of a chat; raises ApiError (400) if the template refuses the messages."""
        text = self.chat_template.render(messages)
        # A template writes the special tokens itself.
        return list(self.tokenizer.encode(text, add_special_tokens=not self.chat_template.own).ids)

    def submit(self, jobs: Sequence[Job], *, counted: bool = True) -> list[Answer]:
        """Start all jobs or none.

        Raises:
            ApiError: 400 if the engine cannot serve one of them, which a stream could only say after its 200;
                and as `EngineRunner.submit`.
        """
        try:
            for job in jobs:
                self.runner.engine.check(job.request)
        except ValueError as error:
            raise ApiError(400, f"{error}.") from None
        generations = self.runner.submit([job.request for job in jobs], counted=counted)
        return [
            Answer(job, generation, self.tokenizer) for job, generation in zip(jobs, generations, strict=True)
        ]

    def close(self) -> None:
        """Close the debug file."""
        if self._debug_log is not None:
            self._debug_log.close()

    def render_metrics(self) -> bytes:
        """The Prometheus text."""
        stats = self.runner.engine.stats
        lost = self._debug_log.lost if self._debug_log is not None else 0
        return self.metrics.render(
            running=stats.running,
            queued=max(0, self.runner.in_flight - stats.running),
            cached_tokens=stats.cached_tokens,
            lost_lines=lost,
        )

    def model_card(self) -> dict[str, Any]:
        """The one entry of `/v1/models`."""
        name = self.args.served_model_name
        return {
            "id": name,
            "object": "model",
            "created": int(self.started),
            "owned_by": "ddtoolkit",
            "root": name,
            "max_model_len": self.model.context_length,
        }

    def model_info(self) -> dict[str, Any]:
        """SGLang's `/model_info`."""
        return {
            "model_path": str(self.args.engine.model_path),
            "tokenizer_path": str(self.args.engine.model_path),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
        }

    def server_info(self) -> dict[str, Any]:
        """SGLang's `/server_info`: what the server was started with, and its state. No keys."""
        engine = self.args.engine
        tree = self.limits
        state = {
            "avg_spec_accept_length": self.metrics.accept_length,
            "num_running_reqs": self.runner.engine.stats.running,
            "num_in_flight_reqs": self.runner.in_flight,
        }
        return {
            **self.model_info(),
            "served_model_name": self.args.served_model_name,
            "host": self.args.host,
            "port": self.args.port,
            "dtype": engine.dtype,
            "device": engine.device,
            "context_length": self.model.context_length,
            "vocab_size": self.model.vocab_size,
            "random_seed": engine.random_seed,
            "max_running_requests": engine.max_running_requests,
            "max_queued_requests": self.args.max_queued_requests,
            "disable_radix_cache": engine.prefix_cache_tokens == 0,
            "cpu_threads": engine.threads,
            "speculative_algorithm": str(engine.algorithm),
            "speculative_draft_model_path": str(engine.draft_model_path) if engine.draft_model_path else None,
            "speculative_dflash_block_size": self.runner.engine.block_size,
            "speculative_num_draft_tokens": tree.budget + 1 if tree else None,
            "speculative_ddtree_budget": tree.budget if tree else None,
            "speculative_ddtree_topk_cap": tree.topk_cap if tree else None,
            "speculative_ddtree_expansion": str(tree.expansion) if tree else None,
            "speculative_ddtree_debug_metrics": self._debug_log is not None,
            "has_chat_template": self.chat_template.own,
            "status": "ready",
            "engine": "ddtoolkit",
            "version": __version__,
            "internal_states": [state],
        }
