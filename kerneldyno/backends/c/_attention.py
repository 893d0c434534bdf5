"""C text of attention that prefill and decode share: who sees whom, the weights of a block of keys, the product with the values.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867); Dao 2023, "FlashAttention-2"
(arXiv:2307.08691), algorithm 1: the sums are rescaled when the largest score grows, and divided once at the end.
"""

SHAPE = """
typedef struct {
    int64_t batch, heads, kv_heads, seq_q, seq_kv, head_dim, head_dim_v, causal, window, heads_first;
} shape;
// where a row of a tensor of `heads` heads begins, and the elements from one place of the sequence to the next
INLINE int64_t at(const shape *s, int64_t batch, int64_t head, int64_t place, int64_t heads, int64_t seq, int64_t width) {
    return (s->heads_first ? (batch * heads + head) * seq + place : (batch * seq + place) * heads + head) * width;
}
INLINE int64_t pitch_of(const shape *s, int64_t heads, int64_t width) { return s->heads_first ? width : heads * width; }
INLINE int64_t within(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
// the keys that a query sees: from low to below high; the last query stands at the last key
INLINE void visible(const shape *s, int64_t query, int64_t *low, int64_t *high) {
    int64_t place = query + s->seq_kv - s->seq_q;
    int64_t end = s->causal ? place + 1 : s->window ? place + s->window : s->seq_kv;
    *low = s->window ? within(place - s->window + 1, 0, s->seq_kv) : 0;
    *high = within(end, *low, s->seq_kv);
}
"""

# It follows `_vectors.EXP`. 2^x: minimax polynomial of degree 5 with p(0) = 1 on [-1/2, 1/2], fitted by least squares with Lawson's
# weights; 1.4 ulp with its rounding.
NUMBERS = """
// 2^x for x <= 0, within 2 ulp; 0 below -126, so that no result is subnormal, and for -inf
INLINE vf exp2_vector(vf x) {
    const float round = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
    vf shifted = x + round, r = x - (shifted - round);
    vf p = r * 0x1.5bba14p-10f + 0x1.3cea88p-7f;
    p = p * r + 0x1.c6b752p-5f;
    p = p * r + 0x1.ebf9bcp-3f;
    p = p * r + 0x1.62e42ap-1f;
    p = p * r + 1.0f;
    return (vf)(((vi)p + ((vi)shifted << 23)) & ~(vi)(x < -126.0f));
}
// Cephes tanhf.c (Moshier): below 0.625 a polynomial, since (1 - t) / (1 + t) loses there what 1 - t cancels
INLINE vf tanh_vector(vf x) {
    vi sign = (vi)x & INT32_MIN;
    vf size = (vf)((vi)x ^ sign), z = x * x;
    vf p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    p = p * z * size + size;
    vf t = exp2_vector(size * -2.88539008177793f), far = (1.0f - t) / (1.0f + t);
    vi near = size < 0.625f;
    return (vf)((((vi)p & near) | ((vi)far & ~near)) | sign);
}
"""

