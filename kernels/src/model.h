// The decoder of the Llama family over a paged pool: what its layers are made of, and one step of it.
#pragma once

#include "attention.h"

struct Layer {
    const float *attention_norm, *mlp_norm;   // [hidden]
    const float* qk_norm;                     // [heads + kv heads][head_dim], or null
    const Matrix *q, *k, *v, *output, *gate, *up, *down;
    const float *q_bias, *k_bias, *v_bias;    // or null
};

struct Model {
    int num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
    float epsilon;
    const Layer* layers;
    const Matrix *embedding, *head;
    const float* norm;    // [hidden]
    const float* turns;   // [positions][head_dim / 2][2]: cos and sin
    int in_bytes;         // whether rows meet quantised weights as bytes
};

inline void rms_norm(const float* x, const float* weight, float* y, int size, float epsilon) {
    vf squares{};
    int i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; ++i) total += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(total / float(size) + epsilon);
    for (i = 0; i + LANES <= size; i += LANES) store(y + i, load(x + i) * all(scale) * load(weight + i));
    for (; i < size; ++i) y[i] = x[i] * scale * weight[i];
}

// Neighbouring dimensions are one complex number, turned by its position.
inline void turn(float* x, const float* turns, int dim) {
    for (int d = 0; d < dim; d += 2) {
        const float a = x[d], b = x[d + 1], cosine = turns[d], sine = turns[d + 1];
        x[d] = a * cosine - b * sine;
        x[d + 1] = a * sine + b * cosine;
    }
}

inline void read_row(const Matrix& matrix, int row, float* to) {
    with_format(matrix.layout, [&](auto format) {
        using F = decltype(format);
        const uint8_t* groups[1] = {matrix.panel(row / PANEL)};
        for (int start = 0; start < matrix.cols; start += F::GROUP, groups[0] += F::BYTES)
            expand<F, 1>(groups, [&](int k, const vf(&w)[1][NV]) __attribute__((always_inline)) {
                to[start + k] = w[0][row % PANEL / LANES][row % LANES];
            });
    });
}

// Memory of one step, kept from step to step.
struct Scratch {
    std::vector<float> normed, qkv, attended, inner, partials;
    std::vector<int32_t> span_of;  // each token's
    std::vector<AttentionUnit> units;
    Rows8 rows8;  // of what is multiplied next
};

constexpr int TOKENS = 8;  // of one unit of the small work between the products

// Runs fn(first, end) over tokens: at once if they are few, else as a phase.
template <class Fn>
inline void each_token(Crew& crew, int num_tokens, const Fn& fn) {
    if (num_tokens <= TOKENS) return fn(0, num_tokens);
    crew.phase((num_tokens + TOKENS - 1) / TOKENS, [&](int unit) { fn(unit * TOKENS, std::min((unit + 1) * TOKENS, num_tokens)); });
}

inline void copy(const float* from, float* to, int count) { std::memcpy(to, from, sizeof(float) * count); }

inline void copy(const float* from, Float16* to, int count) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    if (i == count) return;
    float rest[LANES] = {};
    Float16 halves[LANES];
    std::memcpy(rest, from + i, sizeof(float) * (count - i));
    store(halves, load(rest));
    std::memcpy(to + i, halves, sizeof(Float16) * (count - i));
}

// A token's keys and values [2][kv heads][head_dim] go where they belong.
template <class T>
inline void write_kv(const Pool& pool, int layer, const Span& span, int position, const float* kv) {
    const int block = span.blocks[position / pool.block_size], slot = position % pool.block_size, dim = pool.head_dim;
    for (int head = 0; head < pool.num_kv_heads; ++head) {
        T key[MOST_DIM];
        copy(kv + head * dim, key, dim);
        T* keys = pool.at<T>(block, layer, 0, head) + slot;
        for (int d = 0; d < dim; ++d) keys[int64_t(d) * pool.block_size] = key[d];
        copy(kv + (pool.num_kv_heads + head) * dim, pool.at<T>(block, layer, 1, head) + int64_t(slot) * dim, dim);
    }
}

