"""DDTREE on a target with latent attention (MLA), the architecture of DeepSeek and Kimi.

    python benchmarks/sglang_mla.py --logs logs --out benchmarks/sglang_h200_mla.json
    python benchmarks/sglang_mla.py --logs logs --tp 2 --ep 2 --out benchmarks/sglang_h200_mla_ep2.json

A small target with random weights in float32: one dense layer, then mixtures of experts (`--dense`: none).
Plain decoding gives the texts; then an oracle in the drafter's place (sglang_oracle.py) offers them at
changing ranks, so that most commits move latent rows. Tokens are judged by a float32 forward of Hugging
Face's own model, with near-ties as in sglang_judge.py. The judge has to fail a replaced token, and a server
that leaves the moves out. With several ranks (`--tp`), each writes a digest of its trees and commits at every
step (sglang_rank_trace.py), and the ranks' files have to be the same. With `--one-gpu` the ranks
are nodes that share one GPU.

Without a GPU, `--cpu --prompts 4 --tokens 40 --levels 4` takes a quarter of an hour: Triton's interpreter is
slow. Expert parallelism does not run there: SGLang's experts for CPUs know one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.sglang_engines import CPU_ARGUMENTS, ON_CPU, Child, Mode, parsed, settings, stop
from benchmarks.sglang_judge import verdict_of
from benchmarks.sglang_modes import levels, machine
from benchmarks.sglang_oracle import MOVED
from benchmarks.sglang_ranks import ranks_differ, traces

BLOCK, LAYERS = 8, 3
VOCABULARY = 1024
# Of Kimi's kind: stretched positions, whose scale goes into the attention's.
ROPE = {
    "rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip
FLOAT32 = ("float32",)
# Triton multiplies float32 as TF32 unless told otherwise. Rounded so, a near-tie of a router takes other
# experts, and the rule for tokens fails plain decoding too (benchmarks/sglang_h200_mla.json). In three passes
# of TF32 it does not fit the stock tiles at this width; without tensor cores it does, and compiles longer.
EXACT = {"TRITON_F32_DEFAULT": "ieee"}
PLUGINS = (*FLOAT32, "ddtree", "ddtree_oracle", "ddtree_rank_trace")


def main() -> None:
    args = parse()
    if args.cpu:
        os.environ[ON_CPU] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target, drafter = checkpoints(folder, dense=args.dense)
        prompts = [prompt(number) for number in range(args.prompts)]
        defaults = {
            "model_path": str(target), "skip_tokenizer_init": True, "dtype": "float32",
            "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
            "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": max(args.levels),
            "max_running_requests": max(args.levels), "mem_fraction_static": 0.3, "max_total_tokens": 16384,
            "context_length": 1024, "random_seed": 1, "disable_radix_cache": True, "log_level": "warning",
            "sleep_on_idle": True, "disable_custom_all_reduce": True,
            "tp_size": args.tp, "ep_size": args.ep, "nnodes": args.tp if args.one_gpu else 1,
            **(CPU_ARGUMENTS if args.cpu else {}), **settings(args.set),
        }  # fmt: skip
        texts = folder / "texts.json"
        tree = {"speculative_algorithm": "DDTREE", "speculative_draft_model_path": str(drafter)}
        limits, oracle = {"budget": 32, "topk_cap": 8}, EXACT | {"DDTREE_ORACLE": str(texts)}
        if args.attention:
            limits["attention"] = args.attention
        modes = {
            "plain": Mode(plugins=FLOAT32, environment=EXACT),
            "DDTREE 32 cap 8": Mode(tree, limits, PLUGINS, oracle),
            "moves left out": Mode(tree, limits, PLUGINS, oracle | {"DDTREE_LEAVE_MOVES_OUT": "1"}),
        }
        children = {}
        judge = Judge(target)
        result: dict[str, Any] = {
            "machine": machine(),
            "target": {"layers": LAYERS, "experts": 0 if args.dense else 8, "dtype": "float32"},
            "precision": EXACT,
            "new_tokens": args.tokens,
            "attention": args.attention,
            "tp": args.tp,
            "gpus": 1 if args.one_gpu else args.tp,
            "ep": args.ep,
            "modes": {},
        }
        try:
            for name, mode in modes.items():
                children[name] = Child(name, mode, defaults, prompts, folder, args.logs)
            for name, child in children.items():
                child.wait("ready")
                result["modes"][name] = run(child, args, judge, prompts, texts)
                if args.out:  # should the rest fail
                    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        finally:
            stop(children.values())
    print(json.dumps(result))


def prompt(number: int) -> list[int]:
    """Some token ids; every number has another length."""
    return [(37 * place * (number + 1) + 131 * number) % (VOCABULARY - 8) + 1 for place in range(24 + number)]


def run(
    child: Child, args: argparse.Namespace, judge: Judge, prompts: list[list[int]], texts: Path
) -> dict[str, Any]:
    """Decode at each level, judge it, and tell what moved; the first mode's texts are the oracle's."""
    told: dict[str, Any] = {}
    for level in args.levels:
        answer = child.decode(level=level, tokens=args.tokens, requests=len(prompts))
        outputs = answer["outputs"]
        if not texts.exists():
            whole = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
            texts.write_text(json.dumps({"texts": whole, "prompts": [len(prompt) for prompt in prompts]}))
            told["judge_fails_one_replaced_token"] = judge.fails_one_replaced_token(prompts[0], outputs[0])
        own = judge.verdict(prompts, outputs) | {"verify_steps": answer["verify_steps"]}
        plain = json.loads(texts.read_text())["texts"]
        same = sum(
            prompt + output == text for prompt, output, text in zip(prompts, outputs, plain, strict=True)
        )
        own["same_as_plain"] = f"{same} of {len(plain)}"
        moved = child.folder / MOVED
        if moved.exists():
            own["since_start"] = json.loads(moved.read_text())
            own["ranks"], own["batches_that_differ"] = ranks_differ(traces(child))
        told[f"requests {level}"] = own
    return told


class Judge:
    """The target in float32, as Hugging Face's transformers run it."""

    def __init__(self, target: Path) -> None:
        import torch
        from transformers import DeepseekV3ForCausalLM

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model = DeepseekV3ForCausalLM.from_pretrained(
            target, dtype=torch.float32, attn_implementation="eager"
        )
        self._model = model.to(self._device).eval()

    def verdict(self, prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, Any]:
        """As `sglang_judge.verdict_of` tells it."""
        import torch

        pairs = []
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = torch.tensor([[*prompt, *output]], device=self._device)
            with torch.inference_mode():
                logits = self._model(ids).logits[0]
            pairs.append((logits[len(prompt) - 1 : -1], output))
        return verdict_of(pairs)

    def fails_one_replaced_token(self, prompt: list[int], output: list[int]) -> bool:
        """Whether it sees one replaced token."""
        changed = list(output)
        changed[len(changed) // 2] = (changed[len(changed) // 2] + 1) % VOCABULARY
        return not self.verdict([prompt], [changed])["lossless"]


def checkpoints(folder: Path, *, dense: bool) -> tuple[Path, Path]:
    """A target with random weights of such a size that its choices are clear, and a drafter for it."""
    import torch
    from safetensors.torch import save_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(7)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
        num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=8, n_shared_experts=1,
        n_routed_experts=8, routed_scaling_factor=1.0, kv_lora_rank=512, q_lora_rank=128, qk_rope_head_dim=64,
        v_head_dim=64, qk_nope_head_dim=64, n_group=1, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=LAYERS if dense else 1, moe_layer_freq=1,
        topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, max_position_embeddings=16384,
        rope_parameters=ROPE, initializer_range=0.12, bos_token_id=0, eos_token_id=VOCABULARY - 1,
    )  # fmt: skip
    target = folder / "target"
    DeepseekV3ForCausalLM(config).float().save_pretrained(target)
    shape = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": VOCABULARY,
        "use_sliding_window": False, "block_size": BLOCK, "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": VOCABULARY - 2, "target_layer_ids": [0, 1]},
    }  # fmt: skip
    drafter = folder / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    save_file(drafter_weights(shape), drafter / "model.safetensors")
    return target, drafter


def drafter_weights(shape: dict[str, Any]) -> dict[str, Any]:
    """Random weights of a DFlash drafter; what it drafts is replaced."""
    import torch

    hidden, head = shape["hidden_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    sizes = {"fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    layer = {
        "self_attn.q_proj.weight": (q, hidden), "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden), "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (shape["intermediate_size"], hidden),
        "mlp.up_proj.weight": (shape["intermediate_size"], hidden),
        "mlp.down_proj.weight": (hidden, shape["intermediate_size"]),
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    sizes |= {f"layers.0.{name}": size for name, size in layer.items()}
    return {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size) * 0.05 for name, size in sizes.items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--levels", type=levels, default=[1, 16], help="requests at a time")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks among them")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU, as nodes")
    parser.add_argument("--cpu", action="store_true", help="in the environment of scripts/sglang_env.sh")
    parser.add_argument("--attention", choices=["split", "backend"], help="whose kernel verifies trees")
    parser.add_argument("--dense", action="store_true", help="no mixture of experts")
    return parsed(parser)


if __name__ == "__main__":
    main()
