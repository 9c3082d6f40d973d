// The FFN of one token, any neurons in any order: y = sum of SiLU(gate . h) * (up . h) * down (Eq. 1), as one kernel that
// stays on the device while weights arrive (section 3.2.1, Algorithm 1).
//
// A thread block owns the list's entries n with n % blocks == its number. Its producer warp waits for stages and starts the
// loads of their entries; two groups of consumer warps, each with h and a running sum in registers, take slots by turns, so
// that one computes while the other waits for its partial sums; a signaler warp tells when a stage's sums are flushed.
// Block 0 has two more roles: the *forwarder*, the only one that polls the host's flags, republishes them in device memory;
// the *coordinator* copies sums to host memory and raises the done counter.
//
// Guarantees: the done counter never falls, and is raised to s + 1 only when all blocks have flushed the stages up to s. The
// sums that follow it to the host hold at least these (they may hold more: atomics do not wait). Each number of them carries
// the stage, so that neither waits for the other and no fence is needed: one over the bus stops a multiprocessor for a
// microsecond.
//
// Every wait ends. The forwarder waits for the host for spin_ns; then it *pauses*: it tells the blocks that an empty stage
// was the last one, and the host, which sees that when it posts the next, starts the kernel again. All others wait
// longer; if they give up something is wrong, and the status says so.
// With `lanes` there are no stages and no atomics: each group adds to a lane of its own in the order of the list, the same
// bits each run, however the list is cut into launches.
#include "load.cuh"

// Stages that host and device may be apart; power of two.
#define STAGE_RING 64
// Entries of a block that are posted and not done; power of two.
#define LIST_RING 1024
// An entry's bits from here on are its lap of the ring + 1, modulo LAPS. Without the other bits it is no block.
#define LAP_SHIFT 57
#define LAPS 128
// An entry's bit that says that its block is in host memory.
#define FAR_SHIFT 56
#define BATCH 2
#define MAX_GROUPS 2
#define COPY_WARPS 4
// From so many thread blocks on both groups of one add to the device's sums together: additions to one place wait for each
// other. Fewer blocks rather have no group wait for the other.
#define JOIN_BLOCKS 32
#define LINE 32  // u32 of a line that nobody else touches
// Of the end of a stage: it is the launch's last one. Its sums stay on the device.
#define LAST 0x80000000u
// How much longer others wait than the forwarder.
#define OTHERS 4

enum Status { RUNNING = 0, FINISHED = 1, TIMED_OUT = 2, PAUSED = 3 };

// Device memory of a session, zero at first.
struct Session {
    u64 ready[STAGE_RING];   // as `posted` of Mlp
    u32 arrived[STAGE_RING];  // blocks that have flushed a stage, all laps together
    u32 aborted;              // the last launch that gave up, + 1
    u32 paused;               // the last launch that paused, + 1
};

// Mapped host memory, written by the device.
struct Report {
    u32 done, pad0[LINE - 1];    // stages that are computed; their sums are in `partials`, or on their way there
    u32 status, pad1[LINE - 1];  // launch * 4 + Status
    u32 closing, pad2[LINE - 1]; // a launch that is about to pause, + 1; 0: it goes on after all
};

struct Mlp {
    const float* h;      // hidden
    float* lanes;        // blocks x hidden, added to; or null: then
    float* sum;          // hidden, added to with atomics
    float* next_sum;     // zeroed for the next launch, or null
    const u64* list;     // device: entry n is list[n]; null: n is block n of those at `base`
    u64 base;
    u32 stride;          // bytes of a block
    u32 block_neurons;   // of a block, `last_neurons` of block `last`
    u32 last, last_neurons;
    u32 first, end;      // entries, if nobody posts stages
    u32 lane_shift;      // added to an entry's number before it is given to a block
    u32 hidden;
    u32 groups, buffers, buffer_bytes;
    // Stages, if `posted` is given.
    const u64* posted;   // host: word s % STAGE_RING is (s + 1) << 32 | end of stage s | LAST, once it is ready
    const u64* posted_list;  // host: a block's entries side by side, LIST_RING of them; entry n is its n / blocks-th
    Session* session;
    Report* report;
    ulonglong2* partials;  // host: STAGE_RING x hidden words, a number in the low half, its stage + 1 in the high one
    u32 first_stage, stages;  // at most so many; fewer if one is the last
    u32 launch;
    u32 silent_last;     // whether the last stage's sums stay on the device; the end of the kernel tells of it
    u32 known_stages;    // all of them, if they were posted before the launch (then `end` is their end), or 0
    u64 spin_ns;
    // Host memory whose blocks are left in device memory, at the same place from `keep_at` on, as they are used.
    u64 far_from, far_bytes, keep_at;
};

