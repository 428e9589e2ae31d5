// Causal attention over the paged pool [blocks][layers][2][kv heads], read where it lies: a block's keys are [head_dim][slots],
// so that those of 16 tokens are a panel of a matrix product, and its values [slots][head_dim].
//
// The keys of a sequence are taken in tiles of KEYS from its first on, with a running maximum and sum; every SEGMENT keys begin
// anew and are merged with those before. That holds for one token, whose segments are shared among the threads, as for a whole
// chunk, and masked keys add exact zeros: a query's result does not depend on which queries it was computed with, or by whom.
// It may depend on whether it is the prompt's, which comes in large chunks: those are worth the matrix unit (factors.h).
#pragma once

#include <array>
#include <limits>

#include "factors.h"

constexpr int SEGMENT = 512;     // keys, a multiple of KEYS
constexpr int LEAST_ROWS = 48, QUERY_ROWS = 192;  // queries × heads that share the key head, of one unit
constexpr int MOST_GROUP = 96;   // heads that share a key head
constexpr float MARGIN = 8;      // by which a score may exceed what the weights are relative to
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// Of floats or Float16s.
struct Pool {
    void* data;
    bool has_float16;
    int num_layers, num_kv_heads, block_size, head_dim;

    // A block's keys (what = 0) or values (1).
    template <class T>
    T* at(int block, int layer, int what, int kv_head) const {
        const int64_t piece = ((int64_t(block) * num_layers + layer) * 2 + what) * num_kv_heads + kv_head;
        return static_cast<T*>(data) + piece * block_size * head_dim;
    }
};

// One sequence's part of a step: the queries at positions start … start + num_tokens - 1 are rows row … of the step.
struct Span {
    const int32_t* blocks;
    int32_t start, num_tokens, row;
    int32_t is_prompt;
};

// Queries of one span and one key head, over all keys that they see or over one segment of them.
struct AttentionUnit {
    int32_t span, first, num_tokens, kv_head;
    int32_t segment;   // -1: all
    int64_t partial;   // where its results begin in the scratch memory, if it is one segment
};

// As many as share the work of fetching the keys, while there is a unit or more for each of the threads.
inline int queries_of_unit(int num_tokens, int num_kv_heads, int group, int num_threads) {
    const int most = std::max(1, QUERY_ROWS / group), least = std::max(1, LEAST_ROWS / group);
    return std::clamp(num_tokens * num_kv_heads / (UNITS * num_threads), least, most);
}

// What attention knows of one query so far: a score that none exceeds by more than MARGIN, the sum of the weights relative to it,
// and of the values.
inline void merge(float* so_far, const float* more, int dim) {
    const float most = std::max(so_far[0], more[0]);
    const vf mine = exp2(all(so_far[0] - most)), theirs = exp2(all(more[0] - most));
    so_far[0] = most;
    so_far[1] = so_far[1] * mine[0] + more[1] * theirs[0];
    for (int d = 2; d < dim + 2; ++d) so_far[d] = so_far[d] * mine[0] + more[d] * theirs[0];
}

// The rows of one unit: scores, weights and sums while its keys, of type T, pass by.
template <class T, template <int, int> class Rows>
class Attention {
  public:
    // q: [row][num_heads][head_dim], rows q_stride floats apart, scaled so that scores are exponents of 2.
    void start(const Pool& pool, int layer, const Span& span, const AttentionUnit& unit, int group, const float* q, int64_t q_stride) {
        pool_ = &pool, layer_ = layer, span_ = &span, kv_head_ = unit.kv_head, group_ = group;
        dim_ = pool.head_dim, dim_panels_ = (dim_ + PANEL - 1) / PANEL, width_ = dim_panels_ * PANEL, rows_ = unit.num_tokens * group;
        first_ = span.start + unit.first, end_ = first_ + unit.num_tokens;
        queries_.stride = (dim_ + STEP - 1) / STEP * STEP, weights_.stride = KEYS;
        for (int row = 0; row < rows_; ++row) {
            const int64_t token = span.row + unit.first + row / group;
            const float* query = q + token * q_stride + (kv_head_ * group + row % group) * dim_;
            for (int d = 0; d < dim_; d += STEP) {
                Some some{};
                std::memcpy(some, query + d, sizeof(float) * std::min(STEP, dim_ - d));
                queries_.set(row, d, some);
            }
        }
    }

