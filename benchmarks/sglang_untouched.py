"""Whether the installed plugin changes what it is not selected for, on one GPU.

    python benchmarks/sglang_untouched.py --logs logs --out benchmarks/sglang_h200_untouched.json

Plain decoding, DFLASH, NGRAM, EAGLE3 and STANDALONE of stock SGLang, each without the plugin's entry point
and with it, under CUDA graphs and overlap scheduling: the same prompts have to come to the same tokens in the
same number of verify steps. STANDALONE drafts with the target itself, EAGLE3 with random weights. Each engine
decodes everything twice, so that a mode whose tokens vary by themselves is told from one that is changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.sglang_engines import Child, Mode, pair_parser, parsed, settings, stop
from benchmarks.sglang_modes import levels, machine, read_prompts

TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}


def main() -> None:
    args = parse()
    prompts = read_prompts(args)
    defaults = {
        "model_path": str(args.target), "skip_tokenizer_init": True, "dtype": "bfloat16",
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": 16, "max_running_requests": 16,
        "mem_fraction_static": 0.8, "max_total_tokens": 32768, "context_length": 2048, "random_seed": 1,
        "disable_radix_cache": True, "log_level": "warning", "sleep_on_idle": True, **settings(args.set),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        own = modes(args, eagle3(args.target, folder / "eagle3"))
        children = {
            (name, word): Child(f"{name} {word} plugin", mode, defaults, prompts, folder, args.logs)
            for name, arguments in own.items()
            for word, mode in (("without", Mode(arguments)), ("with", Mode(arguments, plugins=("ddtree",))))
        }
        told: dict[str, Any] = {}
        result = {"machine": machine(), "new_tokens": args.tokens, "modes": told}
        try:
            for name in own:
                told[name] = compared(children, name, args)
                print(f"{name}: {json.dumps(told[name])}", flush=True)
                if args.out:  # should the rest fail
                    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        finally:
            stop(children.values())
    if any(not level["same"] for mode in told.values() for level in mode.values()):
        raise SystemExit("with the plugin installed something is not as it is without")


def modes(args: argparse.Namespace, eagle: Path) -> dict[str, dict[str, Any]]:
    """SGLang's arguments of each mode."""
    target, drafter = str(args.target), str(args.drafter)
    own = {
        "plain": {},
        "DFLASH": {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": drafter},
        "NGRAM": {"speculative_algorithm": "NGRAM"},
        "EAGLE3": {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(eagle), **TREE},
        "STANDALONE": {
            "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": target, **TREE,
        },
    }  # fmt: skip
    return {name: own[name] for name in args.modes}


def compared(children: dict[tuple[str, str], Child], name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What one mode decodes on both sides, by level."""
    pair = {word: children[name, word] for word in ("without", "with")}
    for child in pair.values():
        child.wait("ready")
    told = {}
    for level in args.levels:
        order = {"level": level, "tokens": args.tokens, "requests": args.prompts}
        twice = {word: [child.decode(**order), child.decode(**order)] for word, child in pair.items()}
        told[f"requests {level}"] = verdict(twice)
    return told


def verdict(twice: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Compare two decodings on each side."""
    first = twice["without"][0]
    return {
        "requests": len(first["outputs"]),
        "tokens": sum(map(len, first["outputs"])),
        "verify_steps": {word: [run["verify_steps"] for run in runs] for word, runs in twice.items()},
        "repeats_itself": all(runs[0]["outputs"] == runs[1]["outputs"] for runs in twice.values()),
        "same": all(
            a[key] == b[key]
            for a, b in zip(twice["without"], twice["with"], strict=True)
            for key in ("outputs", "verify_steps")
        ),
    }


def eagle3(target: Path, folder: Path) -> Path:
    """An EAGLE3 drafter with random weights that fits the target."""
    import torch
    from safetensors.torch import save_file

    told = json.loads((target / "config.json").read_text(encoding="utf-8"))
    hidden, inner, vocabulary = told["hidden_size"], told["intermediate_size"], told["vocab_size"]
    head, heads, groups = 64, 4, 2
    shape = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": head, "num_hidden_layers": 1, "vocab_size": vocabulary, "draft_vocab_size": vocabulary,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
        "max_position_embeddings": 2048, "torch_dtype": "bfloat16", "attention_bias": False,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    sizes = {
        "self_attn.q_proj": (heads * head, 2 * hidden), "self_attn.k_proj": (groups * head, 2 * hidden),
        "self_attn.v_proj": (groups * head, 2 * hidden), "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "hidden_norm": (hidden,), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    named = {f"midlayer.{name}.weight": size for name, size in sizes.items()}
    named |= {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,)}
    named |= {"lm_head.weight": (vocabulary, hidden)}
    torch.manual_seed(3)
    weights = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size) * 0.05 for name, size in named.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    save_file({name: value.bfloat16() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def parse() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--levels", type=levels, default=[1, 16], help="requests at a time")
    parser.add_argument(
        "--modes", nargs="+", default=["plain", "DFLASH", "NGRAM", "EAGLE3", "STANDALONE"], metavar="MODE"
    )
    return parsed(parser)


if __name__ == "__main__":
    main()