# A tile is some rows (queries of a head) with what is known of them so far. Needs ROWS, MR, NV, NR, BN (keys of a block) and KU.
TILE = """
enum { PITCH = BN + 16 };  // of the scores: rows do not fall on the same lines of the cache
typedef struct {
    int64_t rows, width;             // rows that exist; floats of a row of sums, whole panels
    int64_t low[ROWS], high[ROWS];   // the keys that each row sees
    int64_t from[ROWS], to[ROWS];    // of each register tile of rows: the keys of this block that any of them sees
    float top[ROWS], total[ROWS], decay[ROWS];
    float *q, *scores, *sums;
} tile;

static void begin(tile *t) {
    int64_t padded = (t->rows + MR - 1) / MR * MR;
    for (int64_t r = 0; r < padded; r++) { t->top[r] = -INFINITY; t->total[r] = 0; }
    for (int64_t r = t->rows; r < ROWS; r++) t->low[r] = t->high[r] = 0;
    memset(t->sums, 0, padded * t->width * sizeof(float));
}
// which keys of the block at `start` each register tile of rows needs; none where from == to
static void limit(tile *t, int64_t start) {
    for (int64_t r = 0; r < t->rows; r += MR) {
        int64_t from = BN, to = 0;
        for (int64_t i = r; i < LEAST(r + MR, t->rows); i++) {
            int64_t low = within(t->low[i] - start, 0, BN), high = within(t->high[i] - start, 0, BN);
            if (low < high) { from = LEAST(from, low); to = high > to ? high : to; }
        }
        t->from[r] = LEAST(from, to);
        t->to[r] = to;
    }
}
// c = a b, or c = c decay + a b, for MR rows of a and a panel of b
static __attribute__((noinline)) void multiply(const float *a, int64_t a_pitch, const float *b, float *c, int64_t c_pitch, int64_t depth,
                                               const float *decay) {
    const float *line[MR];
    EACH(i, MR) line[i] = a + i * a_pitch;
    vf sum[MR][NV];
    EACH(i, MR) EACH(j, NV) sum[i][j] = splat(0);
    int64_t p = 0;
    for (; p + KU <= depth; p += KU)
        EACH(u, KU) {
            vf right[NV];
            EACH(j, NV) memcpy(&right[j], b + (p + u) * NR + j * W, sizeof(vf));
            EACH(i, MR) EACH(j, NV) sum[i][j] += line[i][p + u] * right[j];
        }
    for (; p < depth; p++)
        EACH(j, NV) {
            vf right;
            memcpy(&right, b + p * NR + j * W, sizeof right);
            EACH(i, MR) sum[i][j] += line[i][p] * right;
        }
    EACH(i, MR)
        EACH(j, NV) {
            float *to = c + i * c_pitch + j * W;
            if (decay) {
                vf before;
                memcpy(&before, to, sizeof before);
                sum[i][j] += before * decay[i];
            }
            memcpy(to, &sum[i][j], sizeof(vf));
        }
}
// scores become weights, 2^(score - largest so far); hidden ones 0. A cap comes with the scores divided by it.
static void weigh(tile *t, int64_t start, float cap) {
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t from = t->from[r / MR * MR] / W * W, to = (t->to[r / MR * MR] + W - 1) / W * W;
        if (from >= to) continue;
        int64_t low = within(t->low[r] - start, from, to), high = within(t->high[r] - start, low, to);
        float *s = t->scores + r * PITCH;
        if (cap > 0)
            for (int64_t j = from; j < to; j += W) {
                vf v;
                memcpy(&v, s + j, sizeof v);
                v = tanh_vector(v) * cap;
                memcpy(s + j, &v, sizeof v);
            }
        for (int64_t j = from; j < low; j++) s[j] = -INFINITY;
        for (int64_t j = high; j < to; j++) s[j] = -INFINITY;
        vf tops[2] = {splat(t->top[r]), splat(t->top[r])};  // two chains: one alone would wait for its own latency
        for (int64_t j = from; j < to; j += W) {
            vf v;
            memcpy(&v, s + j, sizeof v);
            tops[j / W % 2] = larger(v, tops[j / W % 2]);
        }
        float top = largest_lane(larger(tops[0], tops[1])), base = top == -INFINITY ? 0 : top;  // -inf - -inf would be NaN
        float decay = exp2_vector(splat(t->top[r] - base))[0];
        vf total = splat(0);
        for (int64_t j = from; j < to; j += W) {
            vf v;
            memcpy(&v, s + j, sizeof v);
            v = exp2_vector(v - base);
            memcpy(s + j, &v, sizeof v);
            total += v;
        }
        t->top[r] = top;
        t->total[r] = t->total[r] * decay + sum_lanes(total);
        t->decay[r] = decay;
    }
}
// sums = sums decay + weights values; panels of values begin `pitch` floats apart, the block's first key at `values`
static void add_values(tile *t, const float *values, int64_t pitch) {
    for (int64_t j = 0; j < t->width; j += NR, values += pitch)
        for (int64_t r = 0; r < t->rows; r += MR) {
            int64_t from = t->from[r], to = t->to[r];
            if (from < to)
                multiply(t->scores + r * PITCH + from, PITCH, values + from * NR, t->sums + r * t->width + j, t->width, to - from,
                         t->decay + r);
        }
}
// one row of the answer, from its sums; 0 and -inf where it sees no key
static void finish(const float *sums, float top, float total, element *o, float *lse, int64_t width) {
    float factor = total > 0 ? 1 / total : 0;
    for (int64_t j = 0; j < width; j += W) {
        vf v;
        memcpy(&v, sums + j, sizeof v);
        v *= factor;
        if (j + W <= width) store(o + j, v);
        else store_part(o + j, v, width - j);
    }
    if (lse) *lse = total > 0 ? (top + log2f(total)) * 0.693147180559945f : -INFINITY;
}
"""

