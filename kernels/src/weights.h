// Weights as the kernels read them: panels of PANEL outputs, cut into groups along k, each with its scales in front of its codes.
//
//   NIBBLES  32 k × 16 outputs: 4 words for each output; byte i of word w has k = 8 w + i below, 8 w + 4 + i above   w = d q + m
//   BYTES    16 or 32 k × 16 outputs: a word for each output and four k                                            w = d q (+ m)
//   FLOATS, BFLOATS  1 k × 16 outputs, no scales
//
// The values are those of the file; only their order is another one. d and m stay 16-bit floats where the file has such.
#pragma once

#include <cstdlib>
#include <memory>

#include "lanes.h"

enum class Codes { NIBBLES, BYTES, FLOATS, BFLOATS };

struct Half {
    using Stored = uint16_t;
    static vf load(const uint8_t* from) { return ::load(reinterpret_cast<const Float16*>(from)); }
};

struct Full {
    using Stored = float;
    static vf load(const uint8_t* from) { return ::load(reinterpret_cast<const float*>(from)); }
};

// How a group is laid out, at compile time.
template <Codes codes, class Scale, bool has_min, int group>
struct Format {
    static constexpr Codes CODES = codes;
    static constexpr int GROUP = group;
    static constexpr bool HAS_MIN = has_min;
    static constexpr bool HAS_SCALES = codes == Codes::NIBBLES || codes == Codes::BYTES;
    static constexpr bool IS_SIGNED = codes == Codes::BYTES && !has_min;
    static constexpr bool IS_WIDE = IS_SIGNED && group == 32;  // a code may be any byte; else it is at most 32 in size
    static constexpr int SCALE_BYTES = HAS_SCALES ? PANEL * int(sizeof(typename Scale::Stored)) : 0;
    static constexpr int HEAD_BYTES = SCALE_BYTES * (has_min ? 2 : 1);
    static constexpr int CODE_BYTES = codes == Codes::NIBBLES  ? group * PANEL / 2
                                      : codes == Codes::BYTES  ? group * PANEL
                                      : codes == Codes::FLOATS ? group * PANEL * 4
                                                               : group * PANEL * 2;
    static constexpr int BYTES = HEAD_BYTES + CODE_BYTES;
    using ScaleType = Scale;
};

using Nibbles = Format<Codes::NIBBLES, Half, true, 32>;       // Q4_0, Q4_1
using WideNibbles = Format<Codes::NIBBLES, Full, true, 32>;   // Q4_K
using Bytes = Format<Codes::BYTES, Half, false, 32>;          // Q8_0
using BytesMin = Format<Codes::BYTES, Half, true, 32>;        // Q5_0, Q5_1
using WideBytesMin = Format<Codes::BYTES, Full, true, 32>;    // Q5_K
using WideBytes = Format<Codes::BYTES, Full, false, 16>;      // Q6_K
using Floats = Format<Codes::FLOATS, Full, false, 1>;
using Bfloats = Format<Codes::BFLOATS, Full, false, 1>;

enum Layout { NIBBLES, WIDE_NIBBLES, BYTES, BYTES_MIN, WIDE_BYTES_MIN, WIDE_BYTES, FLOATS, BFLOATS };

template <class Body>
decltype(auto) with_format(Layout layout, Body&& body) {
    switch (layout) {
        case NIBBLES: return body(Nibbles{});
        case WIDE_NIBBLES: return body(WideNibbles{});
        case BYTES: return body(Bytes{});
        case BYTES_MIN: return body(BytesMin{});
        case WIDE_BYTES_MIN: return body(WideBytesMin{});
        case WIDE_BYTES: return body(WideBytes{});
        case FLOATS: return body(Floats{});
        default: return body(Bfloats{});
    }
}

struct Matrix {
    Layout layout;
    int rows, cols;  // outputs and inputs
    int64_t panel_bytes;
    std::unique_ptr<uint8_t, decltype(&std::free)> data{nullptr, &std::free};

    bool is_quantised() const { return layout != FLOATS && layout != BFLOATS; }
    int num_panels() const { return (rows + PANEL - 1) / PANEL; }
    uint8_t* panel(int index) const { return data.get() + index * panel_bytes; }
};

// Asks for what lies AHEAD of a group that is being read: the hardware alone does not keep memory busy while there is much to
// compute. Beyond the end of the weights nothing comes of it.
constexpr int AHEAD = 3072;  // bytes

template <class F>
inline void fetch_ahead(const uint8_t* group) {
#pragma GCC unroll 16
    for (int line = 0; line < F::BYTES; line += 64) __builtin_prefetch(group + AHEAD + line);
}

// Calls body(k, w) for each k of one group of NUM panels, where w[panel][vector] are the weights of its outputs.
template <class F, int NUM, class Body>
inline __attribute__((always_inline)) void expand(const uint8_t* const (&groups)[NUM], Body&& body) {
    vf d[NUM][NV], m[NUM][NV], w[NUM][NV];
    if constexpr (F::HAS_SCALES)
        for (int p = 0; p < NUM; ++p)
            for (int v = 0; v < NV; ++v) {
                d[p][v] = F::ScaleType::load(groups[p] + v * (F::SCALE_BYTES / NV));
                if constexpr (F::HAS_MIN) m[p][v] = F::ScaleType::load(groups[p] + F::SCALE_BYTES + v * (F::SCALE_BYTES / NV));
            }
    const auto scaled = [&](int p, int v, vf code) {
        if constexpr (F::HAS_MIN)
            return code * d[p][v] + m[p][v];
        else
            return code * d[p][v];
    };
    if constexpr (F::CODES == Codes::NIBBLES) {
        vu words[NUM][NV];
        for (int word = 0; word < F::GROUP / 8; ++word) {
            for (int p = 0; p < NUM; ++p)
                for (int v = 0; v < NV; ++v) words[p][v] = load<vu>(groups[p] + F::HEAD_BYTES + (word * PANEL + v * LANES) * 4);
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                for (int p = 0; p < NUM; ++p)
                    for (int v = 0; v < NV; ++v) w[p][v] = scaled(p, v, to_float((vi)((words[p][v] >> (k % 4 * 8 + k / 4 * 4)) & 15)));
                body(word * 8 + k, w);
            }
        }
    } else if constexpr (F::CODES == Codes::BYTES) {
        vi words[NUM][NV];
        for (int word = 0; word < F::GROUP / 4; ++word) {
            for (int p = 0; p < NUM; ++p)
                for (int v = 0; v < NV; ++v) words[p][v] = load<vi>(groups[p] + F::HEAD_BYTES + (word * PANEL + v * LANES) * 4);
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                for (int p = 0; p < NUM; ++p)
                    for (int v = 0; v < NV; ++v) w[p][v] = scaled(p, v, to_float((vi)((vu)words[p][v] << (24 - 8 * k)) >> 24));
                body(word * 4 + k, w);
            }
        }
    } else {
#pragma GCC unroll 4
        for (int k = 0; k < F::GROUP; ++k) {
            for (int p = 0; p < NUM; ++p)
                for (int v = 0; v < NV; ++v) {
                    const int at = k * PANEL + v * LANES;
                    const uint8_t* codes = groups[p] + F::HEAD_BYTES;
                    if constexpr (F::CODES == Codes::FLOATS)
                        w[p][v] = load(reinterpret_cast<const float*>(codes) + at);
                    else
                        w[p][v] = load_bfloats(reinterpret_cast<const uint16_t*>(codes) + at);
                }
            body(k, w);
        }
    }
}
