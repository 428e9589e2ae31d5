// The C interface. Nothing here knows of Python or torch; pointers are to memory that the caller keeps.
#include "model.h"
#include "pack.h"

extern "C" {

int disagg_lanes() { return LANES; }

// Whether the operating system lets this process use what this variant was compiled for.
int disagg_may_run() { return may_use_tiles(); }

Crew* disagg_crew_new(int num_threads) { return new Crew(num_threads); }
void disagg_crew_free(Crew* crew) { delete crew; }

// Null for a type that is not known, a length that is no whole number of groups, or without memory.
Matrix* disagg_matrix_new(Crew* crew, int type, const void* data, int rows, int cols, const int32_t* order) {
    return pack(*crew, type, static_cast<const uint8_t*>(data), rows, cols, order);
}
void disagg_matrix_free(Matrix* matrix) { delete matrix; }
int64_t disagg_matrix_bytes(const Matrix* matrix) { return matrix->panel_bytes * matrix->num_panels(); }

void disagg_matrix_row(const Matrix* matrix, int row, float* to) { read_row(*matrix, row, to); }

// y [num_rows][rows] = x [num_rows][cols] Wᵀ + bias; with up: silu(x Wᵀ) (x Uᵀ); adds: to what is in y; in_bytes: see rows8.h.
void disagg_product(Crew* crew, const Matrix* weights, const Matrix* up, const float* bias, const float* x, int num_rows, float* y,
                    int adds, int in_bytes) {
    Rows8 rows;
    if (in_bytes && weights->is_quantised()) {
        rows.resize(num_rows, weights->cols);
        for (int row = 0; row < num_rows; ++row) rows.set(row, x + int64_t(row) * weights->cols);
    }
    multiply(*crew, num_rows, Product{weights, up, bias, x, weights->cols, in_bytes ? &rows : nullptr, y, weights->rows, adds != 0});
}

Scratch* disagg_scratch_new() { return new Scratch; }
void disagg_scratch_free(Scratch* scratch) { delete scratch; }

void disagg_forward(const Model* model, Crew* crew, Scratch* scratch, void* pool, int has_float16, int block_size, const Span* spans,
                    int num_spans, const int32_t* tokens, int num_tokens, float* x) {
    const Pool paged{pool, has_float16 != 0, model->num_layers, model->num_kv_heads, block_size, model->head_dim};
    forward(*model, *crew, *scratch, paged, spans, num_spans, tokens, num_tokens, x);
}

void disagg_logits(const Model* model, Crew* crew, Scratch* scratch, const float* x, int num_rows, float* to) {
    logits(*model, *crew, *scratch, x, num_rows, to);
}
}
