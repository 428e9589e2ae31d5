// Matrix products y = x Wᵀ of a step's rows with packed weights.
//
// Rows as bytes (rows8.h), wherever the weights are quantised and the caller has them: in tiles of up to ROWS8 rows and a panel,
// or, where there are so many, of TILE rows (tiles.h).
// Rows as floats. Few (decode): the codes are expanded in registers and used at once for every row; what is read of memory bounds
// the time. Many (prefill): a panel's codes are expanded once to the cache and multiplied in tiles of ROWS × PANEL.
#pragma once

#include <algorithm>

#include "crew.h"
#include "tiles.h"

constexpr int DEPTH = 512;            // k of an expanded panel: 32 KiB
constexpr int CACHED = 224 * 1024;    // bytes of x that stay in the second-level cache while panels pass
constexpr int MOST_ROWS = 240;        // of a block of x, a multiple of every ROWS and of TILE
static_assert(MOST_ROWS % ROWS == 0 && MOST_ROWS % TILE == 0);
constexpr int PANELS = 8;             // of one unit of work at most
constexpr int UNITS = 4;              // for each thread at least, where there are so many panels
constexpr int SUMS = LANES == 16 ? 24 : ROWS;  // rows × panels that the registers hold the sums of
constexpr int FEW = 4;                // rows with which memory takes longer than the arithmetic

// What one product writes: y = x Wᵀ + bias, added to what is there, or silu(x Wᵀ) · (x Uᵀ).
struct Product {
    const Matrix* weights;
    const Matrix* up = nullptr;
    const float* bias = nullptr;
    const float* x;
    int64_t x_stride;
    const Rows8* x8;  // the same rows, or null
    float* y;
    int64_t y_stride;
    bool adds = false;

    bool in_bytes() const { return x8 != nullptr && weights->is_quantised() && (up == nullptr || up->is_quantised()); }
};

// A right factor in panels: row k of panel p lies at at[k / length * num_panels + p] + k % length * stride.
template <class T = float>
struct Panels {
    const T* const* at;
    int num_panels, length;
    int64_t stride;
    const T* const* next = nullptr;  // laid out alike: what is multiplied after these, to be fetched meanwhile
};

// acc[row][p][..] += x[row][k] · w[first + p][k][..] over depth values of k, for NUM panels; rows lie strides apart.
template <int R, int NUM, class T>
inline void multiply_tile(float* acc, int64_t acc_stride, const float* x, int64_t x_stride, const Panels<T>& w, int first, int depth) {
    vf sums[NUM][R][NV];  // in registers, which takes loops without turns
#pragma GCC unroll 4
    for (int p = 0; p < NUM; ++p)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) sums[p][r][v] = load(acc + r * acc_stride + p * PANEL + v * LANES);
    const T* const* next = w.next == nullptr ? w.at : w.next;  // fetching what is here costs nothing
    next += first;
    for (const T* const* at = w.at + first; depth > 0; depth -= w.length, x += w.length, at += w.num_panels, next += w.num_panels)
        for (int k = 0; k < std::min(depth, w.length); ++k) {
            if constexpr (R <= FEW)
#pragma GCC unroll 4
                for (int p = 0; p < NUM; ++p) __builtin_prefetch(next[p] + k * w.stride, 0, 2);
            vf row[NUM][NV];
#pragma GCC unroll 4
            for (int p = 0; p < NUM; ++p)
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v) row[p][v] = load(at[p] + k * w.stride + v * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const vf value = all(x[r * x_stride + k]);
#pragma GCC unroll 4
                for (int p = 0; p < NUM; ++p)
#pragma GCC unroll 4
                    for (int v = 0; v < NV; ++v) sums[p][r][v] += value * row[p][v];
            }
        }
#pragma GCC unroll 4
    for (int p = 0; p < NUM; ++p)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) store(acc + r * acc_stride + p * PANEL + v * LANES, sums[p][r][v]);
}

