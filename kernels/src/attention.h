// Causal attention over the paged pool [blocks][layers][2][kv heads][slots][head_dim], read where it lies.
//
// The keys of a sequence are taken in tiles of KEYS from its first on, with a running maximum and sum, for one token as for a
// whole chunk: masked keys add exact zeros, so a query's result does not depend on which queries it was computed with.
#pragma once

#include <limits>

#include "product.h"

constexpr int KEYS = 64;         // of a tile
constexpr int QUERY_ROWS = 96;   // queries × heads that share the key head, of one unit
constexpr int MOST_DIM = 256;    // of a head

struct Pool {
    float* data;
    int num_layers, num_kv_heads, block_size, head_dim;

    // The first slot of a block's keys (what = 0) or values (1).
    float* at(int block, int layer, int what, int kv_head) const {
        const int64_t piece = ((int64_t(block) * num_layers + layer) * 2 + what) * num_kv_heads + kv_head;
        return data + piece * block_size * head_dim;
    }
};

// One sequence's part of a step: the queries at positions start … start + num_tokens - 1 are rows row … of the step.
struct Span {
    const int32_t* blocks;
    int32_t start, num_tokens, row;
};

// Queries of one span and one key head, as many as make QUERY_ROWS rows.
struct AttentionUnit {
    int32_t span, first, num_tokens, kv_head;
};

typedef float v4 __attribute__((vector_size(16)));

// to[d][0..3] = from[0..3][d] for dim values of d; to's rows are PANEL floats apart. Four at a time: one by one takes longer than the scores.
inline void transpose4(const float* const (&from)[4], float* to, int dim) {
    int d = 0;
    for (; d + 4 <= dim; d += 4) {
        const v4 a = load<v4>(from[0] + d), b = load<v4>(from[1] + d), c = load<v4>(from[2] + d), e = load<v4>(from[3] + d);
        const v4 ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        const v4 ce0 = __builtin_shufflevector(c, e, 0, 4, 1, 5), ce2 = __builtin_shufflevector(c, e, 2, 6, 3, 7);
        const v4 rows[4] = {__builtin_shufflevector(ab0, ce0, 0, 1, 4, 5), __builtin_shufflevector(ab0, ce0, 2, 3, 6, 7),
                            __builtin_shufflevector(ab2, ce2, 0, 1, 4, 5), __builtin_shufflevector(ab2, ce2, 2, 3, 6, 7)};
        for (int i = 0; i < 4; ++i) std::memcpy(to + (d + i) * PANEL, &rows[i], 16);
    }
    for (; d < dim; ++d)
        for (int i = 0; i < 4; ++i) to[d * PANEL + i] = from[i][d];
}

inline int queries_of_unit(int group) { return std::max(1, QUERY_ROWS / group); }