    int num_keys() const { return end_; }
    int num_rows() const { return rows_; }

    // One segment alone: [row][2 + head_dim], as merge() takes them.
    void segment(int index, float* to) {
        for (int row = 0; row < rows_; ++row) reference_[row] = NOTHING;
        std::memset(totals_, 0, sizeof(float) * rows_ * LANES);
        std::memset(sums_, 0, sizeof(float) * rows_ * width_);
        queries_.begin(rows_);
        const int to_key = std::min(end_, (index + 1) * SEGMENT);
        for (int key = index * SEGMENT; key < to_key; key += KEYS) tile(key, std::min(KEYS, to_key - key));
        queries_.end();
        for (int row = 0; row < rows_; ++row, to += 2 + dim_) {
            to[0] = reference_[row];
            to[1] = sum(load(totals_ + row * LANES));
            std::memcpy(to + 2, sums_ + row * width_, sizeof(float) * dim_);
        }
    }

  private:
    static constexpr int MOST = std::max(QUERY_ROWS, MOST_GROUP);
    static constexpr int KEY_PANELS = KEYS / PANEL, MOST_VALUES = KEY_PANELS * (MOST_DIM / PANEL);

    void tile(int start, int count) {
        const int key_panels = (count + PANEL - 1) / PANEL;
        if (pool_->block_size % PANEL == 0 && dim_ % PANEL == 0) {
            const T *keys[KEY_PANELS], *values[MOST_VALUES], *next_keys[KEY_PANELS], *next_values[MOST_VALUES];
            find(start, key_panels, keys, values);
            find(std::min(start + KEYS, end_ - 1), key_panels, next_keys, next_values);
            attend(start, count, Panels<T>{keys, key_panels, dim_, pool_->block_size, next_keys},
                   Panels<T>{values, dim_panels_, PANEL, dim_, next_values});
        } else {
            const float *keys[KEY_PANELS], *values[MOST_VALUES];
            gather(start, count, keys, values);
            attend(start, count, Panels<>{keys, key_panels, dim_, PANEL}, Panels<>{values, dim_panels_, PANEL, width_});
        }
    }

    template <class P>
    void attend(int start, int count, const P& keys, const P& values) {
        multiply<false>(rows_, scores_, KEYS, queries_, keys, dim_);
        for (int row = 0, position = first_; row < rows_; ++position)
            for (const int end = row + group_; row < end; ++row) weigh(row, std::min(count, position + 1 - start));
        multiply<true>(rows_, sums_, width_, weights_, values, count);
    }

    // Turns a row's scores into weights, those of keys from ``visible`` on into zeros. Where a score is larger than before by more
    // than MARGIN, the row's sums are put in terms of it.
    void weigh(int row, int visible) {
        float* scores = scores_ + row * KEYS;
        if (visible <= 0) {
            for (int key = 0; key < KEYS; key += STEP) weights_.set(row, key, Some{});
            return;
        }
        for (int key = visible; key < KEYS; ++key) scores[key] = NOTHING;
        vf largest = load(scores);
#pragma GCC unroll 16
        for (int key = LANES; key < KEYS; key += LANES) largest = larger(load(scores + key), largest);
        const float most = greatest(largest);
        vf total = load(totals_ + row * LANES);
        if (most > reference_[row] + MARGIN) {
            const vf factor = exp2(all(reference_[row] - most));
            total *= factor;
            float* sums = sums_ + row * width_;
            for (int d = 0; d < width_; d += LANES) store(sums + d, load(sums + d) * factor);
            reference_[row] = most;
        }
        const vf reference = all(reference_[row]);
#pragma GCC unroll 2
        for (int key = 0; key < KEYS; key += STEP) {
            Some weights;
#pragma GCC unroll 8
            for (int i = 0; i < STEP / LANES; ++i) total += weights[i] = exp2(load(scores + key + i * LANES) - reference);
            weights_.set(row, key, weights);
        }
        store(totals_ + row * LANES, total);
    }

