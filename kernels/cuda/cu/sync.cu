// What a flag costs, by who polls it: for `bench sync`.
#include "common.cuh"

struct Echo {
    const u32* ask;    // host
    u32* answer;       // host
    u32* forwarded;    // device
    u32* arrived;      // device, zero
    u32 first, rounds;
    u32 polling;       // 0: every block polls the host; 1: block 0 forwards
    u64 spin_ns;
};

// Waits for the host to say first + 1, first + 2, ..., in every block, and says the same when all blocks have heard it.
extern "C" __global__ void echo(const Echo p) {
    if (threadIdx.x != 0) return;
    u64 until = now_ns() + p.spin_ns;
    for (u32 r = 1; r <= p.rounds; r++) {
        const u32 want = p.first + r;
        const bool asks_host = p.polling == 0 || blockIdx.x == 0;
        while ((int)((asks_host ? acquire_sys(p.ask) : acquire_gpu(p.forwarded)) - want) < 0)
            if (now_ns() > until) return;
        if (p.polling == 1 && blockIdx.x == 0) release_gpu(p.forwarded, want);
        add_release_gpu(p.arrived, 1);
        if (blockIdx.x == 0) {
            while ((int)(acquire_gpu(p.arrived) - want * gridDim.x) < 0)
                if (now_ns() > until) return;
            release_sys(p.answer, want);
        }
        until = now_ns() + p.spin_ns;
    }
}
