// Everything of a layer that multiplies with weights in one number format, DTYPE: embedding, projections, the FFN of one
// token and of many, the head.
//
// Every output is summed in one order that depends neither on how weights are cut into calls nor on the other tokens of
// the pass: a row times one vector belongs to LANES work-items, a row times many goes over its columns ascending, and
// neuron n of a token's FFN, counted over all calls, belongs to sum n % FFN_LANES.

// Work-items of a row.
#define LANES 8
#define ROWS (SIZE / LANES)
// Tokens and rows of a tile; a work-item has 4 x 4 of them.
#define TILE 32
#define DEPTH 32
#define WIDE (TILE + 4)

// x[token] = row `token` of `rows`, bytes as in the embedding table. Work-groups: tokens.
KERNEL embed(global const uchar* rows, uint stride, uint hidden, global float* x) {
    const uint token = get_group_id(0);
    for (uint o = get_local_id(0); o < hidden / 8; o += SIZE)
        store_columns(load_weights(rows + (ulong)token * stride, hidden, o), x + (ulong)token * hidden, o);
}

// The sum of LANES parts, by the first work-item of a row.
float lane_sum(local const float* parts, uint item) {
    float sum = 0.0f;
    for (uint i = 0; i < LANES; i++) sum += parts[item + i];
    return sum;
}

// y[first + r] = row r . v, or added to it. Work-groups: rows / ROWS.
KERNEL matvec(global const uchar* weights, const Rows rows, global const float* v, global float* y, uint first, uint add) {
    local float parts[SIZE];
    const uint item = get_local_id(0), lane = item % LANES, r = get_group_id(0) * ROWS + item / LANES;
    float8 sum = 0.0f;
    if (r < rows.count) {
        global const uchar* row = weights + row_at(rows, r);
        for (uint o = lane; o < rows.cols / 8; o += LANES)
            sum = FMA(load_weights(row, rows.cols, o), load_columns(v, o), sum);
    }
    parts[item] = sum8(sum);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane == 0 && r < rows.count) {
        const float product = lane_sum(parts, item);
        y[first + r] = add ? y[first + r] + product : product;
    }
}

// Columns k .. k + DEPTH of TILE rows as f32, column-major; zeros outside.
void unpack_rows(global const uchar* weights, const Rows rows, uint first, uint k, local float* to) {
    for (uint i = get_local_id(0); i < TILE * DEPTH / 8; i += SIZE) {
        const uint r = i / (DEPTH / 8), o = k / 8 + i % (DEPTH / 8);
        float8 octet = 0.0f;
        if (first + r < rows.count && o * 8 < rows.cols)
            octet = load_weights(weights + row_at(rows, first + r), rows.cols, o);
        float w[8];
        vstore8(octet, 0, w);
        for (uint j = 0; j < 8; j++) to[(column(o) + j % 4 + j / 4 * HALF_STEP - k) * WIDE + r] = w[j];
    }
}

// Numbers k .. k + DEPTH of TILE rows of `width`, column-major; zeros outside.
void unpack_numbers(global const float* v, uint first, uint count, uint k, uint end, uint width, local float* to) {
    for (uint i = get_local_id(0); i < TILE * DEPTH; i += SIZE) {
        const uint row = first + i / DEPTH, col = k + i % DEPTH;
        to[i % DEPTH * WIDE + i / DEPTH] = row < count && col < end ? v[(ulong)row * width + col] : 0.0f;
    }
}

// y[token][first + r] = row r . v[token] for all tokens, or added to it. Work-groups: tiles of rows x tiles of tokens.
KERNEL multiply(global const uchar* weights, const Rows rows, global const float* v, uint tokens, global float* y,
                uint first, uint width, uint add) {
    local float a[DEPTH * WIDE], b[DEPTH * WIDE];
    const uint row = get_group_id(0) * TILE, token = get_group_id(1) * TILE;
    const uint x = get_local_id(0) % 8 * 4, t = get_local_id(0) / 8 * 4;
    float4 sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint k = 0; k < rows.cols; k += DEPTH) {
        unpack_rows(weights, rows, row, k, b);
        unpack_numbers(v, token, tokens, k, rows.cols, rows.cols, a);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint d = 0; d < DEPTH; d++) {
            const float4 four = vload4(0, b + d * WIDE + x);
            for (uint i = 0; i < 4; i++) sum[i] = FMA((float4)(a[d * WIDE + t + i]), four, sum[i]);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (uint i = 0; i < 4; i++) {
        float of[4];
        vstore4(sum[i], 0, of);
        for (uint j = 0; j < 4; j++) {
            if (token + t + i >= tokens || row + x + j >= rows.count) continue;
            global float* to = y + (ulong)(token + t + i) * width + first + row + x + j;
            *to = add ? *to + of[j] : of[j];
        }
    }
}

