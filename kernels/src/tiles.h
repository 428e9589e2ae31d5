// Products of rows as bytes in the matrix unit of processors that have one (Intel's AMX): 16 rows × 16 outputs × a group of k in one
// instruction. A group's sums are the same integers as in vectors, and floats come in by the same steps (rows8.h), so that a row's
// result is the same bits whether it came alone, in vectors, or with fifteen others.
#pragma once

#include "rows8.h"

#if defined(__AMX_INT8__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

constexpr int FEWEST = 24;   // rows that are worth tiles: fewer gained nothing by them
constexpr int SPREAD = 512;  // k of a panel's codes and scales, laid out for the unit: 10 KiB
static_assert(PANEL == TILE && LANES == TILE);

// The unit's registers are large: Linux gives them to programs that ask. False: not here.
inline bool may_use_tiles() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // arch_prctl
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// Tile 0: sums [rows][outputs], 1: codes of x [rows][k], 2: codes of weights [k / 4][outputs][4].
template <int GROUP>
inline void configure_tiles() {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {TILE * 4, GROUP, TILE * 4};
        uint8_t rows[16] = {TILE, TILE, GROUP / 4};
    } config;
    asm volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic does not say that it reads all of it
    _tile_loadconfig(&config);
}

// One panel's groups along SPREAD of k: codes as tile 2 wants them, scales and minima as floats.
template <class F>
struct Spread {
    alignas(64) uint8_t codes[SPREAD * PANEL];
    alignas(64) float scales[SPREAD / F::GROUP * PANEL], minima[SPREAD / F::GROUP * PANEL];

    void set(const uint8_t* at, int num_groups) {
        for (int group = 0; group < num_groups; ++group, at += F::BYTES) {
            fetch_ahead<F>(at);
            uint8_t* to = codes + group * F::GROUP * PANEL;
            if constexpr (F::CODES == Codes::NIBBLES) {
                vu w[F::GROUP / 4];
                read_codes<F>(at, 0, w);
                std::memcpy(to, w, sizeof w);
            } else {
                std::memcpy(to, at + F::HEAD_BYTES, F::GROUP * PANEL);
            }
            store(scales + group * PANEL, F::ScaleType::load(at));
            if constexpr (F::HAS_MIN) store(minima + group * PANEL, F::ScaleType::load(at + F::SCALE_BYTES));
        }
        asm volatile("" : : : "memory");  // nor that a tile is loaded from memory
    }
};

// acc[TILE][PANEL] += x · w over num_groups, for the rows from first_row on and k from start on. A group's sums are in the unit
// while the group's before become floats.
template <class F>
inline void multiply_tile8(const Spread<F>& w, int num_groups, const Rows8& x, int first_row, int start, float* acc) {
    const int8_t* codes = x.codes.data() + int64_t(first_row) * x.cols + start;
    alignas(64) int32_t dots[2][TILE * PANEL];
    vf totals[TILE];
    for (int r = 0; r < TILE; ++r) totals[r] = load(acc + r * PANEL);
    for (int group = 0; group <= num_groups; ++group) {
        if (group < num_groups) {
            _tile_zero(0);
            _tile_loadd(1, codes + group * F::GROUP, x.cols);
            _tile_loadd(2, w.codes + group * F::GROUP * PANEL, PANEL * 4);
            if constexpr (F::IS_SIGNED)
                _tile_dpbssd(0, 1, 2);
            else
                _tile_dpbsud(0, 1, 2);
            _tile_stored(0, dots[group % 2], PANEL * 4);
        }
        if (const int before = group - 1; before >= 0) {
            const int64_t shared = int64_t((start + before * F::GROUP) / SHARING) * x.rows + first_row;
            const float *scales = x.scales.data() + shared, *shifts = x.shifts.data() + shared;
            const vf d = load(w.scales + before * PANEL), m = F::HAS_MIN ? load(w.minima + before * PANEL) : vf{};
#pragma GCC unroll 16
            for (int r = 0; r < TILE; ++r) {
                const vi dot = load<vi>(dots[before % 2] + r * PANEL);
                add_group<F>(totals[r], dot, d, m, scales[r], shifts[r]);
            }
        }
    }
    for (int r = 0; r < TILE; ++r) store(acc + r * PANEL, totals[r]);
}

// acc[rows][PANEL] of one panel, with memory for whole tiles of rows.
template <class F>
inline void tiles8(const Matrix& weights, int panel, const Rows8& x, int first_row, int num_rows, float* acc) {
    Spread<F> spread;
    std::memset(acc, 0, sizeof(float) * PANEL * ((num_rows + TILE - 1) / TILE * TILE));
    const uint8_t* at = weights.panel(panel);
    configure_tiles<F::GROUP>();
    for (int start = 0; start < x.cols; start += SPREAD) {
        const int num_groups = std::min(SPREAD, x.cols - start) / F::GROUP;
        spread.set(at, num_groups);
        at += num_groups * F::BYTES;
        for (int row = 0; row < num_rows; row += TILE) multiply_tile8(spread, num_groups, x, first_row + row, start, acc + row * PANEL);
    }
    _tile_release();
}

// acc[rows][PANEL] of one panel.
template <class F>
inline void multiply_bytes(const Matrix& weights, int panel, const Rows8& x, int first_row, int num_rows, float* acc) {
    if (num_rows >= FEWEST)
        tiles8<F>(weights, panel, x, first_row, num_rows, acc);
    else
        rows8<F>(weights, panel, x, first_row, num_rows, acc);
}

#else

inline bool may_use_tiles() { return true; }  // there are none

template <class F>
inline void multiply_bytes(const Matrix& weights, int panel, const Rows8& x, int first_row, int num_rows, float* acc) {
    rows8<F>(weights, panel, x, first_row, num_rows, acc);
}

#endif
