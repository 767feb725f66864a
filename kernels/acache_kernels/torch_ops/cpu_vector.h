// Vectors, number formats and 2^x, shared by the C++ kernels. GCC vector extensions only, no intrinsics.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

template <int W> struct Vec {
    typedef float F __attribute__((vector_size(4 * W), aligned(4), may_alias));
    typedef int32_t I __attribute__((vector_size(4 * W), aligned(4), may_alias));
    typedef uint16_t H __attribute__((vector_size(2 * W), aligned(2), may_alias));
};

template <int W> inline typename Vec<W>::F load(const float* p) { return *(const typename Vec<W>::F*)p; }
template <int W> inline void store(float* p, typename Vec<W>::F x) { *(typename Vec<W>::F*)p = x; }

inline float widen(float x) { return x; }
inline float widen(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline void narrow(float x, float* p) { *p = x; }
inline void narrow(float x, uint16_t* p) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *p = uint16_t(x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// 16 numbers of a row as float32, and back (rounded to nearest even).
inline Vec<16>::F load_wide(const float* p) { return load<16>(p); }
inline Vec<16>::F load_wide(const uint16_t* p) {
    return (Vec<16>::F)(__builtin_convertvector(*(const Vec<16>::H*)p, Vec<16>::I) << 16);
}
inline void store_narrow(float* p, Vec<16>::F x) { store<16>(p, x); }
inline void store_narrow(uint16_t* p, Vec<16>::F x) {
    using I = Vec<16>::I;
    I bits = (I)x, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    *(Vec<16>::H*)p = __builtin_convertvector(x != x ? I{} + 0x7FC0 : rounded, Vec<16>::H);
}

// 2^x for x <= 0, relative error about 2e-7; 0 below -126.
template <int W> inline typename Vec<W>::F exp2_of(typename Vec<W>::F x) {
    using F = typename Vec<W>::F;
    using I = typename Vec<W>::I;
    F clipped = x < -126.0f ? F{} - 126.0f : x;
    F rounded = clipped + MAGIC;
    F f = clipped - (rounded - MAGIC);  // in [-0.5, 0.5]
    F p = F{} + 1.5403530393381608e-4f;
    p = p * f + 1.3333558146428443e-3f;
    p = p * f + 9.6181291076284772e-3f;
    p = p * f + 5.5504108664821580e-2f;
    p = p * f + 2.4022650695910072e-1f;
    p = p * f + 6.9314718055994531e-1f;
    p = p * f + 1.0f;
    I exponent = ((I)rounded - (I)(F{} + MAGIC)) << 23;
    F result = (F)((I)p + exponent);
    return x < -126.0f ? F{} : result;
}

}  // namespace
