// Rotary positions, the KV cache and attention.
//
// The cache holds rows of head_dim numbers, f16 or q8_0: layer x (keys, values) x kv_heads x context. Attention goes over
// blocks of KEYS positions at fixed multiples, with a running maximum and sum for each query, so that a token's result does
// not depend on the other tokens of its pass. One token spreads over work-groups, CHUNK positions each, that are merged in
// order.

#define KEYS 32
#define CHUNK 64
#define NONE (~(uint)0)
#define LEAST -3e38f

typedef struct {
    uint kv_heads, context, row_bytes, quantised;
} Cache;

ulong cache_row(const Cache cache, uint layer, uint value, uint head, uint position) {
    return ((ulong)((2 * layer + value) * cache.kv_heads + head) * cache.context + position) * cache.row_bytes;
}

// Where a layer's vectors begin among all of them; NONE: there is none.
typedef struct {
    uint q_bias, k_bias, v_bias, q_norm, k_norm;
} Places;

// A row of the cache; q8_0 as weights: scale = largest / 127.
void store_row(const Cache cache, global uchar* to, local const float* from, uint head_dim) {
    for (uint i = get_local_id(0); i < head_dim; i += SIZE) {
        if (!cache.quantised) {
            vstore_half_rte(from[i], i, (global half*)to);
            continue;
        }
        float largest = 0.0f;
        for (uint j = i / GROUP * GROUP; j < i / GROUP * GROUP + GROUP; j++) largest = fmax(largest, fabs(from[j]));
        const ushort bits = to_half(largest / 127.0f);
        const float scale = half_bits(bits);
        const float q = scale > 0.0f ? rint(from[i] / scale) : 0.0f;
        ((global char*)to)[i] = (char)clamp(q, -127.0f, 127.0f);
        if (i % GROUP == 0) ((global ushort*)(to + head_dim))[i / GROUP] = bits;
    }
}

float cached(const Cache cache, global const uchar* row, uint head_dim, uint i) {
    if (!cache.quantised) return vload_half(i, (global const half*)row);
    return vload_half(i / GROUP, (global const half*)(row + head_dim)) * (float)((global const char*)row)[i];
}