    // Where the keys and values of some panels lie, from that of ``position`` on; beyond the last key, the last panel again.
    void find(int position, int num_panels, const T** keys, const T** values) const {
        for (int panel = 0; panel < num_panels; ++panel) {
            const int first = std::min(position + panel * PANEL, end_ - 1) / PANEL * PANEL;
            const int block = span_->blocks[first / pool_->block_size], slot = first % pool_->block_size;
            keys[panel] = pool_->at<T>(block, layer_, 0, kv_head_) + slot;
            put(values, panel, pool_->at<T>(block, layer_, 1, kv_head_) + int64_t(slot) * dim_);
        }
    }

    // Copies where blocks or heads do not fit panels.
    void gather(int start, int count, const float** keys, const float** values) {
        for (int key = 0; key < count; ++key) {
            const int block = span_->blocks[(start + key) / pool_->block_size], slot = (start + key) % pool_->block_size;
            const T* from = pool_->at<T>(block, layer_, 0, kv_head_) + slot;
            float* to = keys_copy_ + key / PANEL * PANEL * dim_ + key % PANEL;
            for (int d = 0; d < dim_; ++d) to[d * PANEL] = to_float(from[int64_t(d) * pool_->block_size]);
            from = pool_->at<T>(block, layer_, 1, kv_head_) + int64_t(slot) * dim_;
            for (int d = 0; d < dim_; ++d) values_copy_[key * width_ + d] = to_float(from[d]);
        }
        for (int panel = 0; panel < KEY_PANELS; ++panel) {
            keys[panel] = keys_copy_ + panel * PANEL * dim_;
            put(values, panel, values_copy_ + panel * PANEL * width_);
        }
    }

    template <class V>
    void put(const V** values, int panel, const V* first) const {
        for (int d = 0; d < dim_panels_; ++d) values[panel * dim_panels_ + d] = first + d * PANEL;
    }

    const Pool* pool_;
    const Span* span_;
    int layer_, kv_head_, group_, dim_, dim_panels_, width_, rows_, first_, end_;
    Rows<MOST, MOST_DIM> queries_;
    Rows<MOST, KEYS> weights_;
    static_assert(MOST % decltype(queries_)::TOGETHER == 0);
    alignas(64) float scores_[MOST * KEYS];  // [row][key]
    alignas(64) float sums_[MOST * MOST_DIM];  // [row][width]
    alignas(64) float totals_[MOST * LANES];
    alignas(64) float keys_copy_[KEYS * MOST_DIM], values_copy_[KEYS * MOST_DIM];
    float reference_[MOST];
};

inline void write_attended(float* to, const float* state, int dim) {
    for (int d = 0; d < dim; ++d) to[d] = state[2 + d] / state[1];
}

// out: [row][num_heads][head_dim], rows out_stride floats apart. partials: of units that are one segment.
template <class T, template <int, int> class Rows>
inline void attend(const Pool& pool, int layer, const Span& span, const AttentionUnit& unit, int group, const float* q,
                   int64_t q_stride, float* out, int64_t out_stride, float* partials) {
    auto& attention = own<Attention<T, Rows>>();
    attention.start(pool, layer, span, unit, group, q, q_stride);
    if (unit.segment >= 0) return attention.segment(unit.segment, partials + unit.partial);
    const int dim = pool.head_dim, size = 2 + dim;
    auto& [states, more] = own<std::array<std::vector<float>, 2>>();
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
