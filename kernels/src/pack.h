// GGUF's blocks (as ggml defines them) and plain floats, put in the order of weights.h.
#pragma once

#include "crew.h"
#include "weights.h"

enum GgufType { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };

inline bool layout_of(int type, Layout& layout) {
    switch (type) {
        case Q4_0: case Q4_1: layout = NIBBLES; return true;
        case Q4_K: layout = WIDE_NIBBLES; return true;
        case Q8_0: layout = BYTES; return true;
        case Q5_0: case Q5_1: layout = BYTES_MIN; return true;
        case Q5_K: layout = WIDE_BYTES_MIN; return true;
        case Q6_K: layout = WIDE_BYTES; return true;
        case F32: case F16: layout = FLOATS; return true;
        case BF16: layout = BFLOATS; return true;
        default: return false;
    }
}

inline int64_t row_bytes(int type, int64_t cols) {
    switch (type) {
        case Q4_0: return cols / 32 * 18;
        case Q4_1: return cols / 32 * 20;
        case Q5_0: return cols / 32 * 22;
        case Q5_1: return cols / 32 * 24;
        case Q8_0: return cols / 32 * 34;
        case Q4_K: return cols / 256 * 144;
        case Q5_K: return cols / 256 * 176;
        case Q6_K: return cols / 256 * 210;
        case F32: return cols * 4;
        default: return cols * 2;
    }
}

inline float half_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    return half_to_float(half);
}