// Launches may overlap: blocks of the next may begin, and load weights, when all of this one have begun. What they share
// waits for the end of the one before.
__device__ __forceinline__ void let_the_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A bounded wait; asks for the time only now and then.
struct Patience {
    Session* session;
    u64 until;
    u32 launch, spins;
    __device__ Patience(const Mlp& p, u32 times)
        : session(p.session), until(now_ns() + times * p.spin_ns), launch(p.launch), spins(0) {}
    // False: somebody has given up, or it is over.
    __device__ bool lasts() {
        if (++spins % 64 != 0) return true;
        return !aborted() && now_ns() < until;
    }
    __device__ bool aborted() const { return acquire_gpu(&session->aborted) == launch + 1; }
    // False: all give up.
    __device__ bool wait() {
        if (lasts()) return true;
        release_gpu(&session->aborted, launch + 1);
        return false;
    }
};

// Shared memory of a block.
struct Shared {
    Ring ring;
    float dots[MAX_GROUPS][2][2 * BATCH][16];  // by turn, product, warp
    u32 dirty;                     // whether the second group has left sums for the first
    u32 signaled;                  // flushes that the signaler has passed on
    u32 last_round;                // of the barrier between consumers and signaler
    u32 copied_to, ended;          // coordinator: stage, and whether the last one is before it
};

// Where the ring's data begins; the host counts with it.
#define DATA_AT 4096
static_assert(sizeof(Shared) <= DATA_AT && DATA_AT % 128 == 0, "room before the ring's data");

#define BARRIER_FLUSH 1
#define BARRIER_COPY 2
#define BARRIER_JOIN 3
#define BARRIER_GROUPS 4  // and the next

template <int DT, int C, int LOADS>
struct Consumers {
    const Mlp& p;
    Shared& shared;
    Loader<LOADS>& loader;
    float* joined;  // hidden, in shared memory
    u32 group, groups, thread, threads, lane, warp, warps;  // thread and warp within the group, threads and warps of it
    float h[C][8], acc[C][8];

    __device__ u32 octet(int c) const { return c * threads + thread; }
    __device__ bool mine(int c) const { return octet(c) * 8 < p.hidden; }

    // Adds `count` (at most BATCH) neurons. Sums do not depend on which neurons share a batch.
    __device__ void batch(const u8* first, const u8* second, u32 count, u32 turn) {
        const u32 row = row_bytes<DT>(p.hidden);
        const u8* const neurons[BATCH] = {first, second};
        float v[2 * BATCH];
        Octet downs[BATCH][C];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            v[2 * n] = v[2 * n + 1] = 0.0f;
            if (n < count) {
#pragma unroll
                for (int c = 0; c < C; c++) {
                    if (!mine(c)) continue;
                    const Octet gate = load_octet<DT>(neurons[n], p.hidden, octet(c));
                    const Octet up = load_octet<DT>(neurons[n] + row, p.hidden, octet(c));
                    // From device memory all loads are worth starting at once.
                    if (LOADS == PLAIN) downs[n][c] = load_octet<DT>(neurons[n] + 2 * row, p.hidden, octet(c));
                    float w[8];
                    unpack<DT>(gate, w);
#pragma unroll
                    for (int j = 0; j < 8; j++) v[2 * n] = fmaf(w[j], h[c][j], v[2 * n]);
                    unpack<DT>(up, w);
#pragma unroll
                    for (int j = 0; j < 8; j++) v[2 * n + 1] = fmaf(w[j], h[c][j], v[2 * n + 1]);
                }
            }
        }
        // Four sums over a warp in six exchanges: each step halves what a lane is responsible for.
        const bool high = lane & 16, odd = lane & 8;
        float a = high ? v[2] : v[0], b = high ? v[3] : v[1];
        a += __shfl_xor_sync(FULL, high ? v[0] : v[2], 16);
        b += __shfl_xor_sync(FULL, high ? v[1] : v[3], 16);
        float sum = odd ? b : a;
        sum += __shfl_xor_sync(FULL, odd ? a : b, 8);
#pragma unroll
        for (int d = 4; d > 0; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
        const u32 product = lane / 8;  // gate and up of neuron 0, then of neuron 1
        if (lane % 8 == 0) shared.dots[group][turn & 1][product][warp] = sum;
        named_barrier(BARRIER_GROUPS + group, threads);
        sum = 0.0f;
        for (u32 w = lane % 8; w < warps; w += 8) sum += shared.dots[group][turn & 1][product][w];
#pragma unroll
        for (int d = 4; d > 0; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
        const float up = __shfl_xor_sync(FULL, sum, 8);
        const float activation = silu(sum) * up;  // in lanes 0 .. 8 and 16 .. 24
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const float scale = __shfl_sync(FULL, activation, 16 * n);
            if (n < count) {
#pragma unroll
                for (int c = 0; c < C; c++) {
                    if (!mine(c)) continue;
                    if (LOADS != PLAIN) downs[n][c] = load_octet<DT>(neurons[n] + 2 * row, p.hidden, octet(c));
                    float w[8];
                    unpack<DT>(downs[n][c], w);
#pragma unroll
                    for (int j = 0; j < 8; j++) acc[c][j] = fmaf(scale, w[j], acc[c][j]);
                }
            }
        }
    }

