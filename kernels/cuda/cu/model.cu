// Everything of a layer but its sparse FFN: embedding, norms, projections, attention, the FFN of many tokens, the head,
// and the low-bit base.
//
// Every output is summed in one order that depends neither on how weights are cut into calls nor on the other tokens of
// the pass: a dot product belongs to one warp (one token) or goes over its columns ascending (many tokens).
#include "common.cuh"

// Rows of a matrix, or one of the three rows of neurons: row r lies at base + r / block * block_stride +
// r % block * stride.
struct Rows {
    const u8* base;
    u32 block, stride;
    u64 block_stride;
    u32 count, cols;
    __device__ const u8* row(u32 r) const { return base + r / block * block_stride + r % block * stride; }
};

// x[token] = row `token` of `rows`, bytes as in the embedding table. Grid: tokens.
template <int DT>
__device__ void embed(const u8* rows, u32 stride, u32 hidden, float* x) {
    const u8* row = rows + (u64)blockIdx.x * stride;
    for (u32 o = threadIdx.x; o < hidden / 8; o += blockDim.x) {
        float w[8];
        load_weights<DT>(row, hidden, o, w);
        for (int j = 0; j < 8; j++) x[(u64)blockIdx.x * hidden + column<DT>(o, j)] = w[j];
    }
}

// The sum over a thread block of 256, the same bits in every thread.
__device__ float block_sum(float v) {
    __shared__ float sums[8];
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = v;
    __syncthreads();
    v = 0.0f;
    for (int i = 0; i < 8; i++) v += sums[i];
    return v;
}

// h[token] = x[token] / sqrt(mean(x^2) + epsilon) * gain. Grid: tokens; 256 threads.
extern "C" __global__ void rms_norm(const float* x, const float* gain, float* h, u32 hidden, float epsilon) {
    x += (u64)blockIdx.x * hidden;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) sum = fmaf(x[i], x[i], sum);
    const float scale = 1.0f / sqrtf(block_sum(sum) / hidden + epsilon);
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) h[(u64)blockIdx.x * hidden + i] = x[i] * scale * gain[i];
}

// y[r] = row r . v, or added to. A warp has two rows; 256 threads. Shared memory: v.
template <int DT>
__device__ void matvec(const Rows& rows, const float* v, float* y, u32 add) {
    extern __shared__ float4 held[];
    float* h = (float*)held;
    // In the order in which octets want them.
    for (u32 i = threadIdx.x; i < rows.cols; i += blockDim.x) h[i] = v[column<DT>(i / 8, i % 8)];
    __syncthreads();
    const u32 lane = threadIdx.x % WARP;
    const u32 first = (blockIdx.x * blockDim.x + threadIdx.x) / WARP * 2;
    if (first >= rows.count) return;
    const u8* a = rows.row(first);
    const u8* b = rows.row(min(first + 1, rows.count - 1));
    float s = 0.0f, t = 0.0f;
#pragma unroll 4
    for (u32 o = lane; o < rows.cols / 8; o += WARP) {
        float w[8], u[8];
        load_weights<DT>(a, rows.cols, o, w);
        load_weights<DT>(b, rows.cols, o, u);
        const float4 low = held[2 * o], high = held[2 * o + 1];
        const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; j++) s = fmaf(w[j], x[j], s), t = fmaf(u[j], x[j], t);
    }
    s = warp_sum(s);
    t = warp_sum(t);
    if (lane == 0) {
        y[first] = add ? y[first] + s : s;
        if (first + 1 < rows.count) y[first + 1] = add ? y[first + 1] + t : t;
    }
}

#define TILE 64  // tokens and rows of a tile
#define DEPTH 32

