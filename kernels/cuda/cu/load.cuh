// Three ways for a block's neurons to reach the threads that compute, behind one small interface.
//
//   PLAIN  threads read device (or mapped host) memory themselves; all architectures, the only one before 8.0
//   ASYNC  a producer warp copies into a ring in shared memory with cp.async; 8.0 and later
//   BULK   the copy engine of the multiprocessor does, one cp.async.bulk a block of neurons; 9.0 and later
//
// The producer publishes slots of a ring: up to SLOT_ENTRIES blocks of neurons, or a mark. Consumers take them in order.
// A slot with blocks has one of a few buffers; marks have none, so that they cost no room for loads.
#pragma once
#include "common.cuh"

enum Loads { PLAIN = 0, ASYNC = 1, BULK = 2 };
enum Kind { DATA = 0, FLUSH = 1, END = 2 };

#define SLOT_ENTRIES 16
#define SLOTS 16

// What a slot of the ring holds. An entry is the address of a block (a multiple of 64) + its number of neurons - 1.
struct Slot {
    u64 entries[SLOT_ENTRIES];
    u32 count, kind, buffer;
};

struct Ring {
    Slot slots[SLOTS];
    u64 full[SLOTS], empty[SLOTS];  // mbarriers, but for PLAIN
    u32 head, freed[SLOTS];         // PLAIN: slots published; times that a warp was done with a slot
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u64* b, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* b) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ bool barrier_passed(u64* b, u32 parity) {
    u32 done;
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(b)), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(b)), "r"(parity)
        : "memory");
#endif
    return done != 0;
}

template <int LOADS>
struct Loader {
    Ring* ring;
    u8* data;          // buffers x buffer_bytes of shared memory
    u32 buffer_bytes;
    u32 buffers;       // at most SLOTS
    u32 stride;        // bytes of a block
    u32 warps;         // that consume a slot

    // One thread, before the block's first barrier.
    __device__ void init() {
        if (LOADS == PLAIN) {
            ring->head = 0;
            for (u32 i = 0; i < SLOTS; i++) ring->freed[i] = 0;
        } else {
            for (u32 i = 0; i < SLOTS; i++) {
                barrier_init(&ring->full[i], LOADS == ASYNC ? WARP + 1 : 1);
                barrier_init(&ring->empty[i], warps);
            }
#if __CUDA_ARCH__ >= 900
            if (LOADS == BULK) asm volatile("fence.proxy.async;" ::: "memory");
#endif
        }
    }

    // Producer: waits until nobody reads slot number i any more. Consumers always get on, so this ends.
    __device__ void released(u32 i) {
        if (LOADS == PLAIN) {
            while (*(volatile u32*)&ring->freed[i % SLOTS] < (i / SLOTS + 1) * warps) {
            }
            __threadfence_block();
        } else {
            while (!barrier_passed(&ring->empty[i % SLOTS], i / SLOTS & 1)) {
            }
        }
    }

    // Producer: waits until what slot number i loads is there.
    __device__ void arrived(u32 i) {
        if (LOADS == PLAIN) return;
        while (!barrier_passed(&ring->full[i % SLOTS], i / SLOTS & 1)) {
        }
    }

    // Producer, all lanes: publishes a slot whose entries are written, and starts its loads.
    __device__ void publish(u32 i, u32 lane, u32 kind, u32 count, u32 buffer) {
        Slot& slot = ring->slots[i % SLOTS];
        if (lane == 0) slot.kind = kind, slot.count = count, slot.buffer = buffer;
        __syncwarp();
        if (LOADS == PLAIN) {
            __threadfence_block();
            if (lane == 0) *(volatile u32*)&ring->head = i + 1;
#if __CUDA_ARCH__ >= 800
        } else if (LOADS == ASYNC) {
            u8* to = data + buffer * buffer_bytes;
            for (u32 e = 0; e < count; e++) {
                const u8* from = (const u8*)(slot.entries[e] & ~63ull);
                const u32 into = shared_address(to + e * stride);
                for (u32 at = lane * 16; at < stride; at += WARP * 16)
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(into + at), "l"(from + at)
                                 : "memory");
            }
            const u32 full = shared_address(&ring->full[i % SLOTS]);
            asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
            if (lane == 0) barrier_arrive(&ring->full[i % SLOTS]);
#endif
#if __CUDA_ARCH__ >= 900
        } else {
            u8* to = data + buffer * buffer_bytes;
            const u32 full = shared_address(&ring->full[i % SLOTS]);
            if (lane == 0)
                asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(full),
                             "r"(count * stride)
                             : "memory");
            __syncwarp();
            if (lane < count)
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                        shared_address(to + lane * stride)),
                    "l"(slot.entries[lane] & ~63ull), "r"(stride), "r"(full)
                    : "memory");
#endif
        }
        __syncwarp();
    }

    // Consumers: waits for a slot.
    __device__ const Slot& take(u32 i) {
        if (LOADS == PLAIN) {
            while (*(volatile u32*)&ring->head <= i) {
            }
            __threadfence_block();
        } else {
            while (!barrier_passed(&ring->full[i % SLOTS], i / SLOTS & 1)) {
            }
        }
        return ring->slots[i % SLOTS];
    }

    // Where the bytes of an entry are.
    __device__ const u8* bytes(u32 i, u32 entry) {
        if (LOADS == PLAIN) return (const u8*)(ring->slots[i % SLOTS].entries[entry] & ~63ull);
        return data + ring->slots[i % SLOTS].buffer * buffer_bytes + entry * stride;
    }

    // Consumers: a warp is done with a slot.
    __device__ void release(u32 i, u32 lane) {
        __syncwarp();
        if (lane == 0) {
            if (LOADS == PLAIN)
                atomicAdd(&ring->freed[i % SLOTS], 1);
            else
                barrier_arrive(&ring->empty[i % SLOTS]);
        }
    }
};
