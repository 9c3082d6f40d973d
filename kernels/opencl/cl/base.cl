// The low-bit base of an FFN: every neuron's activation estimated, and stand-ins for those that do not run.
// Layout of tiles: runtime/bundle/src/tiles.rs. A work-item has an output of a row of tiles.

#define TILE 64
#define QUADS 16

typedef struct {
    char values[16];
    uint bits;
} Codebook;

uint tile_bytes(uint bits) { return TILE * TILE / 8 * bits + 2 * TILE; }

// The codes of an output and four inputs, a byte each: of quad q of a tile, whose codes are words.
uint codes(global const uint* tile, uint bits, uint output, uint q) {
    // Eight vectors of 16 words are packed into `bits` such vectors.
    global const uint* packed = tile + q / 2 * bits * 16 + output % 16;
    const uint k = q % 2 * 4 + output / 16;
    if (bits != 3) {
        const uint per = 8 / bits;
        return packed[16 * (k / per)] >> (bits * (k % per)) & ((1u << bits) - 1) * 0x01010101u;
    }
    if (k < 6) return packed[16 * (k / 2)] >> (3 * (k % 2)) & 0x07070707u;
    return (packed[16 * (k - 6)] >> 6 & 0x03030303u) | (packed[32] >> (k - 2) & 0x04040404u);
}

// The product of an output's codes in a tile with 64 inputs.
float tile_dot(global const uchar* tile, local const float* values, uint bits, uint output, local const float* x) {
    float sum = 0.0f;
    for (uint q = 0; q < QUADS; q++) {
        const uint four = codes((global const uint*)tile, bits, output, q);
        for (uint j = 0; j < 4; j++) sum = FMA(values[four >> (8 * j) & 15], x[4 * q + j], sum);
    }
    return sum;
}

float tile_scale(global const uchar* tile, uint bits, uint index) {
    return vload_half(index, (global const half*)(tile + TILE * TILE / 8 * bits));
}

void read_values(local float* values, const Codebook book) {
    for (uint i = get_local_id(0); i < 16; i += SIZE) values[i] = book.values[i] / 127.0f;
}

// Estimates and scores; see ComputeBackend::estimate. Work-groups: rows of tiles of gate and up, from neuron `first` on.
KERNEL estimate(global const uchar* gates, ulong gates_at, global const uchar* ups, ulong ups_at, uint first, uint neurons,
                uint hidden, const Codebook gate, const Codebook up, global const float* input,
                global const float* down_error, uint down_error_at, global const float* gate_error, uint gate_error_at,
                global const float* up_error, uint up_error_at, global float* estimates, global float* scores) {
    local float gate_values[16], up_values[16], x[TILE];
    const uint tiles = hidden / TILE, output = get_local_id(0), row = get_group_id(0);
    read_values(gate_values, gate);
    read_values(up_values, up);
    float g = 0.0f, u = 0.0f;
    for (uint t = 0; t < tiles; t++) {
        barrier(CLK_LOCAL_MEM_FENCE);
        x[output] = input[t * TILE + output];
        barrier(CLK_LOCAL_MEM_FENCE);
        const ulong at = (ulong)row * tiles + t;
        global const uchar* tile = gates + gates_at + at * tile_bytes(gate.bits);
        g = FMA(tile_dot(tile, gate_values, gate.bits, output, x), tile_scale(tile, gate.bits, output), g);
        tile = ups + ups_at + at * tile_bytes(up.bits);
        u = FMA(tile_dot(tile, up_values, up.bits, output, x), tile_scale(tile, up.bits, output), u);
    }
    const uint n = first + row * TILE + output;
    if (n >= neurons) return;
    const float sigmoid = 1.0f / (1.0f + exp(-g)), activation = g * sigmoid;
    const float slope = sigmoid + activation * (1.0f - sigmoid);
    const float a = activation * u * down_error[down_error_at + n], b = slope * u * gate_error[gate_error_at + n];
    const float c = activation * up_error[up_error_at + n];
    estimates[n] = activation * u;
    scores[n] = sqrt(a * a + b * b + c * c);
}

// sums[lane] = the sum of (offset + slope * estimate) * down over neurons that are not chosen, of every lanes-th tile.
// Work-groups: rows of tiles, the first of which has outputs 64 first and following, x lanes.
KERNEL stand_in(global const uchar* downs, ulong downs_at, uint first, uint neurons, uint hidden, const Codebook down,
                global const float* offset, uint offset_at, global const float* slope, uint slope_at,
                global const float* estimates, global const uchar* chosen, ulong chosen_at, global float* sums) {
    local float values[16], x[TILE];
    const uint output = get_local_id(0), tiles = (neurons + TILE - 1) / TILE;
    const uint row = get_group_id(0), lane = get_group_id(1), lanes = get_num_groups(1);
    read_values(values, down);
    float sum = 0.0f;
    for (uint t = lane; t < tiles; t += lanes) {
        global const uchar* tile = downs + downs_at + ((ulong)row * tiles + t) * tile_bytes(down.bits);
        const uint n = t * TILE + output;
        barrier(CLK_LOCAL_MEM_FENCE);
        x[output] = 0.0f;
        if (n < neurons && !(chosen[chosen_at + n / 8] >> (n % 8) & 1))
            x[output] = FMA(slope[slope_at + n], estimates[n], offset[offset_at + n]) * tile_scale(tile, down.bits, output);
        barrier(CLK_LOCAL_MEM_FENCE);
        sum += tile_dot(tile, values, down.bits, output, x);
    }
    sums[(ulong)lane * hidden + (first + row) * TILE + output] = sum;
}
