// Rotary positions, the KV cache and attention.
//
// The cache holds rows of head_dim numbers, f16 or q8_0: layer x (keys, values) x kv_heads x context. Attention goes over
// blocks of KEYS positions at fixed multiples, with a running maximum and sum for each query, so that a token's result does
// not depend on the other tokens of its pass. One token spreads over thread blocks, CHUNK positions each, that are merged
// in order.
#include "common.cuh"

#define KEYS 32
#define CHUNK 64

struct Cache {
    u8* data;
    u32 kv_heads, context, row_bytes, quantised;
    __device__ u8* row(u32 layer, u32 value, u32 head, u32 position) const {
        return data + ((u64)((2 * layer + value) * kv_heads + head) * context + position) * row_bytes;
    }
};

// Norm (if there is a gain) and rotation of one head by one warp. `turns`: cosines, then sines.
__device__ void finish_head(float* head, const float* bias, const float* gain, float epsilon, const float* turns,
                            u32 head_dim, float scale) {
    const u32 lane = threadIdx.x % WARP, half = head_dim / 2;
    float inverse = 1.0f;
    if (bias)
        for (u32 i = lane; i < head_dim; i += WARP) head[i] += bias[i];
    __syncwarp();
    if (gain) {
        float sum = 0.0f;
        for (u32 i = lane; i < head_dim; i += WARP) sum = fmaf(head[i], head[i], sum);
        inverse = 1.0f / sqrtf(warp_sum(sum) / head_dim + epsilon);
    }
    for (u32 i = lane; i < half; i += WARP) {
        float a = head[i], b = head[i + half];
        if (gain) a = a * inverse * gain[i], b = b * inverse * gain[i + half];
        const float cos = turns[i], sin = turns[half + i];
        head[i] = (a * cos - b * sin) * scale;
        head[i + half] = (b * cos + a * sin) * scale;
    }
    __syncwarp();
}

// A row of the cache by one warp; q8_0 as weights: scale = largest / 127.
__device__ void store_row(const Cache& cache, u8* to, const float* from, u32 head_dim) {
    const u32 lane = threadIdx.x % WARP;
    for (u32 i = lane; i < head_dim; i += WARP) {
        if (!cache.quantised) {
            ((u16*)to)[i] = to_half(from[i]);
            continue;
        }
        const float scale = warp_max(fabsf(from[i])) / 127.0f;
        const u16 bits = to_half(scale);
        const float stored = half_bits(bits);
        const float q = stored > 0.0f ? rintf(from[i] / stored) : 0.0f;
        ((signed char*)to)[i] = (signed char)fminf(fmaxf(q, -127.0f), 127.0f);
        if (lane == 0) *(u16*)(to + head_dim + i / GROUP * 2) = bits;
    }
}

__device__ __forceinline__ float cached(const Cache& cache, const u8* row, u32 head_dim, u32 i) {
    if (!cache.quantised) return half_bits(((const u16*)row)[i]);
    return half_bits(*(const u16*)(row + head_dim + i / GROUP * 2)) * (float)((const signed char*)row)[i];
}

// Biases, head norms and rotation of q and k; k and v go to the cache. q is divided by sqrt(head_dim).
// Grid: tokens; each warp some heads.
extern "C" __global__ void rotate(float* q, float* k, float* v, const float* q_bias, const float* k_bias,
                                  const float* v_bias, const float* q_norm, const float* k_norm, float epsilon,
                                  const float* turns, u32 heads, u32 head_dim, Cache cache, u32 layer,
                                  u32 first_position) {
    const u32 token = blockIdx.x, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    turns += (u64)token * head_dim;
    const float scale = 1.0f / sqrtf((float)head_dim);
    for (u32 i = warp; i < heads + 2 * cache.kv_heads; i += warps) {
        if (i < heads) {
            float* head = q + ((u64)token * heads + i) * head_dim;
            finish_head(head, q_bias ? q_bias + i * head_dim : nullptr, q_norm, epsilon, turns, head_dim, scale);
            continue;
        }
        const bool value = i >= heads + cache.kv_heads;
        const u32 h = (i - heads) % cache.kv_heads;
        float* head = (value ? v : k) + ((u64)token * cache.kv_heads + h) * head_dim;
        if (value) {
            for (u32 j = lane; v_bias && j < head_dim; j += WARP) head[j] += v_bias[h * head_dim + j];
            __syncwarp();
        } else {
            finish_head(head, k_bias ? k_bias + h * head_dim : nullptr, k_norm, epsilon, turns, head_dim, 1.0f);
        }
        store_row(cache, cache.row(layer, value, h, first_position + token), head, head_dim);
    }
}

