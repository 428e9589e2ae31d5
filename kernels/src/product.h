// Matrix products y = x Wᵀ of a step's rows with packed weights.
//
// Few rows (decode): the codes are expanded in registers and used at once for every row; what is read of memory bounds the time.
// Many rows (prefill): a panel's codes are expanded once to the cache and multiplied in tiles of ROWS × PANEL.
#pragma once

#include <algorithm>

#include "crew.h"
#include "weights.h"

constexpr int DEPTH = 512;            // k of an expanded panel: 32 KiB
constexpr int CACHED = 224 * 1024;    // bytes of x that stay in the second-level cache while panels pass
constexpr int MOST_ROWS = 120;        // of a block of x, a multiple of every ROWS
constexpr int PANELS = 8;             // of one unit of work with many rows

// What one product writes: y = x Wᵀ + bias, added to what is there, or silu(x Wᵀ) · (x Uᵀ).
struct Product {
    const Matrix* weights;
    const Matrix* up = nullptr;
    const float* bias = nullptr;
    const float* x;
    int64_t x_stride;
    float* y;
    int64_t y_stride;
    bool adds = false;
};

// acc[row][..] += x[row][k] · w[k][..] over depth values of k, for NUM panels whose sums and weights lie these steps apart.
template <int R, int NUM>
inline void multiply_tile(float* acc, int64_t acc_step, const float* x, int64_t x_stride, const float* w, int64_t w_step, int depth) {
    vf sums[NUM][R][NV];
    for (int p = 0; p < NUM; ++p)
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < NV; ++v) sums[p][r][v] = load(acc + p * acc_step + r * PANEL + v * LANES);
    for (int k = 0; k < depth; ++k) {
        vf row[NUM][NV];
        for (int p = 0; p < NUM; ++p)
            for (int v = 0; v < NV; ++v) row[p][v] = load(w + p * w_step + k * PANEL + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const vf value = all(x[r * x_stride + k]);
            for (int p = 0; p < NUM; ++p)
                for (int v = 0; v < NV; ++v) sums[p][r][v] += value * row[p][v];
        }
    }
    for (int p = 0; p < NUM; ++p)
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < NV; ++v) store(acc + p * acc_step + r * PANEL + v * LANES, sums[p][r][v]);
}

// A panel at a time; few rows take two, so as not to wait for their own sums.
template <int R>
inline void multiply_panels(int num_panels, float* acc, int64_t acc_step, const float* x, int64_t x_stride, const float* w,
                            int64_t w_step, int depth) {
    int panel = 0;
    if constexpr (2 * R <= ROWS)
        for (; panel + 2 <= num_panels; panel += 2)
            multiply_tile<R, 2>(acc + panel * acc_step, acc_step, x, x_stride, w + panel * w_step, w_step, depth);
    for (; panel < num_panels; ++panel)
        multiply_tile<R, 1>(acc + panel * acc_step, acc_step, x, x_stride, w + panel * w_step, w_step, depth);
}

template <int R = ROWS, class... Rest>
inline void multiply_rows(int num_rows, Rest... rest) {
    if constexpr (R > 0) {
        if (num_rows == R) return multiply_panels<R>(rest...);
        multiply_rows<R - 1>(num_rows, rest...);
    }
}

// acc[panel][num_rows][PANEL] += x · w[panel], for any number of rows and panels; acc and w are steps apart from panel to panel.
inline void multiply(int num_rows, int num_panels, float* acc, int64_t acc_step, const float* x, int64_t x_stride, const float* w,
                     int64_t w_step, int depth) {
    for (int row = 0; row < num_rows; row += ROWS)
        multiply_rows(std::min(ROWS, num_rows - row), num_panels, acc + row * PANEL, acc_step, x + row * x_stride, x_stride, w, w_step, depth);
}

inline void write_row(const Product& product, int row, int first, const float* acc, const float* up) {
    float* y = product.y + row * product.y_stride + first;
    float result[PANEL];
    for (int v = 0; v < PANEL; v += LANES) {
        vf value = load(acc + v);
        if (up != nullptr) value = silu(value) * load(up + v);
        store(result + v, value);
    }
    const int count = std::min(PANEL, product.weights->rows - first);
    for (int i = 0; i < count; ++i) {
        if (product.bias != nullptr) result[i] += product.bias[first + i];
        y[i] = product.adds ? y[i] + result[i] : result[i];
    }
}

// acc[panel][row][PANEL] of R rows and NUM neighbouring panels.
template <class F, int R, int NUM>
inline void few_rows(const Matrix& weights, int first_panel, const float* x, int64_t x_stride, float* acc) {
    vf sums[NUM][R][NV] = {};
    const uint8_t* groups[NUM];
    for (int p = 0; p < NUM; ++p) groups[p] = weights.panel(first_panel + p);
    for (int start = 0; start < weights.cols; start += F::GROUP) {
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
    alignas(64) static thread_local float expanded[DEPTH * PANEL];
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
        multiply(num_rows, 1, acc, 0, x + start, x_stride, expanded, 0, depth);
    }
}

inline void many_rows_unit(const Product& product, int first_row, int num_rows, int first_panel) {
    alignas(64) static thread_local float acc[MOST_ROWS * PANEL], up[MOST_ROWS * PANEL];
    const float* x = product.x + first_row * product.x_stride;
    const int end = std::min(first_panel + PANELS, product.weights->num_panels());
    for (int panel = first_panel; panel < end; ++panel) {
        const auto compute = [&](const Matrix& weights, float* sums) {
            with_format(weights.layout, [&](auto format) { many_rows<decltype(format)>(weights, panel, num_rows, x, product.x_stride, sums); });
        };
        compute(*product.weights, acc);
        if (product.up != nullptr) compute(*product.up, up);
        for (int row = 0; row < num_rows; ++row)
            write_row(product, first_row + row, panel * PANEL, acc + row * PANEL, product.up ? up + row * PANEL : nullptr);
    }
}

// One or more products of the same rows, as one phase. ``up`` has the shape of ``weights``, whatever types they are stored in.
inline void multiply(Crew& crew, int num_rows, const Product* products, int num_products) {
    const bool few = num_rows <= ROWS;
    const int cols = products[0].weights->cols;
    const int block = few ? num_rows : std::clamp(CACHED / (4 * cols) / ROWS * ROWS, ROWS, MOST_ROWS / ROWS * ROWS);
    const int panels = few ? (num_rows == 1 ? 2 : 1) : PANELS;
    const int num_blocks = (num_rows + block - 1) / block;
    int num_units[4], total = 0;
    for (int index = 0; index < num_products; ++index)
        total += num_units[index] = (products[index].weights->num_panels() + panels - 1) / panels * num_blocks;
    crew.phase(total, [&](int unit) {
        int index = 0;
        while (unit >= num_units[index]) unit -= num_units[index++];
        const Product& product = products[index];
        const int per_block = num_units[index] / num_blocks, first_row = unit / per_block * block;
        const int first_panel = unit % per_block * panels, rows = std::min(block, num_rows - first_row);
        if (few)
            few_rows_units(rows, product, first_panel);
        else
            many_rows_unit(product, first_row, rows, first_panel);
    });
}
