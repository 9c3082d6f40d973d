// What all kernels share: number formats of weights, sums in a fixed order, flags.
//
// Weights are read eight of a row at a time ("octets"), f32 in registers. Octet i of a row are columns 8 i .. 8 i + 8;
// in q4_0, whose bytes hold two numbers, they are four columns and the four sixteen behind them, the same bytes.
// No header of the toolkit is needed: NVRTC alone compiles this.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum DType { F16 = 0, Q8_0 = 1, Q4_0 = 2 };

#define GROUP 32
#define WARP 32
#define FULL 0xffffffffu

__device__ __forceinline__ float half_bits(u32 bits) {
    float value;
    asm("{ .reg .f16 h; .reg .b16 b; cvt.u16.u32 b, %1; mov.b16 h, b; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
    return value;
}

__device__ __forceinline__ u16 to_half(float value) {
    u16 bits;
    asm("{ .reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ void halves(u32 pair, float& low, float& high) {
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high)
        : "r"(pair));
}

// Bytes of a row of `cols` weights.
template <int DT>
__device__ __forceinline__ u32 row_bytes(u32 cols) {
    return DT == F16 ? 2 * cols : (DT == Q8_0 ? cols : cols / 2) + cols / GROUP * 2;
}

// Column of number j of an octet.
template <int DT>
__device__ __forceinline__ u32 column(u32 octet, u32 j) {
    if (DT != Q4_0) return octet * 8 + j;
    return octet / 4 * GROUP + octet % 4 * 4 + (j < 4 ? j : j + 12);
}

// Four bytes at an even address.
__device__ __forceinline__ u32 word_at(const u8* p, bool aligned) {
    if (aligned) return *(const u32*)p;
    return (u32)((const u16*)p)[0] | (u32)((const u16*)p)[1] << 16;
}

// An octet as it is stored, before it is unpacked: loads can be in flight for many before the first is used.
struct Octet {
    uint4 bits;
};

// `row` is aligned to 16 (f16), or 4 if cols % 64 == 0, else 2 (quantised).
template <int DT>
__device__ __forceinline__ Octet load_octet(const u8* row, u32 cols, u32 octet) {
    Octet o;
    if (DT == F16) {
        o.bits = *(const uint4*)(row + octet * 16);
    } else if (DT == Q8_0) {
        const bool aligned = cols % 64 == 0;
        o.bits.x = word_at(row + octet * 8, aligned);
        o.bits.y = word_at(row + octet * 8 + 4, aligned);
        o.bits.z = *(const u16*)(row + cols + octet / 4 * 2);
    } else {
        o.bits.x = word_at(row + octet * 4, cols % 64 == 0);
        o.bits.z = *(const u16*)(row + cols / 2 + octet / 4 * 2);
    }
    return o;
}

template <int DT>
__device__ __forceinline__ void unpack(const Octet& o, float* w) {
    if (DT == F16) {
        halves(o.bits.x, w[0], w[1]);
        halves(o.bits.y, w[2], w[3]);
        halves(o.bits.z, w[4], w[5]);
        halves(o.bits.w, w[6], w[7]);
    } else if (DT == Q8_0) {
        const float scale = half_bits(o.bits.z);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const u32 word = j < 4 ? o.bits.x : o.bits.y;
            w[j] = scale * (float)(signed char)(word >> (8 * (j % 4)) & 0xff);
        }
    } else {
        const float scale = half_bits(o.bits.z);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 byte = o.bits.x >> (8 * j) & 0xff;
            w[j] = scale * ((float)(byte & 15) - 8.0f);
            w[j + 4] = scale * ((float)(byte >> 4) - 8.0f);
        }
    }
}

template <int DT>
__device__ __forceinline__ void load_weights(const u8* row, u32 cols, u32 octet, float* w) {
    unpack<DT>(load_octet<DT>(row, cols, octet), w);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// The same bits in every lane.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(FULL, v, d);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(FULL, v, d));
    return v;
}

// Flags. Acquire and release pair with those of the other side: the host's are AtomicU32 and AtomicU64.
__device__ __forceinline__ u64 acquire_sys(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 acquire_sys(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void release_sys(u32* p, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// What this thread wrote is seen before what it reads from now on; the host does the same.
__device__ __forceinline__ void fence_sys() { asm volatile("fence.sc.sys;" ::: "memory"); }
__device__ __forceinline__ u32 acquire_gpu(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u64 acquire_gpu(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void release_gpu(u64* p, u64 v) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void release_gpu(u32* p, u32 v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void add_release_gpu(u32* p, u32 v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
// Barrier among `threads` threads of a block.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
