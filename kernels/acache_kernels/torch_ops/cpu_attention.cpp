// Paged attention on CPUs: reads keys and values where they lie in the pool, no gathered copy.
//
// A task is up to TASK_ROWS packed rows (query x head of the group) of one request, in tiles of up to 32. Lanes of a
// vector are rows, so scores of a key, the running maximum, the sum and the exponentials of all rows are plain
// vertical operations. A tile holds:
//
//   queries  [D][LANES]      transposed once, scaled to base 2
//   block    [BLOCK][D]      float32 copy of the next keys, then of their values: stays in the L1 cache
//   scores   [BLOCK][LANES]  scores, then weights
//   acc      [LANES][D]      output rows, lanes of a vector are dimensions here
//
// Compiled by native_library.py for the machine it runs on; no torch headers.

#include <cmath>

#include "cpu_vector.h"

namespace {

constexpr int BLOCK = 48;  // keys; a multiple of every KEYS below
constexpr int TASK_ROWS = 256;  // as in native.py

struct Step {
    const void *q, *k, *v;
    void* out;
    float* lse;  // or null
    const int64_t* slots;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    int num_q_heads, num_kv_heads;
    float scale;
};

struct Task {
    int64_t first_query, num_rows, tile, first_key, num_keys;  // see TASK_FIELDS in native.py
};

template <int D> inline void copy_row(const float* from, float* to) { std::memcpy(to, from, 4 * D); }
template <int D> inline void copy_row(const uint16_t* from, float* to) {
    for (int d = 0; d < D; d += 16) {
        auto wide = __builtin_convertvector(*(const Vec<16>::H*)(from + d), Vec<16>::I) << 16;
        *(Vec<16>::I*)(to + d) = wide;
    }
}

// BLOCK rows of a pool as float32; the rows of the block after are fetched meanwhile.
template <class T, int D>
void fill_block(const T* pool, int64_t row, const int64_t* slots, int count, int ahead, float* block) {
    for (int j = 0; j < count; j++) {
        copy_row<D>(pool + slots[j] * row, block + j * D);
        if (j < ahead) {
            const char* next = (const char*)(pool + slots[count + j] * row);
            for (size_t line = 0; line < D * sizeof(T); line += 64) __builtin_prefetch(next + line);
        }
    }
    if (count < BLOCK) std::memset(block + count * D, 0, 4 * D * (BLOCK - count));
}

// scores [BLOCK][W * N] = block [BLOCK][D] times queries [D][W * N]
template <int D, int W, int N> void score_block(const float* block, const float* queries, float* scores) {
    using F = typename Vec<W>::F;
    constexpr int KEYS = N == 1 ? 16 : 12, LANES = W * N;
    static_assert(BLOCK % KEYS == 0);
    for (int j = 0; j < BLOCK; j += KEYS) {
        F acc[KEYS][N] = {};
        const float* keys = block + j * D;
#pragma GCC unroll 1
        for (int d = 0; d < D; d++) {
            F q[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) q[n] = load<W>(queries + d * LANES + n * W);
#pragma GCC unroll 16
            for (int i = 0; i < KEYS; i++)
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) acc[i][n] += keys[i * D + d] * q[n];
        }
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) store<W>(scores + (j + i) * LANES + n * W, acc[i][n]);
    }
}

// Scores of `count` keys to weights; peak, total and shrink [W * N] as in online softmax.
template <int W, int N> void weigh_block(float* scores, int count, float* peak, float* total, float* shrink) {
    using F = typename Vec<W>::F;
    constexpr int LANES = W * N;
    for (int n = 0; n < N; n++) {
        float* column = scores + n * W;
        F old = load<W>(peak + n * W), top = old;
        for (int j = 0; j < count; j++) {
            F s = load<W>(column + j * LANES);
            top = s > top ? s : top;
        }
        F factor = exp2_of<W>(old - top), sum = load<W>(total + n * W) * factor;
        for (int j = 0; j < count; j++) {
            F w = exp2_of<W>(load<W>(column + j * LANES) - top);
            sum += w;
            store<W>(column + j * LANES, w);
        }
        store<W>(peak + n * W, top);
        store<W>(total + n * W, sum);
        store<W>(shrink + n * W, factor);
    }
}