PREFILL = """
void attention(const element *q, const element *k, const element *v, element *o, float *lse, const shape *s, const float *numbers,
               float *keys, float *values, float *memory, int64_t pitch) {{
    const int64_t d = s->head_dim, dv = s->head_dim_v, padded = (d + W - 1) / W * W, width = (dv + NR - 1) / NR * NR;
    const int64_t panels = (s->seq_kv + NR - 1) / NR, lines = panels * NR, group = s->heads / s->kv_heads;
    const int64_t k_pitch = pitch_of(s, s->kv_heads, d), v_pitch = pitch_of(s, s->kv_heads, dv);
    const int64_t tiles = (s->seq_q + BM - 1) / BM;
    int64_t first, end, unused;
    visible(s, 0, &first, &unused);
    visible(s, s->seq_q - 1, &unused, &end);
    #pragma omp parallel num_threads({threads})
    {{
        // all keys and values that are seen become fp32 panels of NR keys or of NR elements, once for all tiles of queries
        #pragma omp for collapse(2)
        for (int64_t pair = 0; pair < s->batch * s->kv_heads; pair++)
            for (int64_t panel = 0; panel < panels; panel++) {{
                int64_t key = panel * NR, count = LEAST(NR, s->seq_kv - key), batch = pair / s->kv_heads, head = pair % s->kv_heads;
                if (key + NR <= first || key >= end) continue;
                const element *from = k + at(s, batch, head, key, s->kv_heads, s->seq_kv, d);
                pack_rows(from, k_pitch, count, NR, d, d, keys + (pair * lines + key) * d);
                const element *value = v + at(s, batch, head, key, s->kv_heads, s->seq_kv, dv);
                for (int64_t j = 0; j < width; j += NR)
                    pack_columns(value + j, v_pitch, dv - j, count, NR, values + pair * lines * width + (j * panels + key) * NR);
            }}
        tile t = {{.width = width, .q = memory + omp_get_thread_num() * pitch}};
        t.scores = t.q + BM * padded;
        t.sums = t.scores + BM * PITCH;
        #pragma omp for schedule({schedule}) nowait
        for (int64_t item = 0; item < s->batch * s->heads * tiles; item++) {{
            // the last queries first: under a causal mask they see the most keys, and the short tiles fill the gaps at the end
            int64_t i0 = (tiles - 1 - item % tiles) * BM, batch = item / tiles / s->heads, head = item / tiles % s->heads;
            int64_t pair = batch * s->kv_heads + head / group;
            t.rows = LEAST(BM, s->seq_q - i0);
            begin(&t);
            for (int64_t r = 0; r < t.rows; r++) {{
                widen_row(q + at(s, batch, head, i0 + r, s->heads, s->seq_q, d), d, padded, numbers[0], t.q + r * padded);
                visible(s, i0 + r, &t.low[r], &t.high[r]);
            }}
            for (int64_t r = t.rows; r % MR; r++) memset(t.q + r * padded, 0, padded * sizeof(float));
            for (int64_t start = t.low[0] / NR * NR; start < t.high[t.rows - 1]; start += BN) {{
                limit(&t, start);
                for (int64_t j = 0; j < BN; j += NR)
                    for (int64_t r = 0; r < t.rows; r += MR)
                        if (j < t.to[r] && j + NR > t.from[r])
                            multiply(t.q + r * padded, padded, keys + (pair * lines + start + j) * d, t.scores + r * PITCH + j, PITCH, d,
                                     NULL);
                weigh(&t, start, numbers[1]);
                add_values(&t, values + pair * lines * width + start * NR, lines * NR);
            }}
            for (int64_t r = 0; r < t.rows; r++)
                finish(t.sums + r * width, t.top[r], t.total[r], o + at(s, batch, head, i0 + r, s->heads, s->seq_q, dv),
                       lse ? lse + (batch * s->heads + head) * s->seq_q + i0 + r : NULL, dv);
        }}
    }}
}}
"""