inline void place(const Model& model, const Layer& layer, int index, const Pool& pool, const Span& span, int position, float* qkv) {
    const int dim = model.head_dim, turned = model.num_heads + model.num_kv_heads;
    const float scale = LOG2_E / std::sqrt(float(dim));  // scores are exponents of 2
    for (int head = 0; head < turned; ++head) {
        float* x = qkv + head * dim;
        if (layer.qk_norm != nullptr) rms_norm(x, layer.qk_norm + head * dim, x, dim, model.epsilon);
        turn(x, model.turns + int64_t(position) * dim, dim);
        if (head < model.num_heads)
            for (int d = 0; d < dim; ++d) x[d] *= scale;
    }
    if (pool.has_float16)
        write_kv<Float16>(pool, index, span, position, qkv + model.num_heads * dim);
    else
        write_kv<float>(pool, index, span, position, qkv + model.num_heads * dim);
}

// A single token's keys are shared among the threads, a segment each.
inline int num_segments(const Span& span) { return span.num_tokens > 1 ? 1 : span.start / SEGMENT + 1; }

// The attention of a step in units of work, the longest first of each sequence.
inline void plan_attention(const Model& model, Scratch& scratch, const Span* spans, int num_spans, int num_threads) {
    const int group = model.num_heads / model.num_kv_heads;
    int64_t partials = 0;
    scratch.units.clear();
    for (int index = 0; index < num_spans; ++index) {
        const Span& span = spans[index];
        for (int i = 0; i < span.num_tokens; ++i) scratch.span_of[span.row + i] = index;
        const int segments = num_segments(span), per_unit = queries_of_unit(span.num_tokens, model.num_kv_heads, group, num_threads);
        for (int head = 0; head < model.num_kv_heads; ++head)
            for (int first = (span.num_tokens - 1) / per_unit * per_unit; first >= 0; first -= per_unit)
                for (int segment = 0; segment < segments; ++segment) {
                    scratch.units.push_back({index, first, std::min(per_unit, span.num_tokens - first), head, segments > 1 ? segment : -1, partials});
                    if (segments > 1) partials += int64_t(group) * (2 + model.head_dim);
                }
    }
    scratch.partials.resize(partials);
}

// Puts together what attend() left in parts.
inline void merge_segments(const Model& model, Scratch& scratch, const Span* spans, float* attended) {
    const int dim = model.head_dim, group = model.num_heads / model.num_kv_heads, size = 2 + dim;
    for (const AttentionUnit& unit : scratch.units) {
        if (unit.segment < 0) continue;
        const int last = num_segments(spans[unit.span]) - 1;
        for (int row = 0; row < group; ++row) {
            float* part = scratch.partials.data() + unit.partial + row * size;
            float* first = part - int64_t(unit.segment) * group * size;
            if (unit.segment > 0) merge(first, part, dim);
            if (unit.segment == last)
                write_attended(attended + (int64_t(spans[unit.span].row) * model.num_heads + unit.kv_head * group + row) * dim, first, dim);
        }
    }
}

