// The low-bit base of an FFN: every neuron's activation estimated, and stand-ins for those that do not run.
// Layout of rows: runtime/bundle/src/low_bit.rs.
#include "common.cuh"

#define LOW_GROUP 64
#define STAND_LANES 64

struct Codebook {
    signed char values[16];
    u32 bits;
};

// Code of weight j of a group.
__device__ __forceinline__ u32 code(const u8* group, u32 bits, u32 j) {
    const u32 pair = group[j % 16 + 0] >> (2 * (j / 16)) & 3;
    if (bits == 2) return pair;
    if (bits == 3) return pair | (group[16 + j / 8] >> (j % 8) & 1) << 2;
    if (bits == 1) return group[j / 8] >> (j % 8) & 1;
    return group[j % 32] >> (4 * (j / 32)) & 15;
}

__device__ __forceinline__ float weight(const u8* row, u32 groups, const float* values, u32 bits, u32 column) {
    const u32 g = column / LOW_GROUP;
    const float scale = half_bits(*(const u16*)(row + groups * 8 * bits + 2 * g));
    return scale * values[code(row + g * 8 * bits, bits, column % LOW_GROUP)];
}

__device__ __forceinline__ float low_dot(const u8* row, u32 hidden, const float* values, u32 bits, const float* h) {
    const u32 lane = threadIdx.x % WARP, groups = hidden / LOW_GROUP;
    float sum = 0.0f;
    for (u32 c = lane; c < hidden; c += WARP) sum = fmaf(weight(row, groups, values, bits, c), h[c], sum);
    return warp_sum(sum);
}

// Estimates and scores; see ComputeBackend::estimate. A warp has a neuron; 256 threads. Shared memory: h.
extern "C" __global__ void estimate(const u8* records, u32 record_bytes, u32 neurons, u32 hidden, Codebook gate,
                                    Codebook up, const float* input, const float* down_error, const float* gate_error,
                                    const float* up_error, float* estimates, float* scores) {
    extern __shared__ float h[];
    __shared__ float values[2][16];
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) h[i] = input[i];
    if (threadIdx.x < 32) {
        const Codebook& book = threadIdx.x < 16 ? gate : up;
        values[threadIdx.x / 16][threadIdx.x % 16] = book.values[threadIdx.x % 16] / 127.0f;
    }
    __syncthreads();
    const u32 n = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (n >= neurons) return;
    const u8* record = records + (u64)n * record_bytes;
    const float g = low_dot(record, hidden, values[0], gate.bits, h);
    const float u = low_dot(record + hidden / LOW_GROUP * (8 * gate.bits + 2), hidden, values[1], up.bits, h);
    if (threadIdx.x % WARP != 0) return;
    const float sigmoid = 1.0f / (1.0f + expf(-g)), act = g * sigmoid, slope = sigmoid + act * (1.0f - sigmoid);
    const float a = act * u * down_error[n], b = slope * u * gate_error[n], c = act * up_error[n];
    estimates[n] = act * u;
    scores[n] = sqrtf(a * a + b * b + c * c);
}

// Adds (offset + slope * estimate) * down to lanes, for neurons that are not chosen: neuron first + n to lane
// (first + n) / 4 % STAND_LANES, ascending. Grid: columns / 256 x STAND_LANES.
extern "C" __global__ void stand_in(const u8* records, u32 record_bytes, u32 down_at, u32 first, u32 neurons, u32 hidden,
                                    Codebook down, const float* offset, const float* slope, const float* estimates,
                                    const u64* chosen, float* lanes) {
    __shared__ float values[16];
    if (threadIdx.x < 16) values[threadIdx.x] = down.values[threadIdx.x] / 127.0f;
    __syncthreads();
    const u32 c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= hidden) return;
    float sum = lanes[(u64)blockIdx.y * hidden + c];
    const u32 step = 4 * STAND_LANES;
    for (u32 four = first / step * step + 4 * blockIdx.y; four < first + neurons; four += step)
        for (u32 i = four; i < four + 4; i++) {
            if (i < first || i >= first + neurons || chosen[i / 64] >> (i % 64) & 1) continue;
            const float factor = fmaf(slope[i], estimates[i], offset[i]);
            const u8* row = records + (u64)(i - first) * record_bytes + down_at;
            sum = fmaf(factor, weight(row, hidden / LOW_GROUP, values, down.bits, c), sum);
        }
    lanes[(u64)blockIdx.y * hidden + c] = sum;
}
