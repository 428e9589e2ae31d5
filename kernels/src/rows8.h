// Rows of a step as signed bytes, and their products with packed weights: eight times fewer instructions than in floats.
//
// 32 neighbouring values share a scale, the largest of them over 127: x ≈ scale · code. A group's sum of products is exact in
// integers, on every instruction set; floats come in once a group, group by group. So here too a row's result is the same bits
// whatever rows are beside it.
#pragma once

#include <algorithm>
#include <vector>

#include "weights.h"

constexpr int SHARING = 32;  // values with one scale
constexpr int ROWS8 = LANES == 16 ? 12 : 6;  // multiplied at once
#if defined(__AMX_INT8__)
constexpr int TILE = 16;  // multiplied at once by a matrix unit (tiles.h)
#else
constexpr int TILE = 1;
#endif

// Memory for rows of up to ``cols`` values, in whole tiles, kept from step to step.
struct Rows8 {
    int cols = 0, rows = 0;
    std::vector<int8_t> codes;    // [rows][cols]
    std::vector<float> scales;    // [cols / 32][rows]
    std::vector<float> shifts;    // the same: scale · Σ codes, for weights with a minimum
    std::vector<int32_t> sums;    // [cols / 16][rows]: -128 · Σ codes, for hardware that wants weights unsigned

    void resize(int num_rows, int num_cols) {
        cols = num_cols;
        rows = (num_rows + TILE - 1) / TILE * TILE;
        codes.resize(size_t(rows) * cols);
        scales.resize(size_t(rows) * cols / SHARING);
        shifts.resize(scales.size());
        sums.resize(scales.size() * 2);
    }

    void set(int row, const float* x) {
        const vf magic = all(12582912.0f);  // adding it rounds to an integer
        for (int group = 0; group < cols / SHARING; ++group, x += SHARING) {
            vf most{}, none{};
            for (int i = 0; i < SHARING; i += LANES) {
                const vf value = load(x + i);
                most = larger(larger(value, -value), most);
                none += value * all(0.0f);  // NaN for what is no number, which would otherwise pass for one
            }
            const float largest = greatest(most);
            const vf inverse = all(largest > 0 ? 127.0f / largest : 0.0f);
            int8_t* to = codes.data() + int64_t(row) * cols + group * SHARING;
            float halves[2] = {};  // sums of the codes, exact in floats
            for (int i = 0; i < SHARING; i += LANES) {
                const vf shifted = load(x + i) * inverse + magic;
                const vb code = __builtin_convertvector((vi)shifted - (vi)magic, vb);
                std::memcpy(to + i, &code, sizeof code);
                halves[i / 16] += sum(shifted - magic);
            }
            const size_t at = size_t(group) * rows + row;
            scales[at] = largest / 127.0f + sum(none);
            shifts[at] = scales[at] * (halves[0] + halves[1]);
            for (int half = 0; half < 2; ++half) sums[(2 * size_t(group) + half) * rows + row] = -128 * int32_t(halves[half]);
        }
    }
};

// Where the hardware multiplies unsigned by signed bytes, signed weights are raised by 128 and the sum starts lower.
#if defined(__AVX512VNNI__)
constexpr bool RAISED = true;
#else
constexpr bool RAISED = false;
#endif

// start[o] + Σ codes[o][k] x[k] for LANES outputs and 4 N values of k; codes[w] holds k = 4 w … 4 w + 3 of every output of F.
template <class F, int N>
inline vi dots(vi start, const vu (&codes)[N], const int8_t* x) {
    const auto four = [&](int w) { return load<int32_t>(x + 4 * w); };
#if defined(__AVX512VNNI__)
    for (int w = 0; w < N; ++w) start = (vi)_mm512_dpbusd_epi32((__m512i)start, (__m512i)codes[w], _mm512_set1_epi32(four(w)));
#elif defined(__AVX2__)
    constexpr int SPAN = F::IS_WIDE ? 1 : 4;  // pairs that fit in 16 bits together: 8 products of at most 32 · 127
    for (int first = 0; first < N; first += SPAN) {
        __m256i sums{};
        for (int w = first; w < first + SPAN; ++w) {
            __m256i code = (__m256i)codes[w], value = _mm256_set1_epi32(four(w));
            if constexpr (F::IS_SIGNED) value = _mm256_sign_epi8(value, code), code = _mm256_abs_epi8(code);
            sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(code, value));
        }
        start += (vi)_mm256_madd_epi16(sums, _mm256_set1_epi16(1));
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    for (int w = 0; w < N; ++w) start = (vi)vdotq_s32((int32x4_t)start, (int8x16_t)codes[w], (int8x16_t)vdupq_n_s32(four(w)));
#else
    for (int w = 0; w < N; ++w)
        for (int i = 0; i < 4; ++i) start += ((vi)(codes[w] << (24 - 8 * i)) >> 24) * int8_t(four(w) >> (8 * i));
#endif
    return start;
}