    // Adds both groups' sums to the device's.
    __device__ void flush(bool dirty) {
        if (groups > 1 && gridDim.x >= JOIN_BLOCKS) {
            if (group > 0) {
                if (dirty) {
#pragma unroll
                    for (int c = 0; c < C; c++)
#pragma unroll
                        for (int j = 0; j < 8; j++)
                            if (mine(c)) joined[j * (p.hidden / 8) + octet(c)] = acc[c][j], acc[c][j] = 0.0f;
                }
                if (thread == 0) shared.dirty = dirty;
                __threadfence_block();
                named_arrive(BARRIER_JOIN, groups * threads);
                return;
            }
            named_barrier(BARRIER_JOIN, groups * threads);
            if (*(volatile u32*)&shared.dirty) {
#pragma unroll
                for (int c = 0; c < C; c++)
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        if (mine(c)) acc[c][j] += joined[j * (p.hidden / 8) + octet(c)];
                dirty = true;
            }
        }
        if (!dirty) return;
#pragma unroll
        for (int c = 0; c < C; c++) {
            if (!mine(c)) continue;
#pragma unroll
            for (int j = 0; j < 8; j += 4) {
                // The four columns of half an octet lie side by side in every format.
                float* to = p.sum + column<DT>(octet(c), j);
#if __CUDA_ARCH__ >= 900
                asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(acc[c][j]),
                             "f"(acc[c][j + 1]), "f"(acc[c][j + 2]), "f"(acc[c][j + 3])
                             : "memory");
#else
                for (int k = 0; k < 4; k++) atomicAdd(to + k, acc[c][j + k]);
#endif
                for (int k = 0; k < 4; k++) acc[c][j + k] = 0.0f;
            }
        }
    }

    // Leaves a block that came from host memory in device memory.
    __device__ void keep(u64 address, const u8* from) {
        const u64 at = address - p.far_from;
        if (at >= p.far_bytes) return;
        uint4* to = (uint4*)(p.keep_at + at);
        for (u32 i = thread; i < p.stride / 16; i += threads) to[i] = ((const uint4*)from)[i];
    }

    // One slot's neurons.
    __device__ void slot(const Slot& slot, u32 i, u32& turn) {
        const u32 row = row_bytes<DT>(p.hidden), count = slot.count;
        const u8* waiting = nullptr;
        for (u32 e = 0; e < count; e++) {
            const u32 in_block = (u32)(slot.entries[e] & 63) + 1;
            const u8* at = loader.bytes(i, e);
            keep(slot.entries[e] & ~63ull, at);
            for (u32 n = 0; n < in_block; n++, at += 3 * row) {
                const bool last = e + 1 == count && n + 1 == in_block;
                if (!waiting && !last) {
                    waiting = at;
                    continue;
                }
                batch(waiting ? waiting : at, at, waiting ? 2 : 1, turn++);
                waiting = nullptr;
            }
        }
    }

    __device__ void run() {
        float* lane_sums = p.lanes ? p.lanes + (u64)(blockIdx.x * groups + group) * p.hidden : nullptr;
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                h[c][j] = acc[c][j] = 0.0f;
                if (!mine(c)) continue;
                h[c][j] = p.h[column<DT>(octet(c), j)];
                if (lane_sums) acc[c][j] = lane_sums[column<DT>(octet(c), j)];
            }
        u32 turn = 0, flushes = 0;
        bool dirty = false;
        for (u32 i = group;; i += groups) {
            const Slot& next = loader.take(i);
            const u32 kind = next.kind;
            if (kind == DATA) slot(next, i, turn), dirty = true;
            loader.release(i, lane);
            if (kind == DATA) continue;
            if (p.posted) {
                // The barrier cannot hold two rounds.
                while (flushes > *(volatile u32*)&shared.signaled) {
                }
            }
            if (kind == FLUSH && p.sum) flush(dirty), dirty = false;
            if (p.posted) {
                if (kind == END && thread == 0) *(volatile u32*)&shared.last_round = flushes;
                __threadfence_block();
                named_arrive(BARRIER_FLUSH, groups * threads + WARP);
                flushes++;
            }
            if (kind == END) break;
        }
        if (!lane_sums) return;
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (mine(c)) lane_sums[column<DT>(octet(c), j)] = acc[c][j];
    }
};