// Columns `k .. k + DEPTH` of TILE rows as f32, column-major; zeros outside.
template <int DT>
__device__ void unpack_rows(const Rows& rows, u32 first, u32 k, float (*to)[TILE + 4]) {
    const u32 r = threadIdx.x / 4, o = k / 8 + threadIdx.x % 4;
    float w[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (first + r < rows.count && o * 8 < rows.cols) load_weights<DT>(rows.row(first + r), rows.cols, o, w);
#pragma unroll
    for (int j = 0; j < 8; j++) to[column<DT>(o, j) - k][r] = w[j];
}

// y[token][r] = row r . v[token] for all tokens: store, add, or (with `up`) SiLU(row . v) * (up row . v).
// Grid: tiles of rows x tiles of tokens; 256 threads, each 4 tokens x 4 rows.
template <int DT, bool SWIGLU>
__device__ void multiply(const Rows& rows, const u8* up, const float* v, u32 tokens, float* y, u32 y_stride, u32 add) {
    __shared__ float a[DEPTH][TILE + 4], b[DEPTH][TILE + 4], c[SWIGLU ? DEPTH : 1][TILE + 4];
    const u32 first = blockIdx.x * TILE, token = blockIdx.y * TILE;
    const u32 x = threadIdx.x % 16 * 4, t = threadIdx.x / 16 * 4;
    Rows ups = rows;
    ups.base = up;
    float sum[4][4] = {}, second[4][4] = {};
    for (u32 k = 0; k < rows.cols; k += DEPTH) {
        unpack_rows<DT>(rows, first, k, b);
        if (SWIGLU) unpack_rows<DT>(ups, first, k, c);
        for (u32 i = threadIdx.x; i < TILE * DEPTH; i += 256) {
            const u32 row = token + i / DEPTH, col = k + i % DEPTH;
            a[i % DEPTH][i / DEPTH] = row < tokens && col < rows.cols ? v[(u64)row * rows.cols + col] : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int d = 0; d < DEPTH; d++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sum[i][j] = fmaf(a[d][t + i], b[d][x + j], sum[i][j]);
                    if (SWIGLU) second[i][j] = fmaf(a[d][t + i], c[d][x + j], second[i][j]);
                }
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            if (token + t + i >= tokens || first + x + j >= rows.count) continue;
            float& to = y[(u64)(token + t + i) * y_stride + first + x + j];
            const float product = SWIGLU ? silu(sum[i][j]) * second[i][j] : sum[i][j];
            to = add ? to + product : product;
        }
}

// x[token] += sum of activations[token][n] * row n, n ascending, one fused multiply-add after another.
// Grid: tiles of columns x tiles of tokens; 256 threads.
template <int DT>
__device__ void weigh_rows(const Rows& rows, const float* activations, u32 a_stride, u32 tokens, float* x_all) {
    __shared__ float a[DEPTH][TILE + 4], b[DEPTH][TILE];
    const u32 first = blockIdx.x * TILE, token = blockIdx.y * TILE;
    const u32 x = threadIdx.x % 16 * 4, t = threadIdx.x / 16 * 4;
    float sum[4][4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const bool inside = token + t + i < tokens && first + x + j < rows.cols;
            sum[i][j] = inside ? x_all[(u64)(token + t + i) * rows.cols + first + x + j] : 0.0f;
        }
    for (u32 n = 0; n < rows.count; n += DEPTH) {
        const u32 depth = min(DEPTH, rows.count - n);
        {
            const u32 d = threadIdx.x / 8, o = first / 8 + threadIdx.x % 8;
            if (d < depth && o * 8 < rows.cols) {
                float w[8];
                load_weights<DT>(rows.row(n + d), rows.cols, o, w);
                for (int j = 0; j < 8; j++) b[d][column<DT>(o, j) - first] = w[j];
            }
        }
        for (u32 i = threadIdx.x; i < TILE * DEPTH; i += 256) {
            const u32 row = token + i / DEPTH, col = i % DEPTH;
            a[col][i / DEPTH] = row < tokens && col < depth ? activations[(u64)row * a_stride + n + col] : 0.0f;
        }
        __syncthreads();
        for (int d = 0; d < depth; d++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] = fmaf(a[d][t + i], b[d][x + j], sum[i][j]);
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (token + t + i < tokens && first + x + j < rows.cols)
                x_all[(u64)(token + t + i) * rows.cols + first + x + j] = sum[i][j];
}

// out[n] = |SiLU(gate . h) * (up . h)| * ||down|| of neurons whose gates are `rows`. A warp has a neuron; 256 threads.
template <int DT>
__device__ void importance(const Rows& rows, const float* h, float* out) {
    const u32 n = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (n >= rows.count) return;
    const u32 bytes = row_bytes<DT>(rows.cols);
    const u8* row = rows.row(n);
    float gate = 0.0f, up = 0.0f, down = 0.0f;
    for (u32 o = lane; o < rows.cols / 8; o += WARP) {
        float g[8], u[8], d[8];
        load_weights<DT>(row, rows.cols, o, g);
        load_weights<DT>(row + bytes, rows.cols, o, u);
        load_weights<DT>(row + 2 * bytes, rows.cols, o, d);
        for (int j = 0; j < 8; j++) {
            const float x = h[column<DT>(o, j)];
            gate = fmaf(g[j], x, gate), up = fmaf(u[j], x, up), down = fmaf(d[j], d[j], down);
        }
    }
    gate = warp_sum(gate), up = warp_sum(up), down = warp_sum(down);
    if (lane == 0) out[n] = fabsf(silu(gate) * up) * sqrtf(down);
}

#define OF_DTYPE(DT, NAME)                                                                                             \
    extern "C" __global__ void embed_##NAME(const u8* rows, u32 stride, u32 hidden, float* x) {                       \
        embed<DT>(rows, stride, hidden, x);                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) matvec_##NAME(Rows rows, const float* v, float* y, u32 add) {   \
        matvec<DT>(rows, v, y, add);                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        multiply_##NAME(Rows rows, const float* v, u32 tokens, float* y, u32 y_stride, u32 add) {                     \
        multiply<DT, false>(rows, nullptr, v, tokens, y, y_stride, add);                                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        swiglu_##NAME(Rows gates, const u8* ups, const float* v, u32 tokens, float* y, u32 y_stride) {                \
        multiply<DT, true>(gates, ups, v, tokens, y, y_stride, 0);                                                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        weigh_##NAME(Rows downs, const float* activations, u32 stride, u32 tokens, float* x) {                        \
        weigh_rows<DT>(downs, activations, stride, tokens, x);                                                         \
    }                                                                                                                  \
    extern "C" __global__ void importance_##NAME(Rows gates, const float* h, float* out) {                            \
        importance<DT>(gates, h, out);                                                                                 \
    }