// The codes of LANES outputs of a group, as ``dots`` takes them.
template <class F>
inline void read_codes(const uint8_t* group, int vector, vu (&codes)[F::GROUP / 4]) {
    const uint8_t* from = group + F::HEAD_BYTES + vector * LANES * 4;
    if constexpr (F::CODES == Codes::NIBBLES) {
        for (int word = 0; word < F::GROUP / 8; ++word) {
            const vu both = load<vu>(from + word * PANEL * 4);
            codes[2 * word] = both & 0x0f0f0f0f;
            codes[2 * word + 1] = (both >> 4) & 0x0f0f0f0f;
        }
    } else {
        for (int word = 0; word < F::GROUP / 4; ++word) {
            codes[word] = load<vu>(from + word * PANEL * 4);
            if constexpr (RAISED && F::IS_SIGNED) codes[word] ^= 0x80808080;
        }
    }
}

// A group's sums of products become floats: w ≈ d code + m; the row's scale, and its shift for m.
template <class F>
inline void add_group(vf& total, vi dot, vf d, vf m, float scale, float shift) {
    total += to_float(dot) * d * all(scale);
    if constexpr (F::HAS_MIN) total += m * all(shift);
}

// acc[R][PANEL] of one panel, for rows first_row … first_row + R - 1.
template <class F, int R>
inline void multiply_rows8(const Matrix& weights, int panel, const Rows8& x, int first_row, float* acc) {
    const int num_groups = x.cols / F::GROUP;
    const int8_t* codes = x.codes.data() + int64_t(first_row) * x.cols;
    const int32_t* sums = x.sums.data() + first_row;
    vf totals[R][NV] = {};
    const uint8_t* at = weights.panel(panel);
    for (int group = 0; group < num_groups; ++group, at += F::BYTES) {
        fetch_ahead<F>(at);
        const int64_t shared = int64_t(group * F::GROUP / SHARING) * x.rows + first_row;
        const float *scales = x.scales.data() + shared, *shifts = x.shifts.data() + shared;
        for (int v = 0; v < NV; ++v) {
            vu w[F::GROUP / 4];
            read_codes<F>(at, v, w);
            const vf d = F::ScaleType::load(at + v * (F::SCALE_BYTES / NV));
            vf m{};
            if constexpr (F::HAS_MIN) m = F::ScaleType::load(at + F::SCALE_BYTES + v * (F::SCALE_BYTES / NV));
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                int32_t start = 0;
                if constexpr (RAISED && F::IS_SIGNED)
                    for (int half = 0; half < F::GROUP / 16; ++half) start += sums[int64_t(group * (F::GROUP / 16) + half) * x.rows + r];
                const vi dot = dots<F>(start - vi{}, w, codes + int64_t(r) * x.cols + group * F::GROUP);
                add_group<F>(totals[r][v], dot, d, m, scales[r], shifts[r]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < NV; ++v) store(acc + r * PANEL + v * LANES, totals[r][v]);
}

// acc[rows][PANEL] of one panel.
template <class F, int R = ROWS8>
inline void rows8(const Matrix& weights, int panel, const Rows8& x, int first_row, int num_rows, float* acc) {
    if constexpr (R > 0) {
        for (; num_rows >= R; first_row += R, num_rows -= R, acc += R * PANEL) multiply_rows8<F, R>(weights, panel, x, first_row, acc);
        rows8<F, R - 1>(weights, panel, x, first_row, num_rows, acc);
    }
}