// How many stages from s on are there, by the lanes' words; `last` if one of them is the last.
__device__ __forceinline__ u32 stages_there(u64 word, u32 s, u32 lane, u32& last) {
    const bool is_there = (u32)(word >> 32) == s + lane + 1;
    const u32 there = __ballot_sync(FULL, is_there);
    const u32 ends = __ballot_sync(FULL, is_there && ((u32)word & LAST) != 0);
    const u32 count = ~there == 0 ? WARP : __ffs(~there) - 1;
    const u32 end = ends == 0 ? WARP + 1 : __ffs(ends);
    if (end > count) return count;
    last = s + end;
    return end;
}

template <int LOADS>
struct Producer {
    const Mlp& p;
    Loader<LOADS>& loader;
    u32 groups, lane, slot;
    u64 held;         // a lane's entry
    u32 used, count;  // of those held
    u64 coming;       // a lane's entry of the posted ones from number `coming_from` on
    u32 coming_from;
    u32 user, loads;  // the slot that has buffer number `lane`; slots that had a buffer

    __device__ u64 entry(u32 n) const {
        if (p.list) return p.list[n];
        const u32 neurons = n == p.last ? p.last_neurons : p.block_neurons;
        return p.base + (u64)n * p.stride + (neurons - 1);
    }