// As many panels at once as the registers hold: few rows would wait for their own sums.
template <int R = ROWS, class T>
inline void multiply_rows(int num_rows, float* acc, int64_t acc_stride, const float* x, int64_t x_stride, const Panels<T>& w, int depth) {
    if constexpr (R > 0) {
        if (num_rows != R) return multiply_rows<R - 1>(num_rows, acc, acc_stride, x, x_stride, w, depth);
        constexpr int NUM = 4 * R <= SUMS ? 4 : 2 * R <= SUMS ? 2 : 1;
        int panel = 0;
        for (; panel + NUM <= w.num_panels; panel += NUM)
            multiply_tile<R, NUM>(acc + panel * PANEL, acc_stride, x, x_stride, w, panel, depth);
        for (; panel < w.num_panels; ++panel) multiply_tile<R, 1>(acc + panel * PANEL, acc_stride, x, x_stride, w, panel, depth);
    }
}

// acc[num_rows][panels · PANEL] += x · w, for any number of rows.
template <class T>
inline void multiply(int num_rows, float* acc, int64_t acc_stride, const float* x, int64_t x_stride, const Panels<T>& w, int depth) {
    for (int row = 0; row < num_rows; row += ROWS)
        multiply_rows(std::min(ROWS, num_rows - row), acc + row * acc_stride, acc_stride, x + row * x_stride, x_stride, w, depth);
}

inline void write_row(const Product& product, int row, int first, const float* acc, const float* up) {
    float* y = product.y + row * product.y_stride + first;
    const int count = std::min(PANEL, product.weights->rows - first);
    const float* bias = product.bias == nullptr ? nullptr : product.bias + first;
    const auto finished = [&](int v) {
        const vf value = load(acc + v);
        return up == nullptr ? value : silu(value) * load(up + v);
    };
    if (count == PANEL) {
        for (int v = 0; v < PANEL; v += LANES) {
            vf value = finished(v);
            if (bias != nullptr) value += load(bias + v);
            store(y + v, product.adds ? load(y + v) + value : value);
        }
    } else {
        float result[PANEL];
        for (int v = 0; v < PANEL; v += LANES) store(result + v, finished(v));
        for (int i = 0; i < count; ++i) {
            if (bias != nullptr) result[i] += bias[i];
            y[i] = product.adds ? y[i] + result[i] : result[i];
        }
    }
}

// acc[panel][row][PANEL] of R rows and NUM neighbouring panels.
template <class F, int R, int NUM>
inline void few_rows(const Matrix& weights, int first_panel, const float* x, int64_t x_stride, float* acc) {
    vf sums[NUM][R][NV] = {};
    const uint8_t* groups[NUM];
    for (int p = 0; p < NUM; ++p) groups[p] = weights.panel(first_panel + p);
    for (int start = 0; start < weights.cols; start += F::GROUP) {
        for (int p = 0; p < NUM; ++p) fetch_ahead<F>(groups[p]);
        expand<F, NUM>(groups, [&](int k, const vf(&w)[NUM][NV]) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const vf value = all(x[r * x_stride + start + k]);
                for (int p = 0; p < NUM; ++p)
                    for (int v = 0; v < NV; ++v) sums[p][r][v] += value * w[p][v];
            }
        });
        for (int p = 0; p < NUM; ++p) groups[p] += F::BYTES;
    }
    for (int p = 0; p < NUM; ++p)
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < NV; ++v) store(acc + (p * R + r) * PANEL + v * LANES, sums[p][r][v]);
}

template <int R>
inline void few_rows_unit(const Product& product, int first_panel) {
    constexpr int NUM = R == 1 ? 2 : 1;  // one row alone would wait for its own sums
    const int num = std::min(NUM, product.weights->num_panels() - first_panel);
    float acc[NUM * R * PANEL], up[NUM * R * PANEL];
    const auto compute = [&](const Matrix& weights, float* sums) {
        with_format(weights.layout, [&](auto format) {
            using F = decltype(format);
            if (num == NUM)
                few_rows<F, R, NUM>(weights, first_panel, product.x, product.x_stride, sums);
            else
                few_rows<F, R, 1>(weights, first_panel, product.x, product.x_stride, sums);
        });
    };
    compute(*product.weights, acc);
    if (product.up != nullptr) compute(*product.up, up);
    for (int p = 0; p < num; ++p)
        for (int r = 0; r < R; ++r)
            write_row(product, r, (first_panel + p) * PANEL, acc + (p * R + r) * PANEL, product.up ? up + (p * R + r) * PANEL : nullptr);
}

template <int R = ROWS>
inline void few_rows_units(int num_rows, const Product& product, int first_panel) {
    if constexpr (R > 0) {
        if (num_rows == R) return few_rows_unit<R>(product, first_panel);
        few_rows_units<R - 1>(num_rows, product, first_panel);
    }
}