// Biases, head norms and rotation of q and k; k and v go to the cache. q is divided by sqrt(head_dim). `turns` are a token's
// cosines, then its sines. Work-groups: heads of q, k and v x tokens. `head`: head_dim numbers.
KERNEL rotate_heads(global float* q, global const float* k, global const float* v, global const float* vectors,
                    const Places places, float epsilon, global const float* turns, uint heads, uint head_dim,
                    global uchar* data, const Cache cache, uint layer, uint first_position, local float* head) {
    const uint i = get_group_id(0), token = get_group_id(1), item = get_local_id(0);
    const bool query = i < heads, value = i >= heads + cache.kv_heads;
    const uint h = query ? i : (i - heads) % cache.kv_heads;
    const ulong at = ((ulong)token * (query ? heads : cache.kv_heads) + h) * head_dim;
    const uint bias = query ? places.q_bias : (value ? places.v_bias : places.k_bias);
    const uint gain = query ? places.q_norm : (value ? NONE : places.k_norm);
    global const float* from = (query ? q : (value ? v : k)) + at;
    for (uint j = item; j < head_dim; j += SIZE) head[j] = from[j] + (bias == NONE ? 0.0f : vectors[bias + h * head_dim + j]);
    barrier(CLK_LOCAL_MEM_FENCE);
    float inverse = 1.0f;
    if (gain != NONE) {
        float sum = 0.0f;
        for (uint j = 0; j < head_dim; j++) sum = FMA(head[j], head[j], sum);
        inverse = 1.0f / sqrt(sum / head_dim + epsilon);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float scale = query ? 1.0f / sqrt((float)head_dim) : 1.0f;
    const uint middle = head_dim / 2;
    for (uint j = item; j < middle; j += SIZE) {
        if (value) continue;
        float a = head[j] * inverse, b = head[j + middle] * inverse;
        if (gain != NONE) a *= vectors[gain + j], b *= vectors[gain + j + middle];
        const float cosine = turns[(ulong)token * head_dim + j], sine = turns[(ulong)token * head_dim + middle + j];
        head[j] = (a * cosine - b * sine) * scale;
        head[j + middle] = (b * cosine + a * sine) * scale;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (query) {
        for (uint j = item; j < head_dim; j += SIZE) q[at + j] = head[j];
    } else {
        store_row(cache, data + cache_row(cache, layer, value, h, first_position + token), head, head_dim);
    }
}

// KEYS rows of the cache from position `block` on, as f32; zeros from `end` on.
void load_keys(global const uchar* data, const Cache cache, uint layer, uint value, uint head, uint block, uint end,
               uint head_dim, local float* rows) {
    for (uint i = get_local_id(0); i < KEYS * head_dim; i += SIZE) {
        const uint at = block + i / head_dim;
        rows[i / head_dim * (head_dim + 1) + i % head_dim] =
            at < end ? cached(cache, data + cache_row(cache, layer, value, head, at), head_dim, i % head_dim) : 0.0f;
    }
}

// Attention of one token's query heads that share a key head. Work-groups: tokens x kv_heads x chunks. With one chunk the
// result replaces the queries, else `partials` gets maximum and sum of each head and then its weighted values.
// `held`: (2 group + KEYS) rows of head_dim + 1 numbers, and group x (KEYS + 3).
KERNEL attend(global float* q, global float* partials, uint heads, uint head_dim, global const uchar* data,
              const Cache cache, uint layer, uint first_position, uint window, local float* held) {
    const uint token = get_group_id(0), kv_head = get_group_id(1), chunks = get_num_groups(2), item = get_local_id(0);
    const uint group = heads / cache.kv_heads, position = first_position + token, wide = head_dim + 1;
    const uint first_seen = position + 1 > window ? position + 1 - window : 0;
    uint first = first_seen / KEYS * KEYS, end = position + 1;
    if (chunks > 1) {
        first = (first_seen / CHUNK + get_group_id(2)) * CHUNK;
        end = min(first + CHUNK, end);
    }
    local float* queries = held;
    local float* sums = queries + group * wide;
    local float* rows = sums + group * wide;
    local float* scores = rows + KEYS * wide;
    local float* maxima = scores + group * KEYS;
    local float* totals = maxima + group;
    local float* shrinks = totals + group;
    global float* mine = q + ((ulong)token * heads + kv_head * group) * head_dim;
    for (uint i = item; i < group * head_dim; i += SIZE) {
        queries[i / head_dim * wide + i % head_dim] = mine[i];
        sums[i / head_dim * wide + i % head_dim] = 0.0f;
    }
    for (uint g = item; g < group; g += SIZE) maxima[g] = LEAST, totals[g] = 0.0f;
    for (uint block = first; block < end; block += KEYS) {
        barrier(CLK_LOCAL_MEM_FENCE);
        load_keys(data, cache, layer, 0, kv_head, block, end, head_dim, rows);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = item; i < group * KEYS; i += SIZE) {
            const uint g = i / KEYS, key = i % KEYS;
            float score = 0.0f;
            for (uint c = 0; c < head_dim; c++) score = FMA(queries[g * wide + c], rows[key * wide + c], score);
            scores[i] = block + key >= first_seen && block + key < end ? score : LEAST;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint g = item; g < group; g += SIZE) {
            const float before = maxima[g];
            float largest = before, total = 0.0f;
            for (uint key = 0; key < KEYS; key++) largest = fmax(largest, scores[g * KEYS + key]);
            for (uint key = 0; key < KEYS; key++) {
                const float score = scores[g * KEYS + key];
                const float share = score > LEAST ? exp(score - largest) : 0.0f;
                scores[g * KEYS + key] = share;
                total += share;
            }
            const float shrink = exp(before - largest);
            totals[g] = totals[g] * shrink + total;
            maxima[g] = largest;
            shrinks[g] = shrink;
        }
        load_keys(data, cache, layer, 1, kv_head, block, end, head_dim, rows);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = item; i < group * head_dim; i += SIZE) {
            const uint g = i / head_dim, c = i % head_dim;
            float sum = sums[g * wide + c] * shrinks[g];
            for (uint key = 0; key < KEYS; key++) sum = FMA(scores[g * KEYS + key], rows[key * wide + c], sum);
            sums[g * wide + c] = sum;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    global float* partial = partials + ((ulong)kv_head * chunks + get_group_id(2)) * group * (head_dim + 2);
    for (uint i = item; i < group * head_dim; i += SIZE) {
        const uint g = i / head_dim, c = i % head_dim;
        if (chunks == 1)
            mine[i] = sums[g * wide + c] / totals[g];
        else
            partial[2 * group + i] = sums[g * wide + c];
    }
    if (chunks > 1)
        for (uint g = item; g < group; g += SIZE) partial[2 * g] = maxima[g], partial[2 * g + 1] = totals[g];
}

// Merges the chunks of one token, the first first. Work-groups: heads.
KERNEL merge(global float* q, global const float* partials, uint chunks, uint group, uint head_dim) {
    const uint head = get_group_id(0), g = head % group;
    const ulong step = group * (head_dim + 2);
    global const float* first = partials + head / group * chunks * step;
    float largest = LEAST;
    for (uint c = 0; c < chunks; c++) largest = fmax(largest, first[c * step + 2 * g]);
    for (uint i = get_local_id(0); i < head_dim; i += SIZE) {
        float sum = 0.0f, total = 0.0f;
        for (uint c = 0; c < chunks; c++) {
            const float share = exp(first[c * step + 2 * g] - largest);
            total += share * first[c * step + 2 * g + 1];
            sum += share * first[c * step + 2 * group + g * head_dim + i];
        }
        q[(ulong)head * head_dim + i] = sum / total;
    }
}
