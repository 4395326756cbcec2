"""`python compiled_attention.py`: kernels of tree attention compiled for GPUs that are not here.

Prints a JSON object for each: the shared memory that a program takes, and what it may take. A process of its
own, since kernels of one that interprets them cannot be compiled.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from toolkit.ddtree.kernels import tree_attention

SERVER, WORKSTATION = 227 << 10, 99 << 10  # bytes of shared memory of a program
CASES = [
    # capability, bytes, rows, Dk, Dv, the queries' dtype, the cache's
    (90, SERVER, 528, 576, 512, "bf16", "bf16"),
    (90, SERVER, 132, 128, 128, "bf16", "bf16"),
    (103, SERVER, 528, 576, 512, "bf16", "fp8e4nv"),
    (120, WORKSTATION, 528, 576, 512, "bf16", "bf16"),
    (120, WORKSTATION, 264, 128, 128, "bf16", "fp8e4nv"),
    (120, WORKSTATION, 264, 320, 128, "fp32", "fp32"),
    (80, 163 << 10, 264, 576, 128, "fp32", "fp32"),
]
POINTERS = {
    "p_start": "*i32", "p_cached_row": "*i64", "p_cell": "*u8", "p_mask_start": "*i64",
    "p_part": "*fp32", "p_log": "*fp32", "scale": "fp32", "key_scale": "fp32", "value_scale": "fp32",
}  # fmt: skip


def compiled(kernel, capability, constants, kinds, **options):
    """Bytes of shared memory of a kernel, whose other arguments are integers."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith(("_row", "_head"))
    }
    given = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, given, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return made.metadata.shared


def split(capability, limit, rows, key_dim, value_dim, dtype, cached, *, once=False):
    """Shared memory of the kernel over prefix and tree."""
    item = 4 if dtype == "fp32" else 2
    tile = tree_attention._tile(rows, key_dim, value_dim, item, limit, once=once)
    main, rest = tree_attention._halves(key_dim)
    constants = {
        "GROUP": 8, "BLOCKS": 4, "SPLITS": 8, "SEES": 2, "KEY_DIM": key_dim, "MAIN": main, "REST": rest,
        "VALUE_DIM": value_dim, "VALUE_PAD": triton.next_power_of_2(value_dim), "ROWS": tile.rows,
        "COLUMNS": tile.columns, "EXACT": dtype == "fp32", "ONCE": once,
    }  # fmt: skip
    kinds = POINTERS | dict.fromkeys(("p_query", "p_key", "p_value", "p_out"), f"*{dtype}")
    kinds |= dict.fromkeys(("p_cached_key", "p_cached_value"), f"*{cached}")
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return compiled(tree_attention._split_kernel, capability, constants, kinds, **options)


if __name__ == "__main__":
    for case in CASES:
        for once in {False, case[4] == 512}:
            shared = split(*case, once=once)
            print(json.dumps({"case": case, "once": once, "shared": shared, "limit": case[1]}))
    sizes = {"SPLITS": 4, "COLUMNS": 64, "VALUE_DIM": 128, "VALUE_PAD": 128, "ROWS": 4}
    for one in ({}, {"rows": 1, "width": 1}):  # an argument that is 1 becomes a constant
        kinds = POINTERS | {"p_out": "*bf16"}
        shared = compiled(tree_attention._merge_kernel, 120, sizes | one, kinds)
        print(json.dumps({"case": ["merge", one], "shared": shared, "limit": WORKSTATION}))