// y[token][r] = SiLU(row r . v[token]) * (row r of `ups` . v[token]); as multiply.
KERNEL swiglu(global const uchar* weights, const Rows rows, ulong ups, global const float* v, uint tokens, global float* y,
              uint width) {
    local float a[DEPTH * WIDE], b[DEPTH * WIDE], c[DEPTH * WIDE];
    const uint row = get_group_id(0) * TILE, token = get_group_id(1) * TILE;
    const uint x = get_local_id(0) % 8 * 4, t = get_local_id(0) / 8 * 4;
    Rows up_rows = rows;
    up_rows.base = ups;
    float4 gate[4] = {0.0f, 0.0f, 0.0f, 0.0f}, up[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint k = 0; k < rows.cols; k += DEPTH) {
        unpack_rows(weights, rows, row, k, b);
        unpack_rows(weights, up_rows, row, k, c);
        unpack_numbers(v, token, tokens, k, rows.cols, rows.cols, a);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint d = 0; d < DEPTH; d++) {
            const float4 gates = vload4(0, b + d * WIDE + x), fours = vload4(0, c + d * WIDE + x);
            for (uint i = 0; i < 4; i++) {
                const float4 number = (float4)(a[d * WIDE + t + i]);
                gate[i] = FMA(number, gates, gate[i]);
                up[i] = FMA(number, fours, up[i]);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (uint i = 0; i < 4; i++) {
        float of[4], times[4];
        vstore4(gate[i], 0, of);
        vstore4(up[i], 0, times);
        for (uint j = 0; j < 4; j++)
            if (token + t + i < tokens && row + x + j < rows.count)
                y[(ulong)(token + t + i) * width + row + x + j] = silu(of[j]) * times[j];
    }
}

// x[token] += the sum of activations[token][n] * row n, n ascending, one fused multiply-add after another.
// Work-groups: tiles of columns x tiles of tokens.
KERNEL weigh(global const uchar* weights, const Rows rows, global const float* activations, uint width, uint tokens,
             global float* all) {
    local float a[DEPTH * WIDE], b[DEPTH * WIDE];
    const uint col = get_group_id(0) * TILE, token = get_group_id(1) * TILE;
    const uint x = get_local_id(0) % 8 * 4, t = get_local_id(0) / 8 * 4;
    float sum[4][4];
    for (uint i = 0; i < 4; i++)
        for (uint j = 0; j < 4; j++) {
            const bool inside = token + t + i < tokens && col + x + j < rows.cols;
            sum[i][j] = inside ? all[(ulong)(token + t + i) * rows.cols + col + x + j] : 0.0f;
        }
    for (uint n = 0; n < rows.count; n += DEPTH) {
        for (uint i = get_local_id(0); i < DEPTH * TILE / 8; i += SIZE) {
            const uint d = i / (TILE / 8), o = col / 8 + i % (TILE / 8);
            float8 octet = 0.0f;
            if (n + d < rows.count && o * 8 < rows.cols)
                octet = load_weights(weights + row_at(rows, n + d), rows.cols, o);
            local float* to = b + d * WIDE + column(o) - col;
            vstore4(octet.lo, 0, to);
            vstore4(octet.hi, 0, to + HALF_STEP);
        }
        unpack_numbers(activations, token, tokens, n, rows.count, width, a);
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint depth = min((uint)DEPTH, rows.count - n);
        for (uint d = 0; d < depth; d++)
            for (uint i = 0; i < 4; i++)
                for (uint j = 0; j < 4; j++)
                    sum[i][j] = FMA(a[d * WIDE + t + i], b[d * WIDE + x + j], sum[i][j]);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (uint i = 0; i < 4; i++)
        for (uint j = 0; j < 4; j++)
            if (token + t + i < tokens && col + x + j < rows.cols)
                all[(ulong)(token + t + i) * rows.cols + col + x + j] = sum[i][j];
}

// Neurons of a launch: side by side as `rows` tells of the first's gates, or, with a list, where its entries say:
// in `copied` if bit 63 is set, else in `kept`.
global const uchar* neuron(global const uchar* kept, global const uchar* copied, global const ulong* list, uint listed,
                           uint entries_at, const Rows rows, uint n) {
    if (!listed) return kept + row_at(rows, n);
    const ulong entry = list[entries_at + n];
    return (entry >> 63 ? copied : kept) + (entry & ~((ulong)1 << 63));
}

// activations[n] = SiLU(gate . h) * (up . h). Work-groups: neurons / ROWS.
KERNEL activate(global const uchar* kept, global const uchar* copied, global const ulong* list, uint listed,
                uint entries_at, const Rows rows, global const float* h, global float* activations) {
    local float gates[SIZE], ups[SIZE];
    const uint item = get_local_id(0), lane = item % LANES, n = get_group_id(0) * ROWS + item / LANES;
    float8 gate = 0.0f, up = 0.0f;
    if (n < rows.count) {
        global const uchar* row = neuron(kept, copied, list, listed, entries_at, rows, n);
        for (uint o = lane; o < rows.cols / 8; o += LANES) {
            const float8 x = load_columns(h, o);
            gate = FMA(load_weights(row, rows.cols, o), x, gate);
            up = FMA(load_weights(row + row_bytes(rows.cols), rows.cols, o), x, up);
        }
    }
    gates[item] = sum8(gate);
    ups[item] = sum8(up);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane == 0 && n < rows.count) activations[n] = silu(lane_sum(gates, item)) * lane_sum(ups, item);
}

// sums[l] += activations[n] * down of the neurons n with (first + n) % lanes == l, ascending.
// Work-groups: octets of a row / SIZE x lanes.
KERNEL combine(global const uchar* kept, global const uchar* copied, global const ulong* list, uint listed,
               uint entries_at, const Rows rows, global const float* activations, uint first, global float* sums) {
    const uint o = get_global_id(0), lane = get_group_id(1), lanes = get_num_groups(1);
    if (o >= rows.cols / 8) return;
    global float* to = sums + (ulong)lane * rows.cols;
    float8 sum = load_columns(to, o);
    for (uint n = (lane + lanes - first % lanes) % lanes; n < rows.count; n += lanes) {
        global const uchar* down = neuron(kept, copied, list, listed, entries_at, rows, n) + 2 * row_bytes(rows.cols);
        sum = FMA((float8)(activations[n]), load_weights(down, rows.cols, o), sum);
    }
    store_columns(sum, to, o);
}

// out[n] = |SiLU(gate . h) * (up . h)| * ||down|| of neurons whose gates are `rows`. Work-groups: neurons / ROWS.
KERNEL importance(global const uchar* weights, const Rows rows, global const float* h, global float* out) {
    local float gates[SIZE], ups[SIZE], downs[SIZE];
    const uint item = get_local_id(0), lane = item % LANES, n = get_group_id(0) * ROWS + item / LANES;
    float8 gate = 0.0f, up = 0.0f, down = 0.0f;
    if (n < rows.count) {
        global const uchar* row = weights + row_at(rows, n);
        const uint bytes = row_bytes(rows.cols);
        for (uint o = lane; o < rows.cols / 8; o += LANES) {
            const float8 x = load_columns(h, o), d = load_weights(row + 2 * bytes, rows.cols, o);
            gate = FMA(load_weights(row, rows.cols, o), x, gate);
            up = FMA(load_weights(row + bytes, rows.cols, o), x, up);
            down = FMA(d, d, down);
        }
    }
    gates[item] = sum8(gate);
    ups[item] = sum8(up);
    downs[item] = sum8(down);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane == 0 && n < rows.count)
        out[n] = fabs(silu(lane_sum(gates, item)) * lane_sum(ups, item)) * sqrt(lane_sum(downs, item));
}