// One step: fills the KV of all spans and writes the last layer's output to x [num_tokens][hidden].
inline void forward(const Model& model, Crew& crew, Scratch& scratch, const Pool& pool, const Span* spans, int num_spans,
                    const int32_t* tokens, int num_tokens, float* x) {
    const int dim = model.head_dim, hidden = model.hidden, group = model.num_heads / model.num_kv_heads;
    const int q_size = model.num_heads * dim, kv_size = model.num_kv_heads * dim, qkv_size = q_size + 2 * kv_size;
    scratch.normed.resize(int64_t(num_tokens) * hidden);
    scratch.qkv.resize(int64_t(num_tokens) * qkv_size);
    scratch.attended.resize(int64_t(num_tokens) * q_size);
    scratch.inner.resize(int64_t(num_tokens) * model.intermediate);
    scratch.span_of.resize(num_tokens);
    plan_attention(model, scratch, spans, num_spans, crew.num_threads());
    float *normed = scratch.normed.data(), *qkv = scratch.qkv.data(), *attended = scratch.attended.data(), *inner = scratch.inner.data();
    Rows8* rows8 = model.in_bytes ? &scratch.rows8 : nullptr;
    const auto as_bytes = [&](const float* from, int cols) {
        if (rows8 == nullptr) return;
        rows8->resize(num_tokens, cols);
        each_token(crew, num_tokens, [&](int first, int end) {
            for (int t = first; t < end; ++t) rows8->set(t, from + int64_t(t) * cols);
        });
    };
    const auto norm = [&](const float* weight) {
        each_token(crew, num_tokens, [&](int first, int end) {
            for (int t = first; t < end; ++t)
                rms_norm(x + int64_t(t) * hidden, weight, normed + int64_t(t) * hidden, hidden, model.epsilon);
        });
        as_bytes(normed, hidden);
    };
    // A product of ``from`` [num_tokens][from_size], rows of ``to`` to_size apart.
    const auto product = [&](const Matrix* weights, const float* from, int from_size, float* to, int to_size) {
        return Product{.weights = weights, .x = from, .x_stride = from_size, .x8 = rows8, .y = to, .y_stride = to_size};
    };

    each_token(crew, num_tokens, [&](int first, int end) {
        for (int t = first; t < end; ++t) read_row(*model.embedding, tokens[t], x + int64_t(t) * hidden);
    });
    for (int index = 0; index < model.num_layers; ++index) {
        const Layer& layer = model.layers[index];
        norm(layer.attention_norm);
        Product q = product(layer.q, normed, hidden, qkv, qkv_size), k = product(layer.k, normed, hidden, qkv + q_size, qkv_size);
        Product v = product(layer.v, normed, hidden, qkv + q_size + kv_size, qkv_size);
        q.bias = layer.q_bias, k.bias = layer.k_bias, v.bias = layer.v_bias;
        multiply(crew, num_tokens, q, k, v);
        each_token(crew, num_tokens, [&](int first, int end) {
            for (int t = first; t < end; ++t) {
                const Span& span = spans[scratch.span_of[t]];
                place(model, layer, index, pool, span, span.start + t - span.row, qkv + int64_t(t) * qkv_size);
            }
        });
        crew.phase(int(scratch.units.size()), [&](int unit) {
            const AttentionUnit& part = scratch.units[unit];
            const Span& span = spans[part.span];
            const auto run = !pool.has_float16 ? attend<float, FloatRows>
                             : span.is_prompt  ? attend<Float16, SplitRows>
                                               : attend<Float16, FloatRows>;
            run(pool, index, span, part, group, qkv, qkv_size, attended, q_size, scratch.partials.data());
        });
        merge_segments(model, scratch, spans, attended);
        as_bytes(attended, q_size);
        Product output = product(layer.output, attended, q_size, x, hidden);
        output.adds = true;
        multiply(crew, num_tokens, output);
        norm(layer.mlp_norm);
        Product gated = product(layer.gate, normed, hidden, inner, model.intermediate);
        gated.up = layer.up;
        multiply(crew, num_tokens, gated);
        as_bytes(inner, model.intermediate);
        Product down = product(layer.down, inner, model.intermediate, x, hidden);
        down.adds = true;
        multiply(crew, num_tokens, down);
    }
}

// logits [rows][vocab] of rows of forward's output.
inline void logits(const Model& model, Crew& crew, Scratch& scratch, const float* x, int num_rows, float* to) {
    const int hidden = model.hidden;
    scratch.normed.resize(int64_t(num_rows) * hidden);
    if (model.in_bytes) scratch.rows8.resize(num_rows, hidden);
    for (int row = 0; row < num_rows; ++row) {
        float* normed = scratch.normed.data() + int64_t(row) * hidden;
        rms_norm(x + int64_t(row) * hidden, model.norm, normed, hidden, model.epsilon);
        if (model.in_bytes) scratch.rows8.set(row, normed);
    }
    multiply(crew, num_rows, Product{.weights = model.head, .x = scratch.normed.data(), .x_stride = hidden,
                                     .x8 = model.in_bytes ? &scratch.rows8 : nullptr, .y = to, .y_stride = model.vocab});
}
