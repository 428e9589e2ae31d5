// Shapes whose blocks, tiles and panels end anywhere, with nothing but the memory that the interface asks for.
// Exit code 77: this processor may not run what it was compiled for.
#include "../../../kernels/src/native.cpp"

#include <algorithm>
#include <cstdio>

// A product's rows are each what it is alone.
bool multiplies() {
    const struct { int type, group, bytes; } stored[] = {{3, 32, 20}, {8, 32, 34}, {14, 256, 210}};  // Q4_1, Q8_0, Q6_K
    Crew crew(1);
    for (const auto& [type, group, bytes] : stored)
        for (int cols : {512, 768, 1536, 2048, 2560, 4864})
            for (int num_rows : {1, 7, 24, 100, 113, 250, 399}) {
                const int rows = 40;
                const std::vector<uint8_t> data(size_t(rows) * cols / group * bytes, 7);
                Matrix* weights = disagg_matrix_new(&crew, type, data.data(), rows, cols, nullptr);
                if (weights == nullptr) return false;
                const std::vector<float> x(size_t(num_rows) * cols, 0.5f);
                std::vector<float> y(size_t(num_rows) * rows), alone(rows);
                for (int in_bytes : {0, 1}) {
                    disagg_product(&crew, weights, nullptr, nullptr, x.data(), num_rows, y.data(), 0, in_bytes);
                    disagg_product(&crew, weights, nullptr, nullptr, x.data(), 1, alone.data(), 0, in_bytes);
                    for (size_t i = 0; i < y.size(); ++i)
                        if (y[i] != alone[i % rows]) return std::printf("type %d, %d × %d\n", type, num_rows, cols), false;
                }
                disagg_matrix_free(weights);
            }
    return true;
}

// Where all keys are 0 every query gets the mean of its values, which are all 1.
template <class T, template <int, int> class Rows>
bool attends() {
    T one[LANES];
    store(one, all(1.0f));
    for (int dim : {20, 64, 80, 256})
        for (int group : {1, 3, 7, 96})
            for (int block_size : {7, 16, 48})
                for (int num_tokens : {1, 5, 33, 70, 530}) {
                    const int num_blocks = (num_tokens + block_size - 1) / block_size, num_heads = 2 * group;
                    std::vector<T> memory(size_t(num_blocks) * 2 * 2 * block_size * dim, T{});
                    const Pool pool{memory.data(), sizeof(T) == 2, 1, 2, block_size, dim};
                    std::vector<int32_t> blocks(num_blocks);
                    for (int block = 0; block < num_blocks; ++block) {
                        blocks[block] = num_blocks - 1 - block;
                        for (int head = 0; head < 2; ++head)
                            std::fill_n(pool.at<T>(block, 0, 1, head), block_size * dim, one[0]);
                    }
                    const std::vector<float> q(size_t(num_tokens) * num_heads * dim, 0.5f);
                    std::vector<float> out(q.size());
                    const int most = queries_of_unit(num_tokens, 2, group, 1);
                    for (int first = 0; first < num_tokens; first += most)
                        for (int head = 0; head < 2; ++head)
                            attend<T, Rows>(pool, 0, {blocks.data(), 0, num_tokens, 0, 1}, {0, first, std::min(most, num_tokens - first), head, -1, 0},
                                            group, q.data(), num_heads * dim, out.data(), num_heads * dim, nullptr);
                    for (float value : out)
                        if (std::abs(value - 1) > 1e-4f) return std::printf("head_dim %d, %d tokens: %f\n", dim, num_tokens, value), false;
                }
    return true;
}

int main() {
    if (!disagg_may_run()) return 77;
    return multiplies() && attends<float, FloatRows>() && attends<Float16, FloatRows>() && attends<Float16, SplitRows>() ? 0 : 1;
}
