// The products of attention: rows of a step (queries, or weights of keys) × panels of the pool (keys, or values).
//
// All is floats, but for prompts over a pool of float16 on processors that have a matrix unit for 16-bit floats of another kind
// (Intel's AMX, bfloat16): two of those hold a float16 exactly, and of a float of a row less than 2^-14 is lost. Of the four
// products of such halves the three that count are taken, their sums are floats. For a few rows splitting takes too long.
#pragma once

#include <type_traits>

#include "product.h"

constexpr int KEYS = 64;       // of a tile
constexpr int MOST_DIM = 256;  // of a head
constexpr int STEP = 32;       // k that a left factor is written by; to a multiple of it both factors are padded with zeros
using Some = vf[STEP / LANES];

template <int MOST_ROWS, int DEPTH>
struct FloatRows {
    static constexpr int TOGETHER = 1;
    int stride;
    alignas(64) float at[MOST_ROWS * DEPTH];  // [row][k]

    void set(int row, int k, const Some& values) { std::memcpy(at + row * stride + k, values, sizeof values); }
    static void begin(int) {}
    static void end() {}
};

// Panels of float16s as floats, one row after another: of many rows of a step each would expand them anew.
struct FloatPanels {
    const float* panels[MOST_DIM / PANEL];
    alignas(64) float rows[KEYS * MOST_DIM];

    void set(const Panels<Float16>& w, int num_rows) {
        float* to = rows;
        for (int panel = 0; panel < w.num_panels; ++panel) {
            panels[panel] = to;
            for (int start = 0, index = panel; start < num_rows; start += w.length, index += w.num_panels) {
                const Float16 *from = w.at[index], *next = w.next[index];
                for (int k = start; k < std::min(start + w.length, num_rows); ++k, to += PANEL, from += w.stride, next += w.stride) {
                    __builtin_prefetch(next, 0, 2);
                    for (int v = 0; v < PANEL; v += LANES) store(to + v, load(from + v));
                }
            }
        }
    }
};

// acc[rows][panels · PANEL] = x · w, or += x · w, over depth of k. acc has memory for rows in whole numbers of TOGETHER.
template <bool ADDS, int M, int D, class T>
inline void multiply(int num_rows, float* acc, int64_t acc_stride, const FloatRows<M, D>& x, const Panels<T>& w, int depth) {
    if (!ADDS)
        for (int row = 0; row < num_rows; ++row) std::memset(acc + row * acc_stride, 0, sizeof(float) * w.num_panels * PANEL);
    if constexpr (std::is_same_v<T, Float16>) {
        if (num_rows > ROWS) {
            FloatPanels& floats = own<FloatPanels>();
            floats.set(w, depth);
            return multiply(num_rows, acc, acc_stride, x.at, x.stride, Panels<>{floats.panels, w.num_panels, depth, PANEL}, depth);
        }
    }
    multiply(num_rows, acc, acc_stride, x.at, x.stride, w, depth);
}

#if defined(__AMX_BF16__)

// A float's upper half as a float, and what that leaves.
struct Split {
    vu high, low;

    explicit Split(vf value) : high((vu)value & ~0xffffu), low((vu)(value - (vf)high)) {}
};

template <int MOST_ROWS, int DEPTH>
struct SplitRows {
    static constexpr int TOGETHER = TILE;
    int stride;
    alignas(64) uint16_t high[MOST_ROWS * DEPTH], low[MOST_ROWS * DEPTH];  // [row][k]

    void set(int row, int k, const Some& values) {
        const Split a(values[0]), b(values[1]);
        store_upper(high + row * stride + k, a.high, b.high);
        store_upper(low + row * stride + k, a.low, b.low);
    }

    // Products come between these two. Tiles 0 … 3: sums of one panel each, 4 and 5: rows, high and low, 6 and 7: panels, in turn.
    static void begin(int num_rows) {
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {};
        } config;
        for (int tile = 0; tile < 8; ++tile) config.rows[tile] = tile < 6 ? std::min(num_rows, TILE) : STEP / 2;
        asm volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic does not say that it reads all of it
        _tile_loadconfig(&config);
    }

    static void end() { _tile_release(); }

  private:
    static void store_upper(uint16_t* to, vu a, vu b) {
        alignas(64) static constexpr uint16_t UPPER[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                         33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(UPPER), (__m512i)b));
    }
};

// Panels as the unit wants them: of each output, two k's beside each other.
struct SplitPanels {
    static constexpr int MOST = KEYS * MOST_DIM / 2;
    int depth;
    alignas(64) uint32_t high[MOST], low[MOST];  // [panel][k / 2][PANEL]

