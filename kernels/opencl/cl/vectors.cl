// What has no weights: norms, the end of an FFN, log-likelihoods.

// h[token] = x[first + token] / sqrt(mean(x^2) + epsilon) * gain. Work-groups: tokens.
KERNEL rms_norm(global const float* all, uint first, global const float* vectors, uint gain, global float* h, uint hidden,
                float epsilon) {
    local float parts[SIZE];
    const uint token = get_group_id(0), item = get_local_id(0);
    global const float* x = all + (ulong)(first + token) * hidden;
    float sum = 0.0f;
    for (uint i = item; i < hidden; i += SIZE) sum = FMA(x[i], x[i], sum);
    parts[item] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    sum = 0.0f;
    for (uint i = 0; i < SIZE; i++) sum += parts[i];
    const float scale = 1.0f / sqrt(sum / hidden + epsilon);
    for (uint i = item; i < hidden; i += SIZE) h[(ulong)token * hidden + i] = x[i] * scale * vectors[gain + i];
}

// to = x + the lanes of the FFN's sum; then, if there are any, the constant and the lanes of the stand-ins' sum.
// Work-groups: hidden / SIZE.
KERNEL add_lanes(global float* to, global const float* x, global const float* lanes, uint count,
                 global const float* stand_ins, uint stand_in_lanes, global const float* offset, uint hidden) {
    const uint i = get_global_id(0);
    if (i >= hidden) return;
    float sum = 0.0f;
    for (uint l = 0; l < count; l++) sum += lanes[(ulong)l * hidden + i];
    float result = x[i] + sum;
    if (stand_in_lanes > 0) {
        sum = 0.0f;
        for (uint l = 0; l < stand_in_lanes; l++) sum += stand_ins[(ulong)l * hidden + i];
        result += offset[i] + sum;
    }
    to[i] = result;
}

// What a token's logits have amounted to so far: the largest, and the sum of exponentials relative to it in two parts,
// as so many numbers need more digits than a float has.
typedef struct {
    float largest, high, low;
} Total;

// total += value * e^largest.
Total added(Total total, float largest, float value) {
    if (largest > total.largest) {
        const float shrink = exp(total.largest - largest);
        total.high *= shrink;
        total.low *= shrink;
        total.largest = largest;
    } else {
        value *= exp(largest - total.largest);
    }
    const float sum = total.high + value, back = sum - total.high;
    total.low += (total.high - (sum - back)) + (value - back);
    total.high = sum;
    return total;
}

// Log-likelihoods: `logits` are `rows` of the head from `first` on, for each scored token; chunks of SIZE rows ascending.
// Work-groups: tokens.
KERNEL score(global const float* logits, uint width, uint rows, uint first, global const uint* targets,
             global Total* totals, global float* target_logits, uint starts, uint ends, global float* nll) {
    local float both[SIZE];
    const uint token = get_group_id(0), item = get_local_id(0);
    global const float* mine = logits + (ulong)token * width;
    Total total = {-3e38f, 0.0f, 0.0f};
    if (!starts) total = totals[token];
    for (uint chunk = 0; chunk < rows; chunk += SIZE) {
        const uint r = chunk + item;
        const float logit = r < rows ? mine[r] : -3e38f;
        if (r < rows && first + r == targets[token]) target_logits[token] = logit;
        both[item] = logit;
        barrier(CLK_LOCAL_MEM_FENCE);
        float largest = both[0];
        for (uint i = 1; i < SIZE; i++) largest = fmax(largest, both[i]);
        barrier(CLK_LOCAL_MEM_FENCE);
        both[item] = r < rows ? exp(logit - largest) : 0.0f;
        barrier(CLK_LOCAL_MEM_FENCE);
        float sum = 0.0f;
        for (uint i = 0; i < SIZE; i++) sum += both[i];
        barrier(CLK_LOCAL_MEM_FENCE);
        total = added(total, largest, sum);
    }
    barrier(CLK_GLOBAL_MEM_FENCE);
    if (item == 0) {
        totals[token] = total;
        if (ends) nll[token] = log(total.high + total.low) + (total.largest - target_logits[token]);
    }
}