// acc [rows][D] = acc * shrink + weights^T [LANES][count] times block [count][D]
template <int D, int LANES>
void add_values(const float* block, const float* weights, const float* shrink, int count, int rows, float* acc) {
    using F = Vec<16>::F;
    constexpr int VECS = D / 16, ROWS = VECS <= 2 ? 8 : VECS <= 6 ? 4 : 2;
    for (int r = 0; r < rows; r += ROWS) {
        F sum[ROWS][VECS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
            for (int n = 0; n < VECS; n++) sum[i][n] = load<16>(acc + (r + i) * D + n * 16) * shrink[r + i];
#pragma GCC unroll 1
        for (int j = 0; j < count; j++) {
            F value[VECS];
#pragma GCC unroll 16
            for (int n = 0; n < VECS; n++) value[n] = load<16>(block + j * D + n * 16);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
                for (int n = 0; n < VECS; n++) sum[i][n] += value[n] * weights[j * LANES + r + i];
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
            for (int n = 0; n < VECS; n++) store<16>(acc + (r + i) * D + n * 16, sum[i][n]);
    }
}

template <class T, int D, int W, int N> void attend(const Step& s, const Task& t, int kv_head) {
    constexpr int LANES = W * N;
    alignas(64) float queries[D * LANES], block[BLOCK * D], scores[BLOCK * LANES], acc[LANES * D];
    alignas(64) float peak[LANES], total[LANES], shrink[LANES];
    const int group = s.num_q_heads / s.num_kv_heads;
    const int rows = int(t.num_rows - t.tile < LANES ? t.num_rows - t.tile : LANES);
    std::memset(acc, 0, sizeof acc);
    for (int r = 0; r < LANES; r++) {
        peak[r] = -1e30f;
        total[r] = 0;
        const int64_t packed = t.tile + (r < rows ? r : 0);  // idle lanes repeat row 0
        const T* q = (const T*)s.q + (t.first_query + packed / group) * s.q_row +
                     (kv_head * group + packed % group) * s.q_head;
        for (int d = 0; d < D; d++) queries[d * LANES + r] = widen(q[d]) * (s.scale * 1.44269504088896f);
    }
    const T* k = (const T*)s.k + kv_head * s.k_head;
    const T* v = (const T*)s.v + kv_head * s.v_head;
    for (int64_t start = 0; start < t.num_keys; start += BLOCK) {
        const int64_t left = t.num_keys - start;
        const int count = int(left < BLOCK ? left : BLOCK);
        const int ahead = int(left - count < count ? left - count : count);
        const int64_t* slots = s.slots + t.first_key + start;
        fill_block<T, D>(k, s.k_row, slots, count, ahead, block);
        score_block<D, W, N>(block, queries, scores);
        weigh_block<W, N>(scores, count, peak, total, shrink);
        fill_block<T, D>(v, s.v_row, slots, count, ahead, block);
        add_values<D, LANES>(block, scores, shrink, count, rows, acc);
    }
    for (int r = 0; r < rows; r++) {
        const int64_t packed = t.tile + r;
        const int64_t at = (t.first_query + packed / group) * s.num_q_heads + kv_head * group + packed % group;
        for (int d = 0; d < D; d++) narrow(acc[r * D + d] / total[r], (T*)s.out + at * D + d);
        if (s.lse) s.lse[at] = (peak[r] + std::log2(total[r])) * 0.693147180559945f;
    }
}

// The tiles of a task follow each other, so that all but the first find the keys and values in the L2 cache.
template <class T, int D> void run_task(const Step& s, Task t, int kv_head) {
    const int64_t end = t.tile + TASK_ROWS < t.num_rows ? t.tile + TASK_ROWS : t.num_rows;
    for (; t.tile < end; t.tile += 32) {
        const int64_t rows = end - t.tile;
        if (rows <= 8)
            attend<T, D, 8, 1>(s, t, kv_head);
        else if (rows <= 16)
            attend<T, D, 16, 1>(s, t, kv_head);
        else
            attend<T, D, 16, 2>(s, t, kv_head);
    }
}

template <class T> auto task_runner(int head_dim) -> void (*)(const Step&, Task, int) {
    switch (head_dim) {
        case 32: return run_task<T, 32>;
        case 64: return run_task<T, 64>;
        case 80: return run_task<T, 80>;
        case 96: return run_task<T, 96>;
        case 128: return run_task<T, 128>;
        default: return nullptr;
    }
}

}  // namespace

// Returns 0, or 1 when there is no kernel for this head size.
extern "C" int acache_attend(const Step* step, const Task* tasks, int64_t num_tasks, int head_dim, int bfloat16,
                             int threads) {
    auto run = bfloat16 ? task_runner<uint16_t>(head_dim) : task_runner<float>(head_dim);
    if (!run) return 1;
    const int64_t total = num_tasks * step->num_kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < total; i++) run(*step, tasks[i / step->num_kv_heads], int(i % step->num_kv_heads));
    return 0;
}