inline uint16_t to_half(float value) {  // of values that are 16-bit floats, times a power of two
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = bits >> 16 & 0x8000;
    const float size = std::fabs(value);
    if (size >= 65536.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | uint16_t(std::lround(size * 0x1p24f));
    return uint16_t(sign | (((bits & 0x7fffffff) >> 13) - (112u << 10)));
}

// One output's part of a group: w = d q + m.
struct Piece {
    int8_t q[32];
    float d, m;
};

// Scale and minimum of sub-block ``index`` of a K-quant: six bits each, the upper four pairs split in two places.
inline void scale_and_min(const uint8_t* packed, int index, int& scale, int& min) {
    if (index < 4) {
        scale = packed[index] & 63;
        min = packed[index + 4] & 63;
    } else {
        scale = (packed[index + 4] & 15) | (packed[index - 4] >> 6) << 4;
        min = (packed[index + 4] >> 4) | (packed[index] >> 6) << 4;
    }
}

// Group ``index`` of a row: 32 weights, or 16 of a Q6_K.
inline Piece unpack(int type, const uint8_t* row, int index) {
    Piece piece{};
    if (type == Q6_K) {
        const uint8_t* block = row + index / 16 * 210;
        const int part = index % 16, half = part / 8, quarter = part % 8 / 2, offset = part % 2 * 16;
        for (int i = 0; i < 16; ++i) {
            const int low = block[half * 64 + quarter % 2 * 32 + offset + i] >> (quarter / 2 * 4) & 15;
            const int high = block[128 + half * 32 + offset + i] >> (2 * quarter) & 3;
            piece.q[i] = int8_t((low | high << 4) - 32);
        }
        piece.d = half_at(block + 208) * float(int8_t(block[192 + part]));
        return piece;
    }
    if (type == Q4_K || type == Q5_K) {
        const uint8_t* block = row + index / 8 * (type == Q4_K ? 144 : 176);
        const uint8_t* codes = block + (type == Q4_K ? 16 : 48) + index % 8 / 2 * 32;
        int scale, min;
        scale_and_min(block + 4, index % 8, scale, min);
        for (int i = 0; i < 32; ++i) {
            const int low = codes[i] >> (index % 2 * 4) & 15;
            const int high = type == Q5_K ? block[16 + i] >> (index % 8) & 1 : 0;
            piece.q[i] = int8_t(low | high << 4);
        }
        piece.d = half_at(block) * float(scale);
        piece.m = -half_at(block + 2) * float(min);
        return piece;
    }
    const uint8_t* block = row + row_bytes(type, 32) * index;
    piece.d = half_at(block);
    if (type == Q8_0) {
        std::memcpy(piece.q, block + 2, 32);
        return piece;
    }
    const bool has_min = type == Q4_1 || type == Q5_1, has_fifth = type == Q5_0 || type == Q5_1;
    piece.m = has_min ? half_at(block + 2) : piece.d * (has_fifth ? -16.0f : -8.0f);
    uint32_t fifth = 0;
    if (has_fifth) std::memcpy(&fifth, block + (has_min ? 4 : 2), 4);
    const uint8_t* codes = block + (has_min ? 4 : 2) + (has_fifth ? 4 : 0);
    for (int i = 0; i < 32; ++i) piece.q[i] = int8_t((codes[i % 16] >> (i / 16 * 4) & 15) | (fifth >> i & 1) << 4);
    return piece;
}

// One output's float k of a plain row.
inline float plain(int type, const uint8_t* row, int k) {
    float value;
    if (type == F32)
        std::memcpy(&value, row + 4 * k, 4);
    else
        value = half_at(row + 2 * k);
    return value;
}

template <class F>
inline void put_scale(uint8_t* to, int lane, float value) {
    if constexpr (sizeof(typename F::ScaleType::Stored) == 2)
        reinterpret_cast<uint16_t*>(to)[lane] = to_half(value);
    else
        reinterpret_cast<float*>(to)[lane] = value;
}

template <class F>
inline void pack_row(int type, const uint8_t* row, int cols, uint8_t* panel, int lane) {
    for (int index = 0; index < cols / F::GROUP; ++index) {
        uint8_t* group = panel + int64_t(index) * F::BYTES;
        if constexpr (F::CODES == Codes::FLOATS) {
            reinterpret_cast<float*>(group)[lane] = plain(type, row, index);
        } else if constexpr (F::CODES == Codes::BFLOATS) {
            std::memcpy(group + 2 * lane, row + 2 * index, 2);
        } else {
            const Piece piece = unpack(type, row, index);
            put_scale<F>(group, lane, piece.d);
            if constexpr (F::HAS_MIN) put_scale<F>(group + F::SCALE_BYTES, lane, piece.m);
            uint8_t* codes = group + F::HEAD_BYTES;
            if constexpr (F::CODES == Codes::NIBBLES) {
                for (int word = 0; word < F::GROUP / 8; ++word) {
                    uint32_t bits = 0;
                    for (int k = 0; k < 8; ++k) bits |= uint32_t(piece.q[word * 8 + k]) << (k % 4 * 8 + k / 4 * 4);
                    std::memcpy(codes + (word * PANEL + lane) * 4, &bits, 4);
                }
            } else {
                for (int k = 0; k < F::GROUP; ++k) codes[(k / 4 * PANEL + lane) * 4 + k % 4] = uint8_t(piece.q[k]);
            }
        }
    }
}

// Rows [rows][cols] of a GGUF type; row i of the matrix is row order[i] of the data, or row i. Null for types that are not known.
inline Matrix* pack(Crew& crew, int type, const uint8_t* data, int rows, int cols, const int32_t* order) {
    Layout layout;
    if (!layout_of(type, layout)) return nullptr;
    return with_format(layout, [&](auto format) -> Matrix* {
        using F = decltype(format);
        if (cols % F::GROUP != 0) return nullptr;
        auto matrix = std::make_unique<Matrix>(Matrix{layout, rows, cols, int64_t(cols) / F::GROUP * F::BYTES});
        const int64_t bytes = (matrix->panel_bytes * matrix->num_panels() + 63) / 64 * 64;
        matrix->data.reset(static_cast<uint8_t*>(std::aligned_alloc(64, size_t(bytes))));
        if (matrix->data == nullptr) return nullptr;
        crew.phase(matrix->num_panels(), [&](int panel) {
            std::memset(matrix->panel(panel), 0, size_t(matrix->panel_bytes));
            for (int lane = 0; lane < PANEL && panel * PANEL + lane < rows; ++lane) {
                const int row = panel * PANEL + lane, source = order == nullptr ? row : order[row];
                pack_row<F>(type, data + source * row_bytes(type, cols), cols, matrix->panel(panel), lane);
            }
        });
        return matrix.release();
    });
}