    // A posted entry as it is now. Its high bits say which lap of the ring it is of: it may not be there yet.
    __device__ u64 posted(u32 n) const {
        u64 e;
        const u64* from = p.posted_list + blockIdx.x * LIST_RING + n / gridDim.x % LIST_RING;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(e) : "l"(from) : "memory");
        return e;
    }
    __device__ bool is_there(u64 e, u32 n) const {
        return (u32)(e >> LAP_SHIFT) == (n / gridDim.x / LIST_RING + 1) % LAPS;
    }
    // The same ahead of its stage. Where all stages are known there is nothing behind them: a read in vain crosses the bus.
    __device__ u64 ahead(u32 n) const { return p.known_stages == 0 || (int)(p.end - n) > 0 ? posted(n) : 0; }

    // Holds entries from `next` on: of a list that is whole, those before `known`. Posted ones may be ahead of their stage;
    // those behind them are on their way meanwhile, as the bus takes microseconds.
    __device__ void hold(u32 next, u32 known) {
        const u32 step = gridDim.x, n = next + lane * step;
        used = 0, count = WARP;
        if (!p.posted) {
            count = min((known - next + step - 1) / step, WARP);
            if (lane < count) held = entry(n);
            return;
        }
        held = coming_from == next ? coming : ahead(n);
        coming_from = next + WARP * step;
        coming = ahead(n + WARP * step);
    }

    // Posted entries before `known` that were read too early are read again: they are there, as their stage is.
    __device__ void complete(u32 next, u32 known) {
        const u32 n = next + (lane - used) * gridDim.x;
        const bool mine = lane >= used && lane < count && (int)(known - n) > 0;
        if (mine && !is_there(held, n)) held = posted(n);
    }

    // Loads this block's entries next, next + blocks, ... before `end`; those before `known` may be looked at already.
    __device__ u32 load(u32 next, u32 end, u32 known) {
        const u32 step = gridDim.x, per_slot = min(p.buffer_bytes / p.stride, SLOT_ENTRIES);
        bool checked = !p.posted;  // whether what is held is complete
        while ((int)(end - next) > 0) {
            if (used == count) hold(next, known), checked = !p.posted;
            if (!checked) complete(next, known), checked = true;
            u32 n = min(min(per_slot, count - used), (end - next + step - 1) / step);
            if (p.lanes) {
                // Which group adds an entry depends on the entry's number only.
                const u32 k = (next + p.lane_shift) / step;
                n = min(n, per_slot - k % per_slot);
                if (slot % groups != k / per_slot % groups) mark(DATA);
            }
            const u64 word = __shfl_sync(FULL, held, min(used + lane, WARP - 1));
            const u64 e = word & ((1ull << FAR_SHIFT) - 1);
            const bool real = lane < n && e != 0;
            const u32 mask = __ballot_sync(FULL, real);
            if (mask != 0) {
                open();
                if (__any_sync(FULL, real && (word >> FAR_SHIFT & 1) != 0)) await_load();
                const u32 buffer = loads % loader.buffers, before = __shfl_sync(FULL, user, buffer);
                // What is a ring ago has been waited for.
                if (loads++ >= loader.buffers && slot - before < SLOTS) loader.released(before);
                if (lane == buffer) user = slot;
                if (real) loader.ring->slots[slot % SLOTS].entries[__popc(mask & ((1u << lane) - 1))] = e;
                loader.publish(slot++, lane, DATA, __popc(mask), buffer);
            }
            used += n;
            next += n * step;
        }
        return next;
    }

    // Waits until what was loaded last is there. Loads from host memory wait for each other: what is queued at the bus delays
    // whatever else crosses it, the end of the launch before and the list of the next too.
    __device__ void await_load() {
        if (loads == 0) return;
        const u32 last = __shfl_sync(FULL, user, (loads - 1) % loader.buffers);
        // What is a ring ago has arrived.
        if (slot - last < SLOTS) loader.arrived(last);
    }

    // Waits for the next slot.
    __device__ void open() {
        if (slot >= SLOTS) loader.released(slot - SLOTS);
    }

    // A slot without data.
    __device__ void mark(u32 kind) {
        open();
        loader.publish(slot++, lane, kind, 0, 0);
    }

    __device__ void mark_all(u32 kind) {
        for (u32 g = 0; g < groups; g++) mark(kind);
    }

    // The first entry not before n that is this block's.
    __device__ u32 first_of_mine(u32 n) const {
        const u32 at = (n + p.lane_shift) % gridDim.x;
        return n + (blockIdx.x + gridDim.x - at) % gridDim.x;
    }

    // Looks at stages s, s + 1, ... before `last`: a lane's end in `end`, how many are there; waits for one at least. 0: gave
    // up. If one of them is the last, so is `last`.
    __device__ u32 look(u32 s, u32& last, u32& end) {
        Patience patience(p, OTHERS);
        for (;;) {
            const u64 word = s + lane < last ? acquire_gpu(p.session->ready + (s + lane) % STAGE_RING) : 0;
            end = (u32)word & ~LAST;
            const u32 count = stages_there(word, s, lane, last);
            if (count > 0) return count;
            const bool on = lane != 0 || patience.wait();
            if (!__shfl_sync(FULL, on, 0)) return 0;
        }
    }

    __device__ void stages() {
        u32 next = first_of_mine(p.first), last = p.first_stage + p.stages;
        for (u32 s = p.first_stage; s != last;) {
            u32 ends = p.end, stages = p.known_stages;
            if (stages == 0) {
                if (used == count) hold(next, next);
                stages = look(s, last, ends);
            }
            if (stages == 0) return;
            __syncwarp();
            const u32 known = __shfl_sync(FULL, ends, stages - 1);
            for (u32 i = 0; i < stages; i++) {
                next = load(next, __shfl_sync(FULL, ends, i), known);
                mark_all(FLUSH);
            }
            s += stages;
        }
    }

    __device__ void run() {
        if (p.posted) {
            stages();
        } else {
            load(first_of_mine(p.first), p.end, p.end);
            mark_all(FLUSH);
        }
        mark_all(END);
    }
};

