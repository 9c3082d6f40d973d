// What all kernels share: number formats of weights, sums in a fixed order.
//
// Plain OpenCL C 1.2: no sub-groups, no cl_khr_fp16 (half precision is loaded and stored only), no doubles. Every work-group
// has SIZE work-items. Weights are read eight of a row at a time ("octets"), f32 in registers. Octet i of a row are columns
// 8 i .. 8 i + 8; in q4_0, whose bytes hold two numbers, they are four columns and the four sixteen behind them.
//
// Before it stand: #define SIZE, and #define DTYPE where a program has weights.

#define F16 0
#define Q8_0 1
#define Q4_0 2
#define GROUP 32

#define KERNEL __attribute__((reqd_work_group_size(SIZE, 1, 1))) kernel void

#ifdef FP_FAST_FMAF
#define FMA(a, b, c) fma(a, b, c)
#else
#define FMA(a, b, c) mad(a, b, c)
#endif

// Rows of a matrix, or one of the three rows of neurons: row r lies at base + r / block * block_stride + r % block * stride.
typedef struct {
    ulong base, block_stride;
    uint block, stride, count, cols;
} Rows;

ulong row_at(const Rows rows, uint r) {
    return rows.base + r / rows.block * rows.block_stride + r % rows.block * rows.stride;
}

float silu(float x) { return x / (1.0f + exp(-x)); }

float sum8(float8 v) {
    const float4 four = v.lo + v.hi;
    const float2 two = four.lo + four.hi;
    return two.x + two.y;
}

// The number of an f32 that half precision has.
ushort to_half(float value) {
    ushort bits;
    vstore_half_rte(value, 0, (half*)&bits);
    return bits;
}

float half_bits(ushort bits) { return vload_half(0, (const half*)&bits); }

#ifdef DTYPE

// Bytes of a row of `cols` weights.
uint row_bytes(uint cols) {
#if DTYPE == F16
    return 2 * cols;
#elif DTYPE == Q8_0
    return cols + cols / GROUP * 2;
#else
    return cols / 2 + cols / GROUP * 2;
#endif
}

// First column of an octet.
uint column(uint octet) {
#if DTYPE == Q4_0
    return octet / 4 * GROUP + octet % 4 * 4;
#else
    return octet * 8;
#endif
}

// How far the second four columns of an octet lie behind the first.
#if DTYPE == Q4_0
#define HALF_STEP 16
#else
#define HALF_STEP 4
#endif

// `row` is aligned to 2.
float8 load_weights(global const uchar* row, uint cols, uint octet) {
#if DTYPE == F16
    return vload_half8(octet, (global const half*)row);
#elif DTYPE == Q8_0
    const float scale = vload_half(octet / 4, (global const half*)(row + cols));
    return convert_float8(vload8(octet, (global const char*)row)) * scale;
#else
    const float scale = vload_half(octet / 4, (global const half*)(row + cols / 2));
    const uchar4 two = vload4(octet, row);
    return (convert_float8((uchar8)(two & (uchar)15, two >> (uchar)4)) - 8.0f) * scale;
#endif
}

// The numbers of an octet's columns.
float8 load_columns(global const float* v, uint octet) {
    const uint first = column(octet);
    return (float8)(vload4(0, v + first), vload4(0, v + first + HALF_STEP));
}

void store_columns(float8 values, global float* v, uint octet) {
    const uint first = column(octet);
    vstore4(values.lo, 0, v + first);
    vstore4(values.hi, 0, v + first + HALF_STEP);
}

#endif
