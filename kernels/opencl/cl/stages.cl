// One layer's FFN as one kernel that stays on the device while weights arrive (section 3.2.1, Algorithm 1).
//
// The host posts stages, lists of blocks that are in memory now, and raises `posted` (the paper's GpuRd). Work-group g of
// `groups` owns the list's entries n with n % groups == g; it adds them to a sum of its own in the order of the list, copies
// that sum to `partials` behind each stage and raises its own counter (GpuWr). So nothing is added by two, and the same
// list gives the same bits, however it is cut into stages.
//
// All of shared memory is fine-grained with atomics. Every wait looks at the abort word and ends after most_spins at the
// latest, which aborts all work-groups. Compiled as OpenCL C 2.0 or later, for devices that have such memory.

// Stages and entries that host and device may be apart; powers of two.
#define STAGE_RING 16
#define LIST_RING 16384
// Flags, in words: each has a line of its own.
#define LINE 32
#define POSTED 0
#define ABORT LINE
#define DONE (2 * LINE)

// The host is part of it. PoCL 3.1 has the scope but not its name in OpenCL C 3.0; its device is the host's processor.
#if defined(__opencl_c_atomic_scope_all_devices) || __OPENCL_C_VERSION__ < 300
#define SCOPE memory_scope_all_svm_devices
#else
#define SCOPE memory_scope_device
#endif

#define NONE (~(uint)0)
// Neurons that a work-group has at a time, and work-items of each.
#define BATCH 8
#define LANES (SIZE / BATCH)

typedef struct {
    uint stride, block_neurons, hidden;
    uint first_stage, stages, first_entry, most_spins;
} Launch;

// Waits for stage `stage`; the number of the entry behind it, or NONE.
uint wait_for(global atomic_uint* flags, global const uint* ends, uint stage, const Launch p) {
    for (uint spins = 0; spins < p.most_spins; spins++) {
        if (atomic_load_explicit(flags + ABORT, memory_order_relaxed, SCOPE) != 0) return NONE;
        // Pairs with the host's release: who sees the stage sees its end, its entries and their weights.
        const uint posted = atomic_load_explicit(flags + POSTED, memory_order_acquire, SCOPE);
        if ((int)(posted - stage) > 0) return ends[stage % STAGE_RING];
    }
    atomic_store_explicit(flags + ABORT, 1, memory_order_relaxed, SCOPE);
    return NONE;
}

// Where neuron j of the work-group's entries from `first` on lies; none if j is behind the end or in a block's padding.
ulong neuron_at(global const uint* list, uint first, uint end, uint j, const Launch p) {
    const uint n = first + j / p.block_neurons * get_num_groups(0);
    if ((int)(end - n) <= 0) return ~(ulong)0;
    const uint entry = list[n % LIST_RING], within = j % p.block_neurons;
    if (within > (entry & 63)) return ~(ulong)0;
    return (ulong)(entry >> 6) * p.stride + within * 3 * row_bytes(p.hidden);
}

// Adds the work-group's entries from `first` up to `end` to its sum.
void add_entries(global const uchar* blocks, global const uint* list, uint first, uint end, global const float* h,
                 global float* sum, local float* gates, local float* ups, local ulong* places, const Launch p) {
    const uint item = get_local_id(0), groups = get_num_groups(0);
    const uint entries = (int)(end - first) <= 0 ? 0 : (end - first + groups - 1) / groups;
    for (uint batch = 0; batch < entries * p.block_neurons; batch += BATCH) {
        const ulong place = neuron_at(list, first, end, batch + item / LANES, p);
        float8 gate = 0.0f, up = 0.0f;
        if (place != ~(ulong)0) {
            global const uchar* row = blocks + place;
            for (uint o = item % LANES; o < p.hidden / 8; o += LANES) {
                const float8 x = load_columns(h, o);
                gate = FMA(load_weights(row, p.hidden, o), x, gate);
                up = FMA(load_weights(row + row_bytes(p.hidden), p.hidden, o), x, up);
            }
        }
        gates[item] = sum8(gate);
        ups[item] = sum8(up);
        if (item % LANES == 0) places[item / LANES] = place;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (item < BATCH) {
            float g = 0.0f, u = 0.0f;
            for (uint i = 0; i < LANES; i++) g += gates[item * LANES + i], u += ups[item * LANES + i];
            gates[item * LANES] = silu(g) * u;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint o = item; o < p.hidden / 8; o += SIZE) {
            float8 all = load_columns(sum, o);
            for (uint j = 0; j < BATCH; j++) {
                if (places[j] == ~(ulong)0) continue;
                global const uchar* down = blocks + places[j] + 2 * row_bytes(p.hidden);
                all = FMA((float8)(gates[j * LANES]), load_weights(down, p.hidden, o), all);
            }
            store_columns(all, sum, o);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

// `lanes`: a sum a work-group. `partials`: STAGE_RING x groups x hidden.
KERNEL run_stages(global const uchar* blocks, global const uint* list, global const uint* ends, global atomic_uint* flags,
                  global const float* h, global float* lanes, global float* partials, const Launch p) {
    local float gates[SIZE], ups[SIZE];
    local ulong places[BATCH];
    local uint told;
    const uint item = get_local_id(0), g = get_group_id(0), groups = get_num_groups(0);
    global float* sum = lanes + (ulong)g * p.hidden;
    for (uint i = item; i < p.hidden; i += SIZE) sum[i] = 0.0f;
    uint begin = p.first_entry, stage = 0, end = 0;
    while (stage < p.stages && end != NONE) {
        const uint number = p.first_stage + stage;
        if (item == 0) told = wait_for(flags, ends, number, p);
        barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
        end = told;
        if (end != NONE) {
            // The first of this work-group's entries that is not before `begin`.
            const uint first = begin + (g + groups - begin % groups) % groups;
            add_entries(blocks, list, first, end, h, sum, gates, ups, places, p);
            global float* partial = partials + ((ulong)(number % STAGE_RING) * groups + g) * p.hidden;
            for (uint o = item; o < p.hidden / 8; o += SIZE) store_columns(load_columns(sum, o), partial, o);
            begin = end;
            stage++;
        }
        barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
        // Pairs with the host's acquire: who sees the counter sees the sums.
        if (end != NONE && item == 0)
            atomic_store_explicit(flags + DONE + g * LINE, number + 1, memory_order_release, SCOPE);
    }
}