// The forwarder has waited long enough for stage s; `end` is that of the stage before. Either it sees now that the host has
// posted, or the host will see that it must start the kernel again: each says something first, and then looks.
__device__ bool goes_on(const Mlp& p, u32 s, u32 end) {
    release_sys(&p.report->closing, p.launch + 1);
    fence_sys();
    if ((u32)(acquire_sys(p.posted + s % STAGE_RING) >> 32) == s + 1) {
        release_sys(&p.report->closing, 0);
        return true;
    }
    release_gpu(&p.session->paused, p.launch + 1);
    release_gpu(p.session->ready + s % STAGE_RING, (u64)(s + 1) << 32 | LAST | end);
    return false;
}

// Republishes the host's words. One warp.
__device__ void forward(const Mlp& p, u32 lane) {
    u32 last = p.first_stage + p.stages, end = p.first;
    for (u32 s = p.first_stage; s != last;) {
        Patience patience(p, 1);
        u32 count = 0;
        u64 word = 0;
        while (count == 0) {
            word = s + lane < last ? acquire_sys(p.posted + (s + lane) % STAGE_RING) : 0;
            count = stages_there(word, s, lane, last);
            // What came before the host's words comes before these.
            if (lane < count) release_gpu(p.session->ready + (s + lane) % STAGE_RING, word);
            const bool on = lane != 0 || count > 0 || patience.lasts() || (!patience.aborted() && goes_on(p, s, end));
            if (!__shfl_sync(FULL, on, 0)) return;
        }
        end = __shfl_sync(FULL, (u32)word, count - 1);
        s += count;
    }
}

// Passes on that a stage's sums are flushed. One warp of each block.
__device__ void signal(const Mlp& p, Shared& shared, u32 threads, u32 lane) {
    for (u32 round = 0;; round++) {
        named_barrier(BARRIER_FLUSH, threads + WARP);
        if (*(volatile u32*)&shared.last_round == round) return;
        if (lane == 0) {
            *(volatile u32*)&shared.signaled = round + 1;
            // The consumers' additions come before, by the barrier.
            add_release_gpu(&p.session->arrived[(p.first_stage + round) % STAGE_RING], 1);
        }
        __syncwarp();
    }
}

// Copies sums to the host, stages in order; several at once where they have all arrived.
__device__ void coordinate(const Mlp& p, Shared& shared, u32 thread) {
    const u32 threads = COPY_WARPS * WARP, last = p.first_stage + p.stages - p.silent_last;
    if (thread == 0) {
        // Earlier launches have ended.
        wait_for_earlier();
        *(volatile u32*)&p.report->done = p.first_stage;
    }
    const auto flushed = [&](u32 s) {
        return acquire_gpu(p.session->arrived + s % STAGE_RING) == (s / STAGE_RING + 1) * gridDim.x;
    };
    // Whoever has flushed a stage has seen whether it is the last.
    const auto ends = [&](u32 s) {
        return p.known_stages == 0 && ((u32)acquire_gpu(p.session->ready + s % STAGE_RING) & LAST) != 0;
    };
    for (u32 s = p.first_stage; s != last;) {
        if (thread == 0) {
            Patience patience(p, OTHERS);
            u32 to = s;
            bool ok = true, ended = false;
            while (!flushed(s) && (ok = patience.wait())) {
            }
            if (ok) {
                to = s + 1;
                while (!(ended = ends(to - 1)) && to != last && flushed(to)) to++;
                // A pause is no stage of the host's.
                const bool paused = ended && acquire_gpu(&p.session->paused) == p.launch + 1;
                *(volatile u32*)&p.report->done = to - paused;
            }
            shared.copied_to = to;
            shared.ended = ended;
        }
        named_barrier(BARRIER_COPY, threads);
        const u32 to = *(volatile u32*)&shared.copied_to, ended = *(volatile u32*)&shared.ended;
        named_barrier(BARRIER_COPY, threads);
        // Nobody waits for sums when the last stage has been posted; in a pause somebody may.
        const u32 sent = to - ended;
        if (sent == s) break;
        ulonglong2* into = p.partials + (u64)((sent - 1) % STAGE_RING) * p.hidden / 2;
        const float4* from = (const float4*)p.sum;
        const u64 stage = (u64)sent << 32;
#pragma unroll 8
        for (u32 i = thread; i < p.hidden / 4; i += threads) {
            const float4 v = __ldcg(from + i);
            __stcg(into + 2 * i, make_ulonglong2(stage | __float_as_uint(v.x), stage | __float_as_uint(v.y)));
            __stcg(into + 2 * i + 1, make_ulonglong2(stage | __float_as_uint(v.z), stage | __float_as_uint(v.w)));
        }
        if (ended) break;
        s = to;
    }
    if (thread == 0) {
        const bool aborted = acquire_gpu(&p.session->aborted) == p.launch + 1;
        const bool paused = acquire_gpu(&p.session->paused) == p.launch + 1;
        // The host waits for the end of the launch before it relies on this: it needs no fence.
        *(volatile u32*)&p.report->status = p.launch * 4 + (aborted ? TIMED_OUT : paused ? PAUSED : FINISHED);
    }
}

