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
    std::vector<float> normed, qkv, attended, inner;
    std::vector<AttentionUnit> units;
};

constexpr int TOKENS = 8;  // of one unit of the small work between the products

// Runs fn(first, end) over tokens: at once if they are few, else as a phase.
template <class Fn>
inline void each_token(Crew& crew, int num_tokens, const Fn& fn) {
    if (num_tokens <= TOKENS) return fn(0, num_tokens);
    crew.phase((num_tokens + TOKENS - 1) / TOKENS, [&](int unit) { fn(unit * TOKENS, std::min((unit + 1) * TOKENS, num_tokens)); });
}

inline void place(const Model& model, const Layer& layer, int index, const Pool& pool, const Span& span, int position, float* qkv) {
    const int dim = model.head_dim, turned = model.num_heads + model.num_kv_heads;
    const float scale = 1.0f / std::sqrt(float(dim));
    for (int head = 0; head < turned; ++head) {
        float* x = qkv + head * dim;
        if (layer.qk_norm != nullptr) rms_norm(x, layer.qk_norm + head * dim, x, dim, model.epsilon);
        turn(x, model.turns + int64_t(position) * dim, dim);
        if (head < model.num_heads)
            for (int d = 0; d < dim; ++d) x[d] *= scale;
    }
    const int block = span.blocks[position / pool.block_size], slot = position % pool.block_size;
    for (int what = 0; what < 2; ++what)
        for (int head = 0; head < model.num_kv_heads; ++head)
            std::memcpy(pool.at(block, index, what, head) + slot * dim,
                        qkv + (model.num_heads + what * model.num_kv_heads + head) * dim, sizeof(float) * dim);
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
    scratch.units.clear();
    std::vector<int32_t> span_of(num_tokens);
    for (int index = num_spans - 1; index >= 0; --index) {
        const Span& span = spans[index];
        for (int i = 0; i < span.num_tokens; ++i) span_of[span.row + i] = index;
        const int per_unit = queries_of_unit(group);
        for (int first = (span.num_tokens - 1) / per_unit * per_unit; first >= 0; first -= per_unit)  // the longest first
            for (int head = 0; head < model.num_kv_heads; ++head)
                scratch.units.push_back({index, first, std::min(per_unit, span.num_tokens - first), head});
    }
    float *normed = scratch.normed.data(), *qkv = scratch.qkv.data(), *attended = scratch.attended.data(), *inner = scratch.inner.data();

    each_token(crew, num_tokens, [&](int first, int end) {
        for (int t = first; t < end; ++t) read_row(*model.embedding, tokens[t], x + int64_t(t) * hidden);
    });
    for (int index = 0; index < model.num_layers; ++index) {
        const Layer& layer = model.layers[index];
        const auto norm = [&](const float* weight) {
            each_token(crew, num_tokens, [&](int first, int end) {
                for (int t = first; t < end; ++t)
                    rms_norm(x + int64_t(t) * hidden, weight, normed + int64_t(t) * hidden, hidden, model.epsilon);
            });
        };
        norm(layer.attention_norm);
        const Product products[] = {
            {.weights = layer.q, .bias = layer.q_bias, .x = normed, .x_stride = hidden, .y = qkv, .y_stride = qkv_size},
            {.weights = layer.k, .bias = layer.k_bias, .x = normed, .x_stride = hidden, .y = qkv + q_size, .y_stride = qkv_size},
            {.weights = layer.v, .bias = layer.v_bias, .x = normed, .x_stride = hidden, .y = qkv + q_size + kv_size, .y_stride = qkv_size},
        };
        multiply(crew, num_tokens, products, 3);
        each_token(crew, num_tokens, [&](int first, int end) {
            for (int t = first; t < end; ++t) {
                const Span& span = spans[span_of[t]];
                place(model, layer, index, pool, span, span.start + t - span.row, qkv + int64_t(t) * qkv_size);
            }
        });
        crew.phase(int(scratch.units.size()), [&](int unit) {
            const AttentionUnit& part = scratch.units[unit];
            attend(pool, index, spans[part.span], part, group, qkv, qkv_size, attended, q_size);
        });
        const Product output{.weights = layer.output, .x = attended, .x_stride = q_size, .y = x, .y_stride = hidden, .adds = true};
        multiply(crew, num_tokens, &output, 1);
        norm(layer.mlp_norm);
        const Product gated{.weights = layer.gate, .up = layer.up, .x = normed, .x_stride = hidden, .y = inner, .y_stride = model.intermediate};
        multiply(crew, num_tokens, &gated, 1);
        const Product down{.weights = layer.down, .x = inner, .x_stride = model.intermediate, .y = x, .y_stride = hidden, .adds = true};
        multiply(crew, num_tokens, &down, 1);
    }
}

// logits [rows][vocab] of rows of forward's output.
inline void logits(const Model& model, Crew& crew, Scratch& scratch, const float* x, int num_rows, float* to) {
    scratch.normed.resize(int64_t(num_rows) * model.hidden);
    float* normed = scratch.normed.data();
    for (int row = 0; row < num_rows; ++row)
        rms_norm(x + int64_t(row) * model.hidden, model.norm, normed + int64_t(row) * model.hidden, model.hidden, model.epsilon);
    const Product product{.weights = model.head, .x = normed, .x_stride = model.hidden, .y = to, .y_stride = model.vocab};
    multiply(crew, num_rows, &product, 1);
}
