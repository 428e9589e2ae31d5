// Products of shapes whose blocks, tiles and panels end anywhere, with nothing but the memory that the interface asks for.
// Exit code 77: this processor may not run what it was compiled for.
#include "../../../kernels/src/native.cpp"

#include <cstdio>

int main() {
    if (!disagg_may_run()) return 77;
    const struct { int type, group, bytes; } stored[] = {{3, 32, 20}, {8, 32, 34}, {14, 256, 210}};  // Q4_1, Q8_0, Q6_K
    Crew crew(1);
    for (const auto& [type, group, bytes] : stored)
        for (int cols : {512, 768, 1536, 2048, 2560, 4864})
            for (int num_rows : {1, 7, 24, 100, 113, 250, 399}) {
                const int rows = 40;
                const std::vector<uint8_t> data(size_t(rows) * cols / group * bytes, 7);
                Matrix* weights = disagg_matrix_new(&crew, type, data.data(), rows, cols, nullptr);
                if (weights == nullptr) return 1;
                const std::vector<float> x(size_t(num_rows) * cols, 0.5f);
                std::vector<float> y(size_t(num_rows) * rows), alone(rows);
                for (int in_bytes : {0, 1}) {
                    disagg_product(&crew, weights, nullptr, nullptr, x.data(), num_rows, y.data(), 0, in_bytes);
                    disagg_product(&crew, weights, nullptr, nullptr, x.data(), 1, alone.data(), 0, in_bytes);
                    for (size_t i = 0; i < y.size(); ++i)
                        if (y[i] != alone[i % rows]) return std::printf("type %d, %d × %d\n", type, num_rows, cols), 1;
                }
                disagg_matrix_free(weights);
            }
    return 0;
}
