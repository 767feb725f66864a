// What a transformer does to single rows between its matrix products, in one pass over memory each: plain torch takes
// five to ten. Called through native_rows.py; compiled by native_library.py. Arithmetic is in float32.

#include <cmath>

#include "cpu_vector.h"

namespace {

using F = Vec<16>::F;

float sum_of(F x) {
    float total = 0;
    for (int i = 0; i < 16; i++) total += x[i];
    return total;
}

// out = weight * n(x + residual), sum = x + residual; residual and sum may be null.
template <class T>
void add_rms_norm(const T* x, const T* residual, const T* weight, float eps, int64_t width, T* sum, T* out) {
    F squares = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
        F v = load_wide(x + i);
        if (residual) v += load_wide(residual + i);
        if (sum) store_narrow(sum + i, v);
        squares += v * v;
    }
    for (; i < width; i++) {
        float v = widen(x[i]) + (residual ? widen(residual[i]) : 0.0f);
        if (sum) narrow(v, sum + i);
        rest += v * v;
    }
    const float scale = 1.0f / std::sqrt((sum_of(squares) + rest) / float(width) + eps);
    for (i = 0; i + 16 <= width; i += 16) {
        F v = load_wide(x + i);
        if (residual) v += load_wide(residual + i);  // again, rather than rounded
        store_narrow(out + i, v * scale * load_wide(weight + i));
    }
    for (; i < width; i++) {
        float v = widen(x[i]) + (residual ? widen(residual[i]) : 0.0f);
        narrow(v * scale * widen(weight[i]), out + i);
    }
}

inline F silu(F x) {
    F e = exp2_of<16>((x < 0.0f ? x : -x) * 1.44269504088896f);  // of -|x|
    return x * (x < 0.0f ? e : F{} + 1.0f) / (1.0f + e);
}

template <class T> void silu_mul(const T* gate_up, int64_t width, T* out) {
    const T *gate = gate_up, *up = gate_up + width;
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) store_narrow(out + i, silu(load_wide(gate + i)) * load_wide(up + i));
    for (; i < width; i++) {
        float x = widen(gate[i]);
        narrow(x / (1.0f + std::exp(-x)) * widen(up[i]), out + i);
    }
}

// One position's heads, in place. angles: cosines [half], then sines [half].
template <class T> void rotate(T* x, const float* angles, int64_t heads, int64_t half) {
    for (int64_t h = 0; h < heads; h++, x += 2 * half) {
        int64_t i = 0;
        for (; i + 16 <= half; i += 16) {
            F a = load_wide(x + i), b = load_wide(x + half + i);
            F cos = load<16>(angles + i), sin = load<16>(angles + half + i);
            store_narrow(x + i, a * cos - b * sin);
            store_narrow(x + half + i, b * cos + a * sin);
        }
        for (; i < half; i++) {
            float a = widen(x[i]), b = widen(x[half + i]), cos = angles[i], sin = angles[half + i];
            narrow(a * cos - b * sin, x + i);
            narrow(b * cos + a * sin, x + half + i);
        }
    }
}

constexpr int64_t SERIAL = 1 << 15;  // numbers below which waking other threads costs more than they save

template <class Row> void each_row(int64_t rows, int64_t width, int threads, Row row) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > SERIAL)
    for (int64_t r = 0; r < rows; r++) row(r);
}

template <class T>
void norm_rows(const void* x, const void* residual, const void* weight, float eps, int64_t rows, int64_t width,
               void* sum, void* out, int threads) {
    each_row(rows, width, threads, [=](int64_t r) {
        const int64_t at = r * width;
        add_rms_norm((const T*)x + at, residual ? (const T*)residual + at : nullptr, (const T*)weight, eps, width,
                     sum ? (T*)sum + at : nullptr, (T*)out + at);
    });
}

template <class T>
void silu_rows(const void* gate_up, int64_t rows, int64_t width, void* out, int threads) {
    each_row(rows, width, threads,
             [=](int64_t r) { silu_mul((const T*)gate_up + r * 2 * width, width, (T*)out + r * width); });
}

bool any_outside(const int64_t* numbers, int64_t count, int64_t limit) {
    bool outside = false;
    for (int64_t i = 0; i < count; i++) outside |= numbers[i] < 0 || numbers[i] >= limit;
    return outside;
}

template <class T>
void rotate_rows(void* x, int64_t stride, const int64_t* positions, const float* table, int64_t rows, int64_t heads,
                 int64_t half, int threads) {
    each_row(rows, heads * half * 2, threads, [=](int64_t r) {
        rotate((T*)x + r * stride, table + positions[r] * 2 * half, heads, half);
    });
}

}  // namespace

extern "C" {

void acache_add_rms_norm(const void* x, const void* residual, const void* weight, float eps, int64_t rows,
                         int64_t width, void* sum, void* out, int bfloat16, int threads) {
    auto run = bfloat16 ? norm_rows<uint16_t> : norm_rows<float>;
    run(x, residual, weight, eps, rows, width, sum, out, threads);
}

void acache_silu_mul(const void* gate_up, int64_t rows, int64_t width, void* out, int bfloat16, int threads) {
    auto run = bfloat16 ? silu_rows<uint16_t> : silu_rows<float>;
    run(gate_up, rows, width, out, threads);
}

// Returns 1, with nothing done, where a position is outside the table.
int acache_rotate(void* x, int64_t stride, const int64_t* positions, const float* table, int64_t table_rows,
                  int64_t rows, int64_t heads, int64_t half, int bfloat16, int threads) {
    if (any_outside(positions, rows, table_rows)) return 1;
    auto run = bfloat16 ? rotate_rows<uint16_t> : rotate_rows<float>;
    run(x, stride, positions, table, rows, heads, half, threads);
    return 0;
}

// The bytes of rows [rows][bytes] (stride apart) to the slots of a pool whose rows are pool_stride bytes apart.
// Returns 1, with nothing done, where a slot is outside the pool.
int acache_store(const char* from, int64_t stride, char* pool, int64_t pool_stride, int64_t pool_rows,
                 const int64_t* slots, int64_t rows, int64_t bytes, int threads) {
    if (any_outside(slots, rows, pool_rows)) return 1;
    each_row(rows, bytes / 4, threads,
             [=](int64_t r) { std::memcpy(pool + slots[r] * pool_stride, from + r * stride, bytes); });
    return 0;
}
}