template <int DT, int C, int LOADS>
__device__ void mlp(const Mlp& p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)memory;
    const u32 groups = p.groups;
    // Room for joined sums, then the ring's data.
    float* joined = (float*)(memory + DATA_AT);
    u8* data = memory + DATA_AT + (p.hidden * 4 + 127) / 128 * 128;
    // Consumers, producer, signaler; with stages also forwarder and coordinator.
    const u32 warps = (blockDim.x / WARP - (p.posted ? 3 + COPY_WARPS : 2)) / groups;
    const u32 role = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Loader<LOADS> loader = {&shared.ring, data, p.buffer_bytes, p.buffers, p.stride, warps};
    if (threadIdx.x == 0) {
        loader.init();
        shared.signaled = 0;
        shared.last_round = ~0u;
    }
    __syncthreads();
    let_the_next_begin();
    if (role < groups * warps) {
        wait_for_earlier();
        if (p.next_sum && blockIdx.x == gridDim.x - 1)
            for (u32 i = threadIdx.x; i < p.hidden; i += groups * warps * WARP) p.next_sum[i] = 0.0f;
        const u32 threads = warps * WARP;
        Consumers<DT, C, LOADS> consumers = {p,      shared,  loader,          joined, role / warps,
                                             groups, threadIdx.x % threads, threads, lane, role % warps, warps};
        consumers.run();
    } else if (role == groups * warps) {
        Producer<LOADS> producer = {p, loader, groups, lane, 0, 0, 0, 0, 0, ~0u, 0, 0};
        producer.run();
    } else if (role == groups * warps + 1) {
        if (p.posted) signal(p, shared, groups * warps * WARP, lane);
    } else if (blockIdx.x == 0) {
        if (role > groups * warps + 2)
            coordinate(p, shared, threadIdx.x - (groups * warps + 3) * WARP);
        else if (p.known_stages == 0)
            forward(p, lane);
    }
}

#define MAX_THREADS 736
#define MLP(NAME, DT, C, LOADS) \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) NAME(const Mlp p) { mlp<DT, C, LOADS>(p); }
#define MLP_OF(LOADS, NAME)                 \
    MLP(mlp_##NAME##_f16_1, F16, 1, LOADS)   \
    MLP(mlp_##NAME##_f16_2, F16, 2, LOADS)   \
    MLP(mlp_##NAME##_q8_0_1, Q8_0, 1, LOADS) \
    MLP(mlp_##NAME##_q8_0_2, Q8_0, 2, LOADS) \
    MLP(mlp_##NAME##_q4_0_1, Q4_0, 1, LOADS) \
    MLP(mlp_##NAME##_q4_0_2, Q4_0, 2, LOADS)

MLP_OF(PLAIN, plain)
#if __CUDA_ARCH__ >= 800
MLP_OF(ASYNC, async)
#endif
#if __CUDA_ARCH__ >= 900
MLP_OF(BULK, bulk)
#endif
