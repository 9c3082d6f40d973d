// The low-bit base of an FFN: every neuron's activation estimated, and stand-ins for those that do not run.
// Layout of tiles: runtime/bundle/src/tiles.rs.
#include "common.cuh"

#define TILE 64
#define QUADS 16
// Threads that share an output, each with every SPLITS-th tile.
#define SPLITS 4

struct Codebook {
    signed char values[16];
    u32 bits;
};

__device__ __forceinline__ u32 tile_bytes(u32 bits) { return TILE * TILE / 8 * bits + 2 * TILE; }

// The codes of an output and four inputs, a byte each: of quad q of a tile, whose codes are words.
__device__ __forceinline__ u32 codes(const u32* tile, u32 bits, u32 output, u32 q) {
    // Eight vectors of 16 words are packed into `bits` such vectors.
    const u32* packed = tile + q / 2 * bits * 16 + output % 16;
    const u32 k = q % 2 * 4 + output / 16;
    if (bits != 3) {
        const u32 per = 8 / bits;
        return packed[16 * (k / per)] >> (bits * (k % per)) & ((1 << bits) - 1) * 0x01010101u;
    }
    if (k < 6) return packed[16 * (k / 2)] >> (3 * (k % 2)) & 0x07070707u;
    return (packed[16 * (k - 6)] >> 6 & 0x03030303u) | (packed[32] >> (k - 2) & 0x04040404u);
}

// The product of an output's codes in a tile with 64 inputs.
__device__ __forceinline__ float tile_dot(const u8* tile, const float* values, u32 bits, u32 output, const float* x) {
    float sum = 0.0f;
    for (u32 q = 0; q < QUADS; q++) {
        const u32 four = codes((const u32*)tile, bits, output, q);
        for (u32 j = 0; j < 4; j++) sum = fmaf(values[four >> (8 * j) & 15], x[4 * q + j], sum);
    }
    return sum;
}

__device__ __forceinline__ float scale(const u8* tile, u32 bits, u32 index) {
    return half_bits(*(const u16*)(tile + TILE * TILE / 8 * bits + 2 * index));
}

// An output's product with all inputs; to be added over SPLITS threads.
__device__ __forceinline__ float row_dot(const u8* row, u32 tiles, const float* values, u32 bits, const float* h) {
    const u32 output = threadIdx.x % TILE;
    float sum = 0.0f;
    for (u32 t = threadIdx.x / TILE; t < tiles; t += SPLITS) {
        const u8* tile = row + (u64)t * tile_bytes(bits);
        sum = fmaf(tile_dot(tile, values, bits, output, h + t * TILE), scale(tile, bits, output), sum);
    }
    return sum;
}

__device__ __forceinline__ void read_values(float* values, const Codebook& book) {
    if (threadIdx.x < 16) values[threadIdx.x] = book.values[threadIdx.x] / 127.0f;
}

// Estimates and scores; see ComputeBackend::estimate. A block of SPLITS * TILE threads has a row of tiles of gate and up.
// Shared memory: h.
extern "C" __global__ void estimate(const u8* gates, const u8* ups, u32 neurons, u32 hidden, Codebook gate, Codebook up,
                                    const float* input, const float* down_error, const float* gate_error,
                                    const float* up_error, float* estimates, float* scores) {
    extern __shared__ float h[];
    __shared__ float values[2][16];
    __shared__ float parts[2][SPLITS][TILE];
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) h[i] = input[i];
    read_values(values[0], gate);
    read_values(values[1], up);
    __syncthreads();
    const u32 tiles = hidden / TILE, output = threadIdx.x % TILE, split = threadIdx.x / TILE;
    const u64 row = (u64)blockIdx.x * tiles;
    parts[0][split][output] = row_dot(gates + row * tile_bytes(gate.bits), tiles, values[0], gate.bits, h);
    parts[1][split][output] = row_dot(ups + row * tile_bytes(up.bits), tiles, values[1], up.bits, h);
    __syncthreads();
    const u32 n = blockIdx.x * TILE + output;
    if (split != 0 || n >= neurons) return;
    float g = 0.0f, u = 0.0f;
    for (u32 i = 0; i < SPLITS; i++) {
        g += parts[0][i][output];
        u += parts[1][i][output];
    }
    const float sigmoid = 1.0f / (1.0f + expf(-g)), act = g * sigmoid, slope = sigmoid + act * (1.0f - sigmoid);
    const float a = act * u * down_error[n], b = slope * u * gate_error[n], c = act * up_error[n];
    estimates[n] = act * u;
    scores[n] = sqrtf(a * a + b * b + c * c);
}

// Adds (offset + slope * estimate) * down to the outputs' sums, for neurons that are not chosen. A block of
// SPLITS * TILE threads has the row of tiles of outputs 64 (first + block) and following.
extern "C" __global__ void stand_in(const u8* downs, u32 first, u32 neurons, Codebook down, const float* offset,
                                    const float* slope, const float* estimates, const u64* chosen, float* sums) {
    __shared__ float values[16];
    __shared__ float x[SPLITS][TILE];
    __shared__ float parts[SPLITS][TILE];
    read_values(values, down);
    const u32 output = threadIdx.x % TILE, split = threadIdx.x / TILE;
    const u32 tiles = (neurons + TILE - 1) / TILE;
    const u8* row = downs + (u64)blockIdx.x * tiles * tile_bytes(down.bits);
    float sum = 0.0f;
    // All threads go round equally often: they wait for each other.
    for (u32 t = split; t - split < tiles; t += SPLITS) {
        const u8* tile = row + (u64)t * tile_bytes(down.bits);
        const u32 n = t * TILE + output;
        const bool runs = n >= neurons || chosen[n / 64] >> (n % 64) & 1;
        __syncthreads();
        x[split][output] = runs ? 0.0f : fmaf(slope[n], estimates[n], offset[n]) * scale(tile, down.bits, output);
        __syncthreads();
        if (t < tiles) sum += tile_dot(tile, values, down.bits, output, x[split]);
    }
    parts[split][output] = sum;
    __syncthreads();
    if (split != 0) return;
    for (u32 i = 1; i < SPLITS; i++) sum += parts[i][output];
    sums[(u64)(first + blockIdx.x) * TILE + output] = sum;
}