// acc[rows][PANEL] of one panel and any number of rows up to MOST_ROWS.
template <class F>
inline void many_rows(const Matrix& weights, int panel, int num_rows, const float* x, int64_t x_stride, float* acc) {
    struct alignas(64) Expanded {
        float at[DEPTH * PANEL];
    };
    float* expanded = own<Expanded>().at;
    static_assert(DEPTH % F::GROUP == 0);
    std::memset(acc, 0, sizeof(float) * PANEL * num_rows);
    const uint8_t* groups[1] = {weights.panel(panel)};
    for (int start = 0; start < weights.cols; start += DEPTH) {
        const int depth = std::min(DEPTH, weights.cols - start);
        for (int at = 0; at < depth; at += F::GROUP) {
            expand<F, 1>(groups, [&](int k, const vf(&w)[1][NV]) __attribute__((always_inline)) {
                for (int v = 0; v < NV; ++v) store(expanded + (at + k) * PANEL + v * LANES, w[0][v]);
            });
            groups[0] += F::BYTES;
        }
        const float* const at[] = {expanded};
        multiply(num_rows, acc, PANEL, x + start, x_stride, Panels<>{at, 1, DEPTH, PANEL}, depth);
    }
}

inline void panels_unit(const Product& product, int first_row, int num_rows, int first_panel, int num_panels) {
    struct alignas(64) Sums {
        float acc[MOST_ROWS * PANEL], up[MOST_ROWS * PANEL];
    };
    auto& [acc, up] = own<Sums>();
    const float* x = product.x + first_row * product.x_stride;
    const int end = std::min(first_panel + num_panels, product.weights->num_panels());
    for (int panel = first_panel; panel < end; ++panel) {
        const auto compute = [&](const Matrix& weights, float* sums) {
            with_format(weights.layout, [&](auto format) {
                using F = decltype(format);
                if constexpr (F::HAS_SCALES)
                    if (product.in_bytes()) return multiply_bytes<F>(weights, panel, *product.x8, first_row, num_rows, sums);
                many_rows<F>(weights, panel, num_rows, x, product.x_stride, sums);
            });
        };
        compute(*product.weights, acc);
        if (product.up != nullptr) compute(*product.up, up);
        for (int row = 0; row < num_rows; ++row)
            write_row(product, first_row + row, panel * PANEL, acc + row * PANEL, product.up ? up + row * PANEL : nullptr);
    }
}

// How a product is cut into units of work: blocks of rows times runs of panels.
struct Cut {
    const Product* product;
    bool is_few;  // rows, as floats
    int rows, panels, units_per_block, num_units;

    Cut(const Product& whole, int num_rows, int num_threads) : product(&whole) {
        const int cols = whole.weights->cols, num_panels = whole.weights->num_panels();
        const int together = whole.in_bytes() ? std::max(ROWS, TILE) : ROWS;  // a block begins with a whole tile, and so ends in memory
        is_few = num_rows <= ROWS && !whole.in_bytes();
        rows = is_few ? num_rows : std::clamp(CACHED / (whole.in_bytes() ? 1 : 4) / cols / together * together, together, MOST_ROWS);
        panels = !is_few ? std::clamp(num_panels / (UNITS * num_threads), 1, PANELS) : num_rows == 1 ? 2 : 1;
        units_per_block = (num_panels + panels - 1) / panels;
        num_units = units_per_block * ((num_rows + rows - 1) / rows);
    }

    void compute(int unit, int total_rows) const {
        const int first_row = unit / units_per_block * rows, first_panel = unit % units_per_block * panels;
        if (is_few)
            few_rows_units(total_rows, *product, first_panel);
        else
            panels_unit(*product, first_row, std::min(rows, total_rows - first_row), first_panel, panels);
    }
};

// One or more products of the same rows, as one phase. ``up`` has the shape of ``weights``, whatever types they are stored in.
template <class... Products>
inline void multiply(Crew& crew, int num_rows, const Products&... products) {
    const Cut cuts[] = {Cut(products, num_rows, crew.num_threads())...};
    int total = 0;
    for (const Cut& cut : cuts) total += cut.num_units;
    crew.phase(total, [&](int unit) {
        const Cut* cut = cuts;
        while (unit >= cut->num_units) unit -= cut++->num_units;
        cut->compute(unit, num_rows);
    });
}