OF_DTYPE(F16, f16)
OF_DTYPE(Q8_0, q8_0)
OF_DTYPE(Q4_0, q4_0)

// The sum of column i over lanes, by eight warps of a block of 256 that has 32 columns; in the first warp.
__device__ float lane_sum(const float* lanes, u32 count, u32 hidden, u32 i, float (*parts)[WARP]) {
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 l = warp; l < count; l += 8) sum += i < hidden ? lanes[(u64)l * hidden + i] : 0.0f;
    __syncthreads();
    parts[warp][lane] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < 8; w++) sum += parts[w][lane];
    return sum;
}

// to = x + the lanes of a sum; then, if there are any, stand-ins and their constant. 256 threads.
extern "C" __global__ void add_lanes(float* to, const float* x, const float* lanes, u32 count, const float* stand_ins,
                                     const float* constant, u32 hidden) {
    __shared__ float parts[8][WARP];
    const u32 i = blockIdx.x * WARP + threadIdx.x % WARP;
    const float sum = lane_sum(lanes, count, hidden, i, parts);
    if (threadIdx.x >= WARP || i >= hidden) return;
    float result = x[i] + sum;
    if (constant) result += constant[i] + stand_ins[i];
    to[i] = result;
}

// Log-likelihoods: `logits` are `rows` of the head for each scored token, `sums` its largest logit so far and the sum of
// exponentials relative to it, over chunks of 64 rows ascending. Grid: tokens; 64 threads.
extern "C" __global__ void score(const float* logits, u32 stride, u32 rows, u32 first_row, const u32* targets,
                                 double2* sums, float* target_logits, u32 start, u32 finish, float* nll) {
    __shared__ float both[2];
    const u32 token = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float* mine = logits + (u64)token * stride;
    double2 total = start ? make_double2(-1e300, 0.0) : sums[token];
    for (u32 chunk = 0; chunk < rows; chunk += 64) {
        const u32 r = chunk + threadIdx.x;
        const float logit = r < rows ? mine[r] : -3e38f;
        if (r < rows && first_row + r == targets[token]) target_logits[token] = logit;
        const float half_max = warp_max(logit);
        if (lane == 0) both[warp] = half_max;
        __syncthreads();
        const float max = fmaxf(both[0], both[1]);
        __syncthreads();
        const float half_sum = warp_sum(r < rows ? expf(logit - max) : 0.0f);
        if (lane == 0) both[warp] = half_sum;
        __syncthreads();
        const double sum = (double)both[0] + (double)both[1];
        __syncthreads();
        // Two sums of exponentials, each s * e^m.
        if (total.x >= (double)max)
            total.y += sum * exp((double)max - total.x);
        else
            total = make_double2(max, sum + total.y * exp(total.x - (double)max));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        sums[token] = total;
        if (finish) nll[token] = (float)(total.x + log(total.y) - (double)target_logits[token]);
    }
}