# The rows of a tile are the queries of all heads that share keys, so that a key is read once for them; keys and values are read where
# they lie (a panel would be written and read for one use). Parts of a split go to `parts`: sums of all rows, then tops, then totals.
DECODE = """
void attention(const element *q, const element *k, const element *v, element *o, float *lse, const shape *s, const float *numbers,
               float *parts, float *memory, int64_t pitch) {{
    const int64_t d = s->head_dim, dv = s->head_dim_v, padded = (d + W - 1) / W * W, width = (dv + NR - 1) / NR * NR;
    const int64_t group = s->heads / s->kv_heads, rows = group * s->seq_q, pairs = s->batch * s->kv_heads, part = rows * (width + 2);
    const int64_t k_pitch = pitch_of(s, s->kv_heads, d), v_pitch = pitch_of(s, s->kv_heads, dv);
    int64_t first, end, unused;
    visible(s, 0, &first, &unused);
    visible(s, s->seq_q - 1, &unused, &end);
    if (end < first) end = first;
    #pragma omp parallel num_threads({threads})
    {{
        tile t = {{.rows = rows, .width = width, .q = memory + omp_get_thread_num() * pitch}};
        t.scores = t.q + ROWS * padded;
        t.sums = t.scores + ROWS * PITCH;
        float *values = t.sums + ROWS * width;
        #pragma omp for schedule({schedule})
        for (int64_t item = 0; item < pairs * SPLITS; item++) {{
            int64_t pair = item / SPLITS, split = item % SPLITS, batch = pair / s->kv_heads, head = pair % s->kv_heads;
            int64_t from = first + (end - first) * split / SPLITS, to = first + (end - first) * (split + 1) / SPLITS;
            begin(&t);
            memset(t.q + rows * padded, 0, PAD * padded * sizeof(float));
            for (int64_t r = 0; r < rows; r++) {{
                int64_t query = r % s->seq_q, place = at(s, batch, head * group + r / s->seq_q, query, s->heads, s->seq_q, d);
                widen_row(q + place, d, padded, numbers[0], t.q + r * padded);
                visible(s, query, &t.low[r], &t.high[r]);
                t.low[r] = within(t.low[r], from, to);
                t.high[r] = within(t.high[r], from, to);
            }}
            for (int64_t start = from; start < to; start += BN) {{
                int64_t count = LEAST(BN, to - start);
                const element *key = k + at(s, batch, head, start, s->kv_heads, s->seq_kv, d);
                const element *value = v + at(s, batch, head, start, s->kv_heads, s->seq_kv, dv);
                limit(&t, start);
                for (int64_t j = 0; j < count; j += 4)
                    for (int64_t r = 0; r < rows; r += DR)
                        dots(t.q + r * padded, padded, key + j * k_pitch, k_pitch, count - j, d, t.scores + r * PITCH + j, PITCH);
                weigh(&t, start, numbers[1]);
                for (int64_t j = 0; j < width; j += NR)
                    pack_columns(value + j, v_pitch, dv - j, count, count, values + j * BN);
                add_values(&t, values, BN * NR);
            }}
            if (SPLITS > 1) {{
                float *mine = parts + item * part;
                memcpy(mine, t.sums, rows * width * sizeof(float));
                memcpy(mine + rows * width, t.top, rows * sizeof(float));
                memcpy(mine + rows * (width + 1), t.total, rows * sizeof(float));
            }} else
                for (int64_t r = 0; r < rows; r++) {{
                    int64_t mine = head * group + r / s->seq_q, query = r % s->seq_q;
                    finish(t.sums + r * width, t.top[r], t.total[r], o + at(s, batch, mine, query, s->heads, s->seq_q, dv),
                           lse ? lse + (batch * s->heads + mine) * s->seq_q + query : NULL, dv);
                }}
        }}
        #pragma omp for
        for (int64_t line = 0; line < (SPLITS > 1 ? pairs * rows : 0); line++) {{
            int64_t pair = line / rows, r = line % rows, batch = pair / s->kv_heads, head = pair % s->kv_heads * group + r / s->seq_q;
            const float *of = parts + pair * SPLITS * part;
            float top = -INFINITY, total = 0;
            for (int i = 0; i < SPLITS; i++) top = fmaxf(top, of[i * part + rows * width + r]);
            memset(t.sums, 0, width * sizeof(float));
            for (int i = 0; i < SPLITS; i++) {{
                float peak = of[i * part + rows * width + r];
                if (peak == -INFINITY) continue;  // it saw no key
                float factor = exp2f(peak - top);
                total += of[i * part + rows * (width + 1) + r] * factor;
                for (int64_t j = 0; j < width; j++) t.sums[j] += of[i * part + r * width + j] * factor;
            }}
            finish(t.sums, top, total, o + at(s, batch, head, r % s->seq_q, s->heads, s->seq_q, dv),
                   lse ? lse + (batch * s->heads + head) * s->seq_q + r % s->seq_q : NULL, dv);
        }}
    }}
}}
"""
