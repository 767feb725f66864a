"""Device code of the token choice; `choose.py` launches it."""

import triton
import triton.language as tl

NEVER = tl.constexpr(-float("inf"))
LOW_CONFIDENCE = tl.constexpr(0)
MASKGIT_PLUS = tl.constexpr(1)
TOPK_MARGIN = tl.constexpr(2)
ENTROPY = tl.constexpr(3)
RANDOM = tl.constexpr(4)


@triton.jit
def mix(x):
    """See `acache_kernels.rng`; x is uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def uniforms(seed, counter):
    """One seed (int64 scalar), counters uint32 [n] -> float32 [n] in (0, 1)."""
    key0 = mix(((seed & 0xFFFFFFFF) + 0x9E3779B9).to(tl.uint32))
    key1 = mix((((seed >> 32) & 0xFFFFFFFF).to(tl.uint32) ^ key0) + 0x85EBCA6B)
    bits = mix(mix(counter + key0) ^ key1)
    return ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def allowed_logits(row, ids, forbidden, num_forbidden, limit):
    """float32 logits of `ids` with -inf where an id may not be chosen."""
    ok = ids < limit
    for index in range(num_forbidden):
        ok = ok & (ids != tl.load(forbidden + index))
    return tl.load(row + ids, mask=ok, other=NEVER).to(tl.float32)


@triton.jit
def find_edges(
    logits,
    temperature,
    top_k,
    top_p,
    forbidden,
    edges,
    row_stride,
    num_forbidden,
    limit,
    BLOCK: tl.constexpr,
):
    """edges [M] = smallest kept logit of each row, -inf for rows without a filter (which cost nothing).

    Float32 bits with the low 31 flipped for negative numbers sort as signed integers. The edge is the smallest
    such key with fewer than top_k ids above it that hold at most top_p of the mass: 32 halvings find it.
    """
    line = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + line)
    p = tl.load(top_p + line)
    edge = NEVER
    if (k < limit) | (p < 1.0):
        t = tl.load(temperature + line)
        scale = tl.where(t > 0.0, t, 1.0)
        row = logits + line * row_stride
        lanes = tl.arange(0, BLOCK)
        peaks = tl.full([BLOCK], NEVER, tl.float32)
        for start in range(0, limit, BLOCK):
            peaks = tl.maximum(peaks, allowed_logits(row, start + lanes, forbidden, num_forbidden, limit))
        best = tl.max(peaks, 0)
        masses = tl.zeros([BLOCK], tl.float32)
        for start in range(0, limit, BLOCK):
            z = allowed_logits(row, start + lanes, forbidden, num_forbidden, limit)
            masses += tl.exp((z - best) / scale)
        most = tl.where(p < 1.0, p, 2.0) * tl.sum(masses, 0)
        low = tl.full([], -2139095041, tl.int64)  # key of -inf
        best_bits = best.to(tl.int32, bitcast=True)
        high = (best_bits ^ ((best_bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        for _ in range(32):
            middle = (low + high) >> 1
            bits = middle.to(tl.int32)
            bound = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            counts = tl.zeros([BLOCK], tl.int32)
            masses = tl.zeros([BLOCK], tl.float32)
            for start in range(0, limit, BLOCK):
                z = allowed_logits(row, start + lanes, forbidden, num_forbidden, limit)
                above = z > bound
                counts += above.to(tl.int32)
                masses += tl.where(above, tl.exp((z - best) / scale), 0.0)
            kept = (tl.sum(counts, 0) < k) & (tl.sum(masses, 0) <= most)
            high = tl.where(kept, middle, high)
            low = tl.where(kept, low, tl.minimum(middle + 1, high))
        bits = high.to(tl.int32)
        edge = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(edges + line, edge)


@triton.jit
def second_best(z, ids, best):
    """The second largest of `best` and the values `z` of `ids`; equal ones count twice."""
    peak = tl.max(z, 0)
    first_at = tl.min(tl.where(z == peak, ids, 2147483647), 0)
    runner_up = tl.max(tl.where(ids == first_at, NEVER, z), 0)
    return tl.maximum(tl.minimum(best, peak), runner_up)


@triton.jit
def add_kept(z, base, old_base, scale, total, moment):
    """The sums of e = exp(x) and of x * e, x = (z - base) / scale, over `z` and what was summed so far.

    What was summed so far is relative to `old_base` (-inf: nothing was).
    """
    shift = tl.where(old_base == NEVER, 0.0, (old_base - base) / scale)
    shrink = tl.exp(shift)
    x = (z - base) / scale
    e = tl.exp(x)
    moment = (moment + shift * total) * shrink + tl.sum(tl.where(e > 0.0, x, 0.0) * e, 0)
    return total * shrink + tl.sum(e, 0), moment


@triton.jit
def scan_chunk(
    logits,
    temperature,
    seed,
    rule,
    edges,
    forbidden,
    parts,
    part_ids,
    row_stride,
    num_forbidden,
    limit,
    chunk,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """One program: one chunk of one row, read once.

    parts [M, C, FIELDS]: 0 largest z, 1 sum exp(z - largest), 2 largest score, 3 z there, 4 second largest kept
    z, 5 and 6 the sums of e and of x * e over kept ids, with x = (z - largest) / scale and e = exp(x).
    part_ids [M, C]: id of the largest score.
    """
    line = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + line)
    edge = tl.load(edges + line)
    code = tl.load(rule + line)
    row_seed = tl.load(seed + line)
    dream = (code >= MASKGIT_PLUS) & (code <= ENTROPY)
    scale = tl.where(t > 0.0, t, 1.0)
    row = logits + line * row_stride
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, limit)

    best = tl.full([], NEVER, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    best_score = tl.full([], NEVER, tl.float32)
    best_id = begin
    best_z = tl.full([], NEVER, tl.float32)
    second = tl.full([], NEVER, tl.float32)
    kept_sum = tl.full([], 0.0, tl.float32)
    kept_moment = tl.full([], 0.0, tl.float32)
    for start in range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = allowed_logits(row, ids, forbidden, num_forbidden, end)
        peak = tl.max(z, 0)
        new_best = tl.maximum(best, peak)
        base = tl.where(new_best == NEVER, 0.0, new_best)
        total = total * tl.exp(best - base) + tl.sum(tl.exp(z - base), 0)
        score = z
        if t > 0.0:
            noise = -tl.log(-tl.log(uniforms(row_seed, ids.to(tl.uint32))))
            score = z + t * noise
        score = tl.where(z >= edge, score, NEVER)
        block_score = tl.max(score, 0)
        block_id = tl.min(tl.where(score == block_score, ids, 2147483647), 0)
        better = block_score > best_score
        best_z = tl.where(better, tl.max(tl.where(ids == block_id, z, NEVER), 0), best_z)
        best_id = tl.where(better, block_id, best_id)
        best_score = tl.where(better, block_score, best_score)
        if dream:
            kept_z = tl.where(z >= edge, z, NEVER)
            second = tl.maximum(second, second_best(kept_z, ids, tl.where(best >= edge, best, NEVER)))
            kept_sum, kept_moment = add_kept(kept_z, base, best, scale, kept_sum, kept_moment)
        best = new_best

    at = (line * tl.num_programs(1) + tl.program_id(1)) * FIELDS
    tl.store(parts + at, best)
    tl.store(parts + at + 1, total)
    tl.store(parts + at + 2, best_score)
    tl.store(parts + at + 3, best_z)
    tl.store(parts + at + 4, second)
    tl.store(parts + at + 5, kept_sum)
    tl.store(parts + at + 6, kept_moment)
    tl.store(part_ids + line * tl.num_programs(1) + tl.program_id(1), best_id)


@triton.jit
def combine_chunks(
    temperature,
    seed,
    rule,
    edges,
    parts,
    part_ids,
    token,
    confidence,
    logprob,
    num_chunks,
    BLOCK_C: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """One program: the chunks of one row, and its results."""
    line = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_C)
    ok = lanes < num_chunks
    at = parts + (line * num_chunks + lanes) * FIELDS
    peaks = tl.load(at, mask=ok, other=NEVER)
    best = tl.max(peaks, 0)
    shrink = tl.where(ok, tl.exp(peaks - best), 0.0)
    total = tl.sum(tl.load(at + 1, mask=ok, other=0.0) * shrink, 0)
    scores = tl.load(at + 2, mask=ok, other=NEVER)
    ids = tl.load(part_ids + line * num_chunks + lanes, mask=ok, other=2147483647)
    top = scores == tl.max(scores, 0)
    chosen = tl.min(tl.where(top, ids, 2147483647), 0)
    z = tl.max(tl.where(top & (ids == chosen), tl.load(at + 3, mask=ok, other=NEVER), NEVER), 0)
    log_p = z - best - tl.log(total)
    tl.store(token + line, chosen.to(tl.int64))
    tl.store(logprob + line, log_p)

    code = tl.load(rule + line)
    t = tl.load(temperature + line)
    scale = tl.where(t > 0.0, t, 1.0)
    value = tl.exp(log_p)
    if (code >= MASKGIT_PLUS) & (code <= ENTROPY):
        shift = tl.where(peaks == NEVER, 0.0, (peaks - best) / scale)
        weight = tl.exp(shift)
        part_sum = tl.load(at + 5, mask=ok, other=0.0)
        kept_sum = tl.sum(part_sum * weight, 0)
        moment = tl.sum((tl.load(at + 6, mask=ok, other=0.0) + shift * part_sum) * weight, 0)
        kept_best = tl.where(peaks >= tl.load(edges + line), peaks, NEVER)
        first_at = tl.min(tl.where(kept_best == best, lanes, BLOCK_C), 0)
        runner_up = tl.max(tl.where(lanes == first_at, NEVER, kept_best), 0)
        second = tl.maximum(runner_up, tl.max(tl.load(at + 4, mask=ok, other=NEVER), 0))
        value = tl.exp((z - best) / scale) / kept_sum
        if code == TOPK_MARGIN:
            value = (1.0 - tl.exp((second - best) / scale)) / kept_sum
        if code == ENTROPY:
            value = moment / kept_sum - tl.log(kept_sum)
    if code >= RANDOM:
        counter = (tl.zeros([1], tl.int64) + 0xFFFFFFFF).to(tl.uint32)
        value = tl.max(uniforms(tl.load(seed + line), counter), 0)
    tl.store(confidence + line, value)