// q, out: [row][num_heads][head_dim], rows q_stride and out_stride floats apart; q is scaled already.
inline void attend(const Pool& pool, int layer, const Span& span, const AttentionUnit& unit, int group, const float* q,
                   int64_t q_stride, float* out, int64_t out_stride) {
    constexpr int MOST_ROWS_HERE = QUERY_ROWS + 64;  // a group may be larger than QUERY_ROWS
    alignas(64) static thread_local float keys[KEYS / PANEL][MOST_DIM * PANEL], values[MOST_DIM / PANEL][KEYS * PANEL];
    alignas(64) static thread_local float queries[MOST_ROWS_HERE * MOST_DIM], scores[KEYS / PANEL][MOST_ROWS_HERE * PANEL];
    alignas(64) static thread_local float weights[MOST_ROWS_HERE * KEYS], sums[MOST_DIM / PANEL][MOST_ROWS_HERE * PANEL];
    static thread_local float most[MOST_ROWS_HERE], total[MOST_ROWS_HERE];
    const int dim = pool.head_dim, dim_panels = (dim + PANEL - 1) / PANEL, rows = unit.num_tokens * group;
    for (int row = 0; row < rows; ++row) {
        const int64_t token = span.row + unit.first + row / group;
        std::memcpy(queries + row * dim, q + token * q_stride + (unit.kv_head * group + row % group) * dim, sizeof(float) * dim);
        most[row] = -std::numeric_limits<float>::infinity();
        total[row] = 0;
    }
    for (int panel = 0; panel < dim_panels; ++panel) std::memset(sums[panel], 0, sizeof(float) * rows * PANEL);

    const int first_position = span.start + unit.first, end = first_position + unit.num_tokens;
    const int64_t to_value = int64_t(pool.num_kv_heads) * pool.block_size * dim;  // from a key to its value
    const float *some[KEYS], *others[KEYS], **keys_at = some, **next_at = others;
    int block = 0, slot = 0;  // of the next position
    const float* last = nullptr;
    const auto find = [&](int from, const float** to) {  // the keys of a tile; beyond the end, the last one again
        for (int key = 0; key < KEYS; ++key) {
            if (from + key < end) {
                last = pool.at(span.blocks[block], layer, 0, unit.kv_head) + int64_t(slot) * dim;
                if (++slot == pool.block_size) ++block, slot = 0;
            }
            to[key] = last;
        }
    };
    for (int start = 0; start < end; start += KEYS) {
        const int count = std::min(KEYS, end - start), key_panels = (count + PANEL - 1) / PANEL;
        if (start == 0) find(0, keys_at);
        find(start + KEYS, next_at);
        for (int key = 0; key < count; key += 4) {
            const float* from[4];
            for (int i = 0; i < 4; ++i) {  // beyond the last key its own again: what comes of it is masked
                from[i] = keys_at[std::min(key + i, count - 1)];
                const float *value = from[i] + to_value, *next = next_at[key + i];
                for (int panel = 0; panel < dim_panels; ++panel) {
                    float* to = values[panel] + (key + i) * PANEL;
                    const int width = std::min(PANEL, dim - panel * PANEL);
                    if (width == PANEL) {
                        std::memcpy(to, value + panel * PANEL, sizeof(float) * PANEL);
                    } else {
                        std::memset(to, 0, sizeof(float) * PANEL);
                        std::memcpy(to, value + panel * PANEL, sizeof(float) * width);
                    }
                    __builtin_prefetch(next + panel * PANEL);
                    __builtin_prefetch(next + to_value + panel * PANEL);
                }
            }
            transpose4(from, keys[key / PANEL] + key % PANEL, dim);
        }
        std::swap(keys_at, next_at);
        for (int panel = 0; panel < key_panels; ++panel) std::memset(scores[panel], 0, sizeof(float) * rows * PANEL);
        multiply(rows, key_panels, scores[0], scores[1] - scores[0], queries, dim, keys[0], keys[1] - keys[0], dim);
        for (int row = 0; row < rows; ++row) {
            const int visible = std::min(count, first_position + row / group + 1 - start);
            if (visible <= 0) {
                std::memset(weights + row * KEYS, 0, sizeof(float) * count);
                continue;
            }
            float* score = weights + row * KEYS;
            for (int key = 0; key < KEYS; key += PANEL)
                if (key < count) std::memcpy(score + key, scores[key / PANEL] + row * PANEL, sizeof(float) * PANEL);
            for (int key = visible; key < KEYS; ++key) score[key] = -std::numeric_limits<float>::infinity();
            vf highest = all(most[row]);
            for (int key = 0; key < KEYS; key += LANES) highest = larger(load(score + key), highest);
            const float now = greatest(highest);
            vf added{};
            for (int key = 0; key < KEYS; key += LANES) {
                const vf weight = exp(load(score + key) - all(now));
                store(score + key, weight);
                added += weight;
            }
            if (most[row] != now) {
                const vf factor = exp(all(most[row] - now));
                total[row] *= factor[0];
                for (int panel = 0; panel < dim_panels; ++panel)
                    for (int v = 0; v < PANEL; v += LANES) {
                        float* at = sums[panel] + row * PANEL + v;
                        store(at, load(at) * factor);
                    }
                most[row] = now;
            }
            total[row] += sum(added);
        }
        multiply(rows, dim_panels, sums[0], sums[1] - sums[0], weights, KEYS, values[0], values[1] - values[0], count);
    }
    for (int row = 0; row < rows; ++row) {
        const int64_t token = span.row + unit.first + row / group;
        float* to = out + token * out_stride + (unit.kv_head * group + row % group) * dim;
        for (int d = 0; d < dim; ++d) to[d] = sums[d / PANEL][row * PANEL + d % PANEL] / total[row];
    }
}
