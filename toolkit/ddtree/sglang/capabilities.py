"""What DDTREE runs on, as data: attention backends that take a tree mask, and server arguments it refuses.

Found in SGLang 0.5.17. A backend without tree masks decodes as if the tree were a chain and says nothing:
the tokens are wrong while the acceptance length looks right. So what is not known to work is refused before
a model loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether an attention backend can verify trees, for each attention architecture ("MHA", "MLA").

    Attributes:
        architectures: those it can.
        reason: why not, for the others.
    """

    architectures: frozenset[str]
    reason: str = ""


_CAUSAL = "it ignores tree masks and verifies as if the tree were a chain"
_NO_MASK = "it has no tree masks"
_UNPROVEN = "its tree masks are not proven with DDTREE"

BACKENDS: Mapping[str, Capability] = {
    "triton": Capability(frozenset({"MHA", "MLA"})),
    "flashinfer": Capability(frozenset(), _UNPROVEN),
    "fa3": Capability(frozenset(), _UNPROVEN),
    "fa4": Capability(frozenset(), _UNPROVEN),
    "cutlass_mla": Capability(frozenset(), _CAUSAL),
    "flashmla": Capability(frozenset(), _NO_MASK),
    "trtllm_mla": Capability(frozenset(), _NO_MASK),
    "trtllm_mha": Capability(frozenset(), _NO_MASK),
    "torch_native": Capability(frozenset(), _NO_MASK),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """An attribute of SGLang's `ServerArgs`, the values DDTREE takes, and why not others."""

    attribute: str
    allowed: tuple[Any, ...]
    reason: str

    def refusal(self, args: Any) -> str | None:
        """One line, or None where the value is allowed."""
        value = getattr(args, self.attribute)
        if value in self.allowed:
            return None
        flag = "--" + self.attribute.replace("_", "-")
        allowed = " or ".join("unset" if item is None else str(item) for item in self.allowed)
        return f"{flag} is {value!r:.60}, DDTREE takes {allowed}: {self.reason}"


_OFF = (False, None)
RULES: Sequence[Rule] = (
    Rule("pp_size", (1,), "the drafter needs hidden states of all stages"),
    Rule("enable_dp_attention", _OFF, "DFLASH drafting does not support it"),
    Rule("attn_cp_size", (1,), "context-parallel verification has no tree masks"),
    Rule("dcp_size", (1,), "context-parallel verification has no tree masks"),
    Rule("page_size", (1, None), "rows of rejected nodes are freed one by one"),
    Rule("disaggregation_mode", ("null",), "prefill and decode must share the drafter's context"),
    Rule("speculative_draft_window_size", (None,), "the drafter's window is rebuilt for chains only"),
    Rule("speculative_adaptive", _OFF, "it changes the width of a verification captured for budget + 1"),
    Rule("speculative_accept_threshold_single", (1.0,), "another threshold changes the distribution"),
    Rule("speculative_accept_threshold_acc", (1.0,), "another threshold changes the distribution"),
    Rule("speculative_use_rejection_sampling", _OFF, "DDTREE draws the target's own sample at each node"),
    Rule("speculative_token_map", (None,), "the drafter uses the target's whole vocabulary"),
    Rule("speculative_num_steps", (None, 1), "the drafter runs once for a whole block"),
    Rule("enable_deterministic_inference", _OFF, "its attention kernel reads another mask layout"),
    Rule("enable_custom_logit_processor", _OFF, "a processor does not see which path a node lies on"),
    Rule("enable_two_batch_overlap", _OFF, "it splits the batch between draft and verification"),
    Rule("enable_pdmux", _OFF, "it captures verification once a stream"),
    Rule("enable_lora", _OFF, "SGLang serves adapters with plain decoding only"),
    Rule("enable_hierarchical_cache", _OFF, "it is not proven with DDTREE"),
    Rule("enable_unified_memory", _OFF, "SGLang refuses it with speculative decoding"),
    Rule("enable_page_major_kv_layout", _OFF, "accepted rows are moved in the row-major layout"),
    Rule("enable_multi_layer_eagle", _OFF, "it belongs to another drafter"),
    Rule("decoupled_spec_role", ("null", None), "draft and verification run in one process"),
    Rule(
        "kv_cache_dtype", ("auto", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2"), "rows have scales beside them"
    ),
)


@dataclass(frozen=True, slots=True)
class Model:
    """What of the target decides whether trees can be verified.

    Attributes:
        architecture: "MHA" or "MLA".
        sliding_window: tokens, or None.
        recurrent: whether it has Mamba, GDN or other state-space layers.
    """

    architecture: str
    sliding_window: int | None
    recurrent: bool


def refusals(args: Any, backends: tuple[str, str], model: Model) -> list[str]:
    """Everything that stands against serving DDTREE, one line each.

    Args:
        args: SGLang's resolved server arguments.
        backends: attention backends of prefill and decode.
        model: the target.
    """
    found = [line for rule in RULES if (line := rule.refusal(args)) is not None]
    if backends[0] != backends[1]:
        found.append(
            f"attention backends differ, {backends[0]} for prefill, {backends[1]} for decode: set one"
        )
    for backend in dict.fromkeys(backends):
        capability = BACKENDS.get(backend, Capability(frozenset(), "it is not known to take tree masks"))
        if model.architecture not in capability.architectures:
            able = [name for name, other in BACKENDS.items() if model.architecture in other.architectures]
            found.append(
                f"attention backend {backend} cannot verify trees with {model.architecture}: "
                f"{capability.reason}. Set --attention-backend {' or '.join(able)}"
            )
    if model.sliding_window is not None:
        found.append(
            f"the target has a sliding window of {model.sliding_window}: its tree masks are not proven"
        )
    if model.recurrent:
        found.append("the target has recurrent layers, whose state cannot follow a tree")
    return found