// Attention of one token's query heads that share a key head. Grid: tokens x kv_heads x chunks; 128 threads. With one
// chunk the result replaces the queries, else partials get (maximum, sum) of each head and then its weighted values.
// Shared memory: (2 group + KEYS) x head_dim + group x (KEYS + 2) floats, rows padded by one.
extern "C" __global__ void __launch_bounds__(128)
    attend(float* q, float* partials, u32 heads, u32 head_dim, Cache cache, u32 layer, u32 first_position, u32 window) {
    extern __shared__ float held[];
    const u32 token = blockIdx.x, kv_head = blockIdx.y, group = heads / cache.kv_heads;
    const u32 position = first_position + token, wide = head_dim + 1;
    const u32 first_seen = position + 1 > window ? position + 1 - window : 0;
    u32 first = first_seen / KEYS * KEYS, end = position + 1;
    if (gridDim.z > 1) {
        first = (first_seen / CHUNK + blockIdx.z) * CHUNK;
        end = min(first + CHUNK, end);
    }
    float* queries = held;
    float* sums = queries + group * wide;
    float* rows = sums + group * wide;
    float* scores = rows + KEYS * wide;
    float* maxima = scores + group * KEYS;
    float* totals = maxima + group;
    float* mine = q + ((u64)token * heads + kv_head * group) * head_dim;
    for (u32 i = threadIdx.x; i < group * head_dim; i += blockDim.x) {
        queries[i / head_dim * wide + i % head_dim] = mine[i];
        sums[i / head_dim * wide + i % head_dim] = 0.0f;
    }
    for (u32 g = threadIdx.x; g < group; g += blockDim.x) maxima[g] = -3e38f, totals[g] = 0.0f;
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    for (u32 block = first; block < end; block += KEYS) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < KEYS * head_dim; i += blockDim.x) {
            const u32 key = i / head_dim, at = block + key;
            rows[key * wide + i % head_dim] =
                at < end ? cached(cache, cache.row(layer, 0, kv_head, at), head_dim, i % head_dim) : 0.0f;
        }
        __syncthreads();
        // A warp has a head, a lane a key.
        for (u32 g = warp; g < group; g += warps) {
            float score = 0.0f;
            for (u32 i = 0; i < head_dim; i++) score = fmaf(queries[g * wide + i], rows[lane * wide + i], score);
            const bool seen = block + lane >= first_seen && block + lane < end;
            if (!seen) score = -3e38f;
            const float before = maxima[g], max = fmaxf(before, warp_max(score));
            const float share = seen ? expf(score - max) : 0.0f;
            const float total = warp_sum(share), shrink = expf(before - max);
            scores[g * KEYS + lane] = share;
            __syncwarp();
            if (lane == 0) totals[g] = totals[g] * shrink + total, maxima[g] = max;
            for (u32 i = lane; i < head_dim; i += WARP) sums[g * wide + i] *= shrink;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < KEYS * head_dim; i += blockDim.x) {
            const u32 key = i / head_dim, at = block + key;
            rows[key * wide + i % head_dim] =
                at < end ? cached(cache, cache.row(layer, 1, kv_head, at), head_dim, i % head_dim) : 0.0f;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < group * head_dim; i += blockDim.x) {
            const u32 g = i / head_dim, c = i % head_dim;
            float sum = sums[g * wide + c];
            for (u32 key = 0; key < KEYS; key++) sum = fmaf(scores[g * KEYS + key], rows[key * wide + c], sum);
            sums[g * wide + c] = sum;
        }
    }
    __syncthreads();
    float* partial = partials + ((u64)kv_head * gridDim.z + blockIdx.z) * group * (head_dim + 2);
    for (u32 i = threadIdx.x; i < group * head_dim; i += blockDim.x) {
        const u32 g = i / head_dim, c = i % head_dim;
        if (gridDim.z == 1)
            mine[i] = sums[g * wide + c] / totals[g];
        else
            partial[2 * group + i] = sums[g * wide + c];
    }
    if (gridDim.z > 1)
        for (u32 g = threadIdx.x; g < group; g += blockDim.x) partial[2 * g] = maxima[g], partial[2 * g + 1] = totals[g];
}

// Merges the chunks of one token, the first first. Grid: heads; a thread a column.
extern "C" __global__ void merge(float* q, const float* partials, u32 chunks, u32 group, u32 head_dim) {
    const u32 head = blockIdx.x, g = head % group;
    const float* first = partials + (u64)(head / group) * chunks * group * (head_dim + 2);
    const u64 step = group * (head_dim + 2);
    float max = -3e38f;
    for (u32 c = 0; c < chunks; c++) max = fmaxf(max, first[c * step + 2 * g]);
    for (u32 i = threadIdx.x; i < head_dim; i += blockDim.x) {
        float sum = 0.0f, total = 0.0f;
        for (u32 c = 0; c < chunks; c++) {
            const float share = expf(first[c * step + 2 * g] - max);
            total += share * first[c * step + 2 * g + 1];
            sum += share * first[c * step + 2 * group + g * head_dim + i];
        }
        q[(u64)head * head_dim + i] = sum / total;
    }
}
