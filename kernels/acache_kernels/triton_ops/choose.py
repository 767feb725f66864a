"""Choosing tokens in Triton: each logit is read once, in chunks, by programs that never write a softmax out.

Not run on a GPU so far: tested under Triton's interpreter, compiled ahead of time.

    find_edges      one program a row; only rows with top-k or top-p do anything
    scan_chunk      rows x chunks of the vocabulary; seven numbers and an id out of each
    combine_chunks  one program a row
"""

import torch
import triton

from acache_kernels.choose import Choice, ChooseRequest
from acache_kernels.triton_ops.choose_kernels import combine_chunks, find_edges, scan_chunk

BLOCK = 1024
CHUNK = 8192
FIELDS = 7


def choose(request: ChooseRequest) -> Choice:
    """See `acache_kernels.choose.choose_tokens`."""
    logits, limit = request.logits, request.vocab_limit
    if logits.stride(1) != 1:
        raise ValueError("the last dimension of logits must be contiguous")
    rows, device = len(logits), logits.device
    choice = Choice(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
    if rows == 0:
        return choice
    block = min(BLOCK, triton.next_power_of_2(limit))
    chunks = triton.cdiv(limit, CHUNK)
    edges = torch.empty(rows, dtype=torch.float32, device=device)
    parts = torch.empty((rows, chunks, FIELDS), dtype=torch.float32, device=device)
    part_ids = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    temperature, seed, rule = (x.contiguous() for x in (request.temperature, request.seed, request.rule))
    forbidden = request.forbidden.to(torch.int32)
    shared = (forbidden, len(forbidden), limit)
    find_edges[(rows,)](
        logits,
        temperature,
        request.top_k.contiguous(),
        request.top_p.contiguous(),
        forbidden,
        edges,
        logits.stride(0),
        *shared[1:],
        BLOCK=block,
        num_warps=8,
    )
    scan_chunk[(rows, chunks)](
        logits,
        temperature,
        seed,
        rule,
        edges,
        forbidden,
        parts,
        part_ids,
        logits.stride(0),
        *shared[1:],
        CHUNK,
        BLOCK=block,
        FIELDS=FIELDS,
        num_warps=4,
    )
    combine_chunks[(rows,)](
        temperature,
        seed,
        rule,
        edges,
        parts,
        part_ids,
        *choice,
        chunks,
        BLOCK_C=triton.next_power_of_2(chunks),
        FIELDS=FIELDS,
        num_warps=1,
    )
    return choice
