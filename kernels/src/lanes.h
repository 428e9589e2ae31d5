// Vectors of LANES floats, whatever the instruction set, and the few functions of them that the kernels share.
//
// Everything is written once over the compiler's vector types and compiled for each instruction set into a library of its own.
// All results are the same bits for every number of rows in a step: each output is one chain of multiply-adds in the order of k.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int ROWS = 12;  // of a tile: as many accumulators as the registers hold
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int ROWS = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int ROWS = 6;
#else
constexpr int LANES = 4;
constexpr int ROWS = 2;
#endif

constexpr int PANEL = 16;             // outputs that lie side by side in packed weights
constexpr int NV = PANEL / LANES;     // vectors of a panel's row

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef int8_t vb __attribute__((vector_size(LANES)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

// Memory of this thread's, kept from call to call. The compiler must not see where it lies, or it asks for the address again in
// every turn of a loop.
template <class T>
inline T& own() {
    static thread_local T memory;
    T* at = &memory;
    asm("" : "+r"(at));
    return *at;
}

template <class V, class T>
inline V load(const T* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline vf load(const float* from) { return load<vf>(from); }
inline void store(float* to, vf value) { std::memcpy(to, &value, sizeof value); }
inline vf all(float value) { return value - vf{}; }

inline vf to_float(vi value) { return __builtin_convertvector(value, vf); }

inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits;
    float value;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x400) {
        bits = sign | ((rest << 13) + (112u << 23));
    } else {
        value = float(rest) * 0x1p-24f;
        return sign ? -value : value;
    }
    std::memcpy(&value, &bits, 4);
    return value;
}

// A 16-bit float in memory.
struct Float16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(Float16 value) { return half_to_float(value.bits); }

inline vf load(const Float16* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__) && defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    vf value;
    for (int lane = 0; lane < LANES; ++lane) value[lane] = to_float(from[lane]);
    return value;
#endif
}

inline void store(Float16* to, vf value) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < LANES; ++lane) {
        const __fp16 half = value[lane];  // ARM's own: GCC 12 has no _Float16 in C++ there
        std::memcpy(to + lane, &half, sizeof half);
    }
#endif
}

inline vf load_bfloats(const uint16_t* from) {
#if defined(__AVX512F__)
    return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)) << 16);
#elif defined(__AVX2__)
    return (vf)((vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)) << 16);
#else
    return (vf)(__builtin_convertvector(load<vh>(from), vu) << 16);
#endif
}

// One number out of all lanes, by halves.
template <class Combine>
inline float across(vf value, const Combine& combine) {
#if defined(__AVX512F__)
    const __m512 whole = (__m512)value;
    const __m256 half = combine(_mm512_castps512_ps256(whole), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(whole), 1)));
#elif defined(__AVX2__)
    const __m256 half = (__m256)value;
#endif
#if defined(__AVX2__)
    __m128 quarter = combine(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = combine(quarter, _mm_movehl_ps(quarter, quarter));
    return combine(quarter, _mm_movehdup_ps(quarter))[0];
#else
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) value[lane] = combine(value[lane], value[lane + width]);
    return value[0];
#endif
}

inline float sum(vf value) {
    return across(value, [](auto a, auto b) { return a + b; });
}

inline float greatest(vf value) {
    return across(value, [](auto a, auto b) { return a > b ? a : b; });
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }

// 2^x to about one unit in the last place, 0 below -126, with 2^0 exactly 1. The polynomial is the best of its degree that is 1 at 0.
inline vf exp2(vf x) {
    x = x > all(127.0f) ? all(127.0f) : x;
#if defined(__AVX512F__)
    const vf r = (vf)_mm512_reduce_ps((__m512)x, 0), n = x - r;  // x = n + r, n whole
#else
    const vf magic = all(12582912.0f);  // adding it rounds to an integer
    const vf shifted = x + magic, n = shifted - magic, r = x - n;
#endif
    vf y = all(0x1.470b4ap-13f);
    y = y * r + all(0x1.5f7276p-10f);
    y = y * r + all(0x1.3b270ep-7f);
    y = y * r + all(0x1.c6ae72p-5f);
    y = y * r + all(0x1.ebfbe2p-3f);
    y = y * r + all(0x1.62e432p-1f);
    y = y * r + all(1.0f);
    const vi none = x < all(-126.0f);
#if defined(__AVX512F__)
    return (vf)((vi)(vf)_mm512_scalef_ps((__m512)y, (__m512)n) & ~none);
#else
    const vf power = (vf)(((vi)shifted - (vi)magic + 127) << 23);
    return (vf)((vi)(y * power) & ~none);
#endif
}

constexpr float LOG2_E = 1.44269504088896341f;

inline vf silu(vf x) { return x / (all(1.0f) + exp2(x * all(-LOG2_E))); }
