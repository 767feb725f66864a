"""Compiles every Triton kernel ahead of time, without a GPU, and prints what ptxas says of it as a table.

    python kernels/aot_report.py [--arch 80 90 100] [--dtype bf16 fp32]

Exits 1 when a kernel spills registers.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent))

from acache_kernels.triton_ops import attention, attention_kernels, choose, choose_kernels, importance, rebase

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes a block may have


@dataclass(frozen=True)
class Kernel:
    name: str
    function: Any
    types: dict[str, str]  # argument -> Triton type, constexpr left out
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)

    def source(self) -> ASTSource:
        """With the specialisation a launch would use: aligned pointers, strides that are multiples of 16."""
        names = self.function.arg_names
        signature = {name: self.types.get(name, "constexpr") for name in names}
        aligned = [
            i for i, name in enumerate(names) if signature[name].startswith("*") or name.endswith(("_row", "_head"))
        ]
        attributes = {(i,): [["tt.divisibility", 16]] for i in aligned if names[i] != "kv_head"}
        return ASTSource(self.function, signature, self.constants, attributes)


def kernels(dtype: str) -> Iterator[Kernel]:
    for head_dim, group in ((64, 1), (80, 1), (128, 1), (128, 7), (256, 1)):
        yield from attention_kernels_of(dtype, head_dim, group)
        yield from importance_kernels_of(dtype, head_dim, group)
    for head_dim in (64, 128):
        yield rebase_kernel_of(dtype, head_dim)
    yield from choose_kernels_of(dtype)


def attention_kernels_of(dtype: str, head_dim: int, group: int) -> Iterator[Kernel]:
    strides = dict.fromkeys(("q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "num_q_heads"), "i32")
    tensors = {name: f"*{dtype}" for name in ("q", "k", "v", "out")}
    floats = {name: "*fp32" for name in ("lse", "part_out", "part_lse")}
    for shape in attention.tile_shapes(head_dim, TORCH_DTYPES[dtype]):
        sizes = {
            "GROUP": group,
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_M": shape.block_m,
        }
        title = f"d{head_dim} g{group} m{shape.block_m}"
        yield Kernel(
            f"attend_tiles {title}",
            attention_kernels.attend_tiles,
            {**tensors, **floats, **strides, "work": "*i32", "kv_indices": "*i32", "scale_log2": "fp32"},
            {**sizes, "BLOCK_N": shape.block_n, "FIELDS": attention_kernels.WORK_FIELDS, "PRECISION": "ieee"},
            {"num_warps": shape.num_warps, "num_stages": shape.num_stages},
        )
        if group == 1:
            yield Kernel(
                f"merge_parts {title}",
                attention_kernels.merge_parts,
                {**floats, "out": f"*{dtype}", "merges": "*i32", "num_q_heads": "i32"},
                {**sizes, "ROWS": attention_kernels.MERGE_ROWS, "FIELDS": attention_kernels.MERGE_FIELDS},
                {"num_warps": 4},
            )


def importance_kernels_of(dtype: str, head_dim: int, group: int) -> Iterator[Kernel]:
    types = {
        "q": f"*{dtype}",
        "k": f"*{dtype}",
        **dict.fromkeys(("q_row", "q_head", "k_row", "k_head", "num_q_heads", "total_keys"), "i32"),
        **dict.fromkeys(("norms", "sums"), "*fp32"),
        **dict.fromkeys(("query_rows", "key_slots"), "*i64"),
        **dict.fromkeys(("scale_log2", "norm_scale"), "fp32"),
        "work": "*i32",
    }
    constants: dict[str, Any] = {
        "GROUP": group,
        "D": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "FIELDS": importance.WORK_FIELDS,
        **importance.block_sizes(head_dim, TORCH_DTYPES[dtype]),
    }
    options = importance.launch_options(TORCH_DTYPES[dtype])
    for name, function, extra in (
        ("column_sums", importance.column_sums, {"NORM_BY_ROW": True}),
        ("affix_lse", importance.affix_lse, {}),
    ):
        used = {arg: kind for arg, kind in types.items() if arg in function.arg_names}
        title = f"{name} d{head_dim} g{group}"
        yield Kernel(title, function, used, {**constants, **extra}, options)


def rebase_kernel_of(dtype: str, head_dim: int) -> Kernel:
    types = {
        **dict.fromkeys(("k_table", "v_table", "src_slots", "dst_slots"), "*i64"),
        **dict.fromkeys(("cos", "sin"), "*fp32"),
        "like": f"*{dtype}",
        **dict.fromkeys(("k_row", "k_head", "v_row", "v_head", "num_heads"), "i32"),
    }
    blocks = {"BLOCK_H": 4096 // head_dim, "BLOCK_HALF": head_dim // 2, "BLOCK_D": head_dim}
    constants = {"HALF": head_dim // 2, "D": head_dim, **blocks}
    return Kernel(f"rebase_slots d{head_dim}", rebase.rebase_slots, types, constants, {"num_warps": 4})


def choose_kernels_of(dtype: str) -> Iterator[Kernel]:
    rows = {"temperature": "*fp32", "seed": "*i64", "rule": "*i64", "edges": "*fp32"}
    table = {"logits": f"*{dtype}", "forbidden": "*i32", "num_forbidden": "i32", "limit": "i32"}
    filters = {"top_k": "*i64", "top_p": "*fp32", "temperature": "*fp32", "edges": "*fp32"}
    parts = {"parts": "*fp32", "part_ids": "*i32"}
    outputs = {"token": "*i64", "confidence": "*fp32", "logprob": "*fp32", "num_chunks": "i32"}
    yield Kernel(
        "find_edges",
        choose_kernels.find_edges,
        {**table, **filters, "row_stride": "i32"},
        {"BLOCK": choose.BLOCK},
        {"num_warps": 8},
    )
    yield Kernel(
        "scan_chunk",
        choose_kernels.scan_chunk,
        {**table, **rows, **parts, "row_stride": "i32", "chunk": "i32"},
        {"BLOCK": choose.BLOCK, "FIELDS": choose.FIELDS},
        {"num_warps": 4},
    )
    yield Kernel(
        "combine_chunks",
        choose_kernels.combine_chunks,
        {**rows, **parts, **outputs},
        {"BLOCK_C": 16, "FIELDS": choose.FIELDS},
        {"num_warps": 1},
    )


def report(kernel: Kernel, arch: int) -> tuple[int, int, int]:
    """(registers, bytes spilled, bytes of shared memory)."""
    compiled = triton.compile(kernel.source(), target=GPUTarget("cuda", arch, 32), options=kernel.options)
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (\S+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        tool = triton.knobs.nvidia.ptxas_blackwell if arch >= 100 else triton.knobs.nvidia.ptxas
        command = [tool.path, "-v", f"--gpu-name={target.group(1)}", str(path), "-o", str(path) + ".cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(x) for x in re.findall(r"Used (\d+) registers", log))
    spilled = sum(int(x) for x in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    return registers, spilled, compiled.metadata.shared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"], choices=list(TORCH_DTYPES))
    args = parser.parse_args()
    columns = " | ".join(f"sm_{arch} regs / spill B / smem B" for arch in args.arch)
    print(f"| kernel | dtype | warps | {columns} |\n|{'---|' * (3 + len(args.arch))}")
    faults = 0
    for dtype in args.dtype:
        for kernel in kernels(dtype):
            cells = []
            for arch in args.arch:
                registers, spilled, shared = report(kernel, arch)
                faults += (spilled > 0) + (shared > SHARED_LIMIT.get(arch, shared))
                cells.append(f"{registers} / {spilled} / {shared}")
            line = [kernel.name, dtype, str(kernel.options["num_warps"]), *cells]
            print("| " + " | ".join(line) + " |", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