    template <class T>
    void set(const Panels<T>& w, int num_rows) {
        depth = (num_rows + STEP - 1) / STEP * STEP;
        uint32_t *to_high = high, *to_low = low;
        const auto put = [&](vf even, vf odd) {
            const Split a(even), b(odd);
            const vu upper = a.high >> 16 | b.high, lower = a.low >> 16 | (b.low & ~0xffffu);
            std::memcpy(to_high, &upper, sizeof upper);
            std::memcpy(to_low, &lower, sizeof lower);
            to_high += PANEL, to_low += PANEL;
        };
        const T* const* next_at = w.next == nullptr ? w.at : w.next;  // fetching what is here costs nothing
        for (int panel = 0; panel < w.num_panels; ++panel) {
            for (int start = 0, index = panel; start < num_rows; start += w.length, index += w.num_panels) {
                const T *from = w.at[index], *next = next_at[index], *end = from + std::min(w.length, num_rows - start) * w.stride;
                for (; from + w.stride < end; from += 2 * w.stride, next += 2 * w.stride) {
                    __builtin_prefetch(next, 0, 2);
                    __builtin_prefetch(next + w.stride, 0, 2);
                    put(load(from), load(from + w.stride));
                }
                if (from < end) put(load(from), vf{});
            }
            for (int k = (num_rows + 1) / 2 * 2; k < depth; k += 2) put(vf{}, vf{});
        }
    }
};

template <bool ADDS, int NUM, int M, int D>
inline void multiply_panels(float* acc, int64_t acc_stride, const SplitRows<M, D>& x, int row, const SplitPanels& w, int panel) {
    const int64_t acc_bytes = acc_stride * sizeof(float), x_bytes = x.stride * sizeof(uint16_t);
// Each sum waits for its last product, so the panels take turns. The intrinsics want literal tiles.
#define OF_PANEL(INDEX, ...) \
    if constexpr (INDEX < NUM) { __VA_ARGS__; }
#define PRODUCT(INDEX, SIDE, LEFT, RIGHT) \
    OF_PANEL(INDEX, _tile_loadd(RIGHT, SIDE + INDEX * panel_size, 64); _tile_dpbf16ps(INDEX, LEFT, RIGHT))
#define PRODUCTS(SIDE, LEFT) \
    PRODUCT(0, SIDE, LEFT, 6) PRODUCT(1, SIDE, LEFT, 7) PRODUCT(2, SIDE, LEFT, 6) PRODUCT(3, SIDE, LEFT, 7)
#define BEGIN(INDEX) \
    OF_PANEL(INDEX, if constexpr (ADDS) _tile_loadd(INDEX, acc + INDEX * PANEL, acc_bytes); else _tile_zero(INDEX))
#define END(INDEX) OF_PANEL(INDEX, _tile_stored(INDEX, acc + INDEX * PANEL, acc_bytes))
    const int64_t panel_size = int64_t(w.depth) / 2 * PANEL, first = panel * panel_size;
    BEGIN(0) BEGIN(1) BEGIN(2) BEGIN(3)
    for (int k = 0; k < w.depth; k += STEP) {
        const uint32_t *high = w.high + first + k / 2 * PANEL, *low = w.low + first + k / 2 * PANEL;
        _tile_loadd(4, x.high + row * x.stride + k, x_bytes);
        _tile_loadd(5, x.low + row * x.stride + k, x_bytes);
        PRODUCTS(high, 4)
        PRODUCTS(high, 5)
        PRODUCTS(low, 4)
    }
    END(0) END(1) END(2) END(3)
#undef END
#undef BEGIN
#undef PRODUCTS
#undef PRODUCT
#undef OF_PANEL
}

template <bool ADDS, int M, int D, class T>
inline void multiply(int num_rows, float* acc, int64_t acc_stride, const SplitRows<M, D>& x, const Panels<T>& w, int depth) {
    SplitPanels& panels = own<SplitPanels>();
    panels.set(w, depth);
    asm volatile("" : : : "memory");  // nor that a tile is loaded from memory
    for (int row = 0; row < num_rows; row += TILE) {
        float* sums = acc + row * acc_stride;
        int panel = 0;
        for (; panel + 4 <= w.num_panels; panel += 4) multiply_panels<ADDS, 4>(sums + panel * PANEL, acc_stride, x, row, panels, panel);
        for (; panel < w.num_panels; ++panel) multiply_panels<ADDS, 1>(sums + panel * PANEL, acc_stride, x, row, panels, panel);
    }
    asm volatile("" : : : "memory");
}

#else

template <int M, int D>
using SplitRows = FloatRows<M, D>;

#endif
