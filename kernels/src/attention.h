// Causal attention over the paged pool [blocks][layers][2][kv heads], read where it lies: a block's keys are [head_dim][slots],
// so that those of 16 tokens are a panel of a matrix product, and its values [slots][head_dim].
//
// The keys of a sequence are taken in tiles of KEYS from its first on, with a running maximum and sum; every SEGMENT keys begin
// anew and are merged with those before. That holds for one token, whose segments are shared among the threads, as for a whole
// chunk, and masked keys add exact zeros: a query's result does not depend on which queries it was computed with, or by whom.
#pragma once

#include <limits>

#include "product.h"

constexpr int KEYS = 64;         // of a tile
constexpr int SEGMENT = 512;     // keys, a multiple of KEYS
constexpr int QUERY_ROWS = 48;   // queries × heads that share the key head, of one unit
constexpr int MOST_DIM = 256;    // of a head
constexpr int MOST_GROUP = 96;   // heads that share a key head
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Pool {
    float* data;
    int num_layers, num_kv_heads, block_size, head_dim;

    // A block's keys (what = 0) or values (1).
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

// Queries of one span and one key head, over all keys that they see or over one segment of them.
struct AttentionUnit {
    int32_t span, first, num_tokens, kv_head;
    int32_t segment;   // -1: all
    int64_t partial;   // where its results begin in the scratch memory, if it is one segment
};

inline int queries_of_unit(int group) { return std::max(1, QUERY_ROWS / group); }

// What attention knows of one query so far: the largest score, the sum of the weights relative to it, and of the values.
inline void merge(float* so_far, const float* more, int dim) {
    const float most = std::max(so_far[0], more[0]);
    const vf mine = exp2(all(so_far[0] - most)), theirs = exp2(all(more[0] - most));
    so_far[0] = most;
    so_far[1] = so_far[1] * mine[0] + more[1] * theirs[0];
    for (int d = 2; d < dim + 2; ++d) so_far[d] = so_far[d] * mine[0] + more[d] * theirs[0];
}

// The rows of one unit: scores, weights and sums while its keys pass by.
class Attention {
  public:
    // q: [row][num_heads][head_dim], rows q_stride floats apart, scaled so that scores are exponents of 2.
    void start(const Pool& pool, int layer, const Span& span, const AttentionUnit& unit, int group, const float* q, int64_t q_stride) {
        pool_ = &pool, layer_ = layer, span_ = &span, kv_head_ = unit.kv_head, group_ = group;
        dim_ = pool.head_dim, dim_panels_ = (dim_ + PANEL - 1) / PANEL, width_ = dim_panels_ * PANEL, rows_ = unit.num_tokens * group;
        first_ = span.start + unit.first, end_ = first_ + unit.num_tokens;
        for (int row = 0; row < rows_; ++row) {
            const int64_t token = span.row + unit.first + row / group;
            std::memcpy(queries_ + row * dim_, q + token * q_stride + (kv_head_ * group + row % group) * dim_, sizeof(float) * dim_);
        }
    }

    int num_keys() const { return end_; }
    int num_rows() const { return rows_; }

    // One segment alone: [row][2 + head_dim], as merge() takes them.
    void segment(int index, float* to) {
        for (int row = 0; row < rows_; ++row) most_[row] = NOTHING, total_[row] = 0;
        std::memset(sums_, 0, sizeof(float) * rows_ * width_);
        const int to_key = std::min(end_, (index + 1) * SEGMENT);
        for (int key = index * SEGMENT; key < to_key; key += KEYS) tile(key, std::min(KEYS, to_key - key));
        for (int row = 0; row < rows_; ++row, to += 2 + dim_) {
            to[0] = most_[row];
            to[1] = total_[row];
            std::memcpy(to + 2, sums_ + row * width_, sizeof(float) * dim_);
        }
    }

  private:
    static constexpr int MOST_ROWS_HERE = std::max(QUERY_ROWS, MOST_GROUP), MOST_VALUES = KEYS / PANEL * (MOST_DIM / PANEL);

    void tile(int start, int count) {
        const int key_panels = (count + PANEL - 1) / PANEL;
        const float *keys[KEYS / PANEL], *values[MOST_VALUES], *next_keys[KEYS / PANEL], *next_values[MOST_VALUES];
        int64_t key_stride = pool_->block_size, value_stride = dim_;
        const bool in_place = pool_->block_size % PANEL == 0 && dim_ % PANEL == 0;
        if (in_place) {
            find(start, key_panels, keys, values);
            find(std::min(start + KEYS, end_ - 1), key_panels, next_keys, next_values);
        } else {
            gather(start, count, keys, values);
            key_stride = PANEL, value_stride = width_;
        }
        std::memset(weights_, 0, sizeof(float) * rows_ * KEYS);
        multiply(rows_, weights_, KEYS, queries_, dim_, {keys, key_panels, dim_, key_stride, in_place ? next_keys : nullptr}, dim_);
        for (int row = 0; row < rows_; ++row) weigh(row, std::min(count, first_ + row / group_ + 1 - start), count);
        multiply(rows_, sums_, width_, weights_, KEYS, {values, dim_panels_, PANEL, value_stride, in_place ? next_values : nullptr}, count);
    }

    // Turns a row's scores into weights, those of keys from ``visible`` on into zeros, and puts its sums in terms of the new maximum.
    void weigh(int row, int visible, int count) {
        float* score = weights_ + row * KEYS;
        if (visible <= 0) {
            std::memset(score, 0, sizeof(float) * count);
            return;
        }
        for (int key = visible; key < KEYS; ++key) score[key] = NOTHING;
        vf highest = all(most_[row]);
        for (int key = 0; key < KEYS; key += LANES) highest = larger(load(score + key), highest);
        const float now = greatest(highest);
        vf added{};
        for (int key = 0; key < KEYS; key += LANES) {
            const vf weight = exp2(load(score + key) - all(now));
            store(score + key, weight);
            added += weight;
        }
        if (most_[row] != now) {
            const vf factor = exp2(all(most_[row] - now));
            total_[row] *= factor[0];
            float* sums = sums_ + row * width_;
            for (int d = 0; d < width_; d += LANES) store(sums + d, load(sums + d) * factor);
            most_[row] = now;
        }
        total_[row] += sum(added);
    }

    // Where the keys and values of some panels lie, from that of ``position`` on; beyond the last key, the last panel again.
    void find(int position, int num_panels, const float** keys, const float** values) const {
        for (int panel = 0; panel < num_panels; ++panel) {
            const int first = std::min(position + panel * PANEL, end_ - 1) / PANEL * PANEL;
            const int block = span_->blocks[first / pool_->block_size], slot = first % pool_->block_size;
            keys[panel] = pool_->at(block, layer_, 0, kv_head_) + slot;
            put(values, panel, pool_->at(block, layer_, 1, kv_head_) + int64_t(slot) * dim_);
        }
    }

    // Copies where blocks or heads do not fit panels.
    void gather(int start, int count, const float** keys, const float** values) {
        for (int key = 0; key < count; ++key) {
            const int block = span_->blocks[(start + key) / pool_->block_size], slot = (start + key) % pool_->block_size;
            const float* from = pool_->at(block, layer_, 0, kv_head_) + slot;
            float* to = keys_copy_ + key / PANEL * PANEL * dim_ + key % PANEL;
            for (int d = 0; d < dim_; ++d) to[d * PANEL] = from[int64_t(d) * pool_->block_size];
            std::memcpy(values_copy_ + key * width_, pool_->at(block, layer_, 1, kv_head_) + int64_t(slot) * dim_, sizeof(float) * dim_);
        }
        for (int panel = 0; panel < KEYS / PANEL; ++panel) {
            keys[panel] = keys_copy_ + panel * PANEL * dim_;
            put(values, panel, values_copy_ + panel * PANEL * width_);
        }
    }

    void put(const float** values, int panel, const float* first) const {
        for (int d = 0; d < dim_panels_; ++d) values[panel * dim_panels_ + d] = first + d * PANEL;
    }

    const Pool* pool_;
    const Span* span_;
    int layer_, kv_head_, group_, dim_, dim_panels_, width_, rows_, first_, end_;
    alignas(64) float queries_[MOST_ROWS_HERE * MOST_DIM];
    alignas(64) float weights_[MOST_ROWS_HERE * KEYS];  // [row][key], scores at first
    alignas(64) float sums_[MOST_ROWS_HERE * MOST_DIM];  // [row][width]
    alignas(64) float keys_copy_[KEYS * MOST_DIM], values_copy_[KEYS * MOST_DIM];
    float most_[MOST_ROWS_HERE], total_[MOST_ROWS_HERE];
};

inline void write_attended(float* to, const float* state, int dim) {
    for (int d = 0; d < dim; ++d) to[d] = state[2 + d] / state[1];
}

// out: [row][num_heads][head_dim], rows out_stride floats apart. partials: of units that are one segment.
inline void attend(const Pool& pool, int layer, const Span& span, const AttentionUnit& unit, int group, const float* q,
                   int64_t q_stride, float* out, int64_t out_stride, float* partials) {
    static thread_local Attention attention;
    static thread_local std::vector<float> states, more;
    attention.start(pool, layer, span, unit, group, q, q_stride);
    if (unit.segment >= 0) return attention.segment(unit.segment, partials + unit.partial);
    const int dim = pool.head_dim, size = 2 + dim;
    states.resize(size_t(attention.num_rows()) * size);
    more.resize(states.size());
    attention.segment(0, states.data());
    for (int index = 1; index * SEGMENT < attention.num_keys(); ++index) {
        attention.segment(index, more.data());
        for (int row = 0; row < attention.num_rows(); ++row) merge(states.data() + row * size, more.data() + row * size, dim);
    }
    for (int row = 0; row < attention.num_rows(); ++row) {
        const int64_t token = span.row + unit.first + row / group;
        write_attended(out + token * out_stride + (unit.kv_head * group + row % group) * dim, states.data() + row * size, dim);
    }
}
