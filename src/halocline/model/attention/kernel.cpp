// Attention over paged K and V on a CPU. No page is ever gathered into a copy of the whole context.
//
// A step's work is cut into items: some rows of one segment (a row is one query token of one head; all rows of an item
// share their KV head) times a range of positions. Each item walks its positions in blocks of BLOCK keys, with the
// softmax kept online (running maximum m, sum l, unnormalised output o). Two inner loops:
//
//   few rows (decode)     a key is read once and multiplied with every row; vectors run along the head's dimension
//   many rows (prefill)   vectors run across rows: s[key][row] += k[key][d] * q[d][row], register-blocked
//
// Ranges are cut at fixed multiples of positions, so a request's result does not depend on who else is in the step,
// nor on the number of threads. Where a range was cut, the parts are joined at the end.

#include "simd.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int BLOCK = 64;          // keys per block of the online softmax
constexpr int FEW = 8;             // up to so many rows take the first loop
constexpr int SPLIT_FEW = 512;     // positions per item
constexpr int SPLIT_MANY = 4096;
constexpr int AHEAD = 6;           // keys prefetched ahead
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST_VECTORS = 4, KEYS = 6, ROWS = 8;
#else
constexpr int MOST_VECTORS = 2, KEYS = 4, ROWS = 4;
#endif

enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3 };

}  // namespace

extern "C" {

// K and V of one layer. Strides are in elements; within a page K is (page_tokens, kv_heads, k_dim), V likewise.
struct Layer {
    void *k, *v;
    int64_t k_page_stride, v_page_stride;
    int32_t page_tokens, kv_heads, k_dim, v_dim, type;
    int32_t window_tokens, chunk_tokens;  // 0: none
};

// The step, as one pool sees it (AttentionStep and PoolFacts).
struct Step {
    const int32_t *query_starts, *starts, *pages, *page_starts, *first_page;
    const int64_t *write_rows, *write_pages, *write_slots;  // null rows: all tokens, in their order
    int32_t segments, tokens, writes;
};

// One layer's query and new K and V: (rows, heads, dim) with unit stride along dim. Null keys: nothing is written.
struct Call {
    const void *query, *key, *value, *sinks;
    void* output;  // (tokens, heads, v_dim), contiguous, of the query's type
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    double scaling, softcap;  // softcap 0: none
    int32_t heads, query_type, new_type, sinks_type, threads;
};

}  // extern "C"

namespace {

double read_one(const void* p, int type, int64_t i) {
    switch (type) {
        case FLOAT32: return static_cast<const float*>(p)[i];
        case BFLOAT16: return to_float(static_cast<const bf16*>(p)[i]);
        case FLOAT16: return to_float(static_cast<const fp16*>(p)[i]);
        default: return static_cast<const double*>(p)[i];
    }
}

template <class From, class To> void copy_row(const From* from, To* to, int count) {
    for (int i = 0; i < count; i++) from_float(to_float(from[i]), to[i]);
}

// Convert `count` elements at `from` (of runtime type) to `to`.
template <class To> void read_row(const void* from, int type, int64_t offset, To* to, int count) {
    switch (type) {
        case FLOAT32: return copy_row(static_cast<const float*>(from) + offset, to, count);
        case BFLOAT16: return copy_row(static_cast<const bf16*>(from) + offset, to, count);
        case FLOAT16: return copy_row(static_cast<const fp16*>(from) + offset, to, count);
        default: return copy_row(static_cast<const double*>(from) + offset, to, count);
    }
}

template <class From> void write_row(const From* from, void* to, int type, int64_t offset, int count) {
    switch (type) {
        case FLOAT32: return copy_row(from, static_cast<float*>(to) + offset, count);
        case BFLOAT16: return copy_row(from, static_cast<bf16*>(to) + offset, count);
        case FLOAT16: return copy_row(from, static_cast<fp16*>(to) + offset, count);
        default: return copy_row(from, static_cast<double*>(to) + offset, count);
    }
}

int lower_bound(const Layer& layer, int position) {
    if (layer.window_tokens) return std::max(0, position - layer.window_tokens + 1);
    if (layer.chunk_tokens) return position / layer.chunk_tokens * layer.chunk_tokens;
    return 0;
}

// Rows [token, token + tokens) x heads [head, head + heads) of a segment, times positions [low, high).
struct Item {
    int segment, token, tokens, kv_head, head, heads, low, high;
    int part, parts;  // this is the part-th of the parts that its rows were cut into
    int64_t partial;  // where its o, m and l go in the partial results; unused when it is the only part
    int rows() const { return tokens * heads; }
};

int padded(int count, int unit) { return (count + unit - 1) / unit * unit; }

template <class A> std::vector<Item> make_items(const Layer& layer, const Step& step, const Call& call, int64_t& partials) {
    std::vector<Item> items;
    const int group = call.heads / layer.kv_heads, most_rows = MOST_VECTORS * lanes<A>;
    const int heads_each = std::min(group, most_rows), tokens_each = std::max(1, most_rows / heads_each);
    partials = 0;
    for (int s = 0; s < step.segments; s++) {
        const int count = step.query_starts[s + 1] - step.query_starts[s];
        for (int t = 0; t < count; t += tokens_each) {
            const int tokens = std::min(tokens_each, count - t), first = step.starts[s] + t;
            const int low = lower_bound(layer, first), high = first + tokens;
            const int split = tokens * heads_each <= FEW ? SPLIT_FEW : SPLIT_MANY;
            const int parts = (high - 1) / split - low / split + 1;
            for (int kv = 0; kv < layer.kv_heads; kv++)
                for (int h = 0; h < group; h += heads_each) {
                    Item item{s, t, tokens, kv, kv * group + h, std::min(heads_each, group - h), 0, 0, 0, parts, 0};
                    for (item.part = 0; item.part < parts; item.part++) {
                        const int from = (low / split + item.part) * split;
                        item.low = std::max(low, from), item.high = std::min(high, from + split);
                        item.partial = partials;
                        if (parts > 1) partials += int64_t(item.rows()) * (layer.v_dim + 2);
                        items.push_back(item);
                    }
                }
        }
    }
    return items;
}

// What a thread works in; grows, never shrinks.
template <class A, class T> struct Scratch {
    std::vector<A> q, o, s, k, v, m, l, fix;
    std::vector<int32_t> lows, highs;
    std::vector<const T*> keys, values;
    // Rows are padded to whole vectors so that a vector load past the last one stays inside.
    A* aligned(std::vector<A>& store, size_t count) {
        if (store.size() < count + lanes<A>) store.resize(count + lanes<A>);
        const size_t off = reinterpret_cast<uintptr_t>(store.data()) % VECTOR_BYTES;
        return store.data() + (off ? (VECTOR_BYTES - off) / sizeof(A) : 0);
    }
};

template <class A, class T> struct Worker {
    const Layer& layer;
    const Step& step;
    const Call& call;
    Scratch<A, T>& scratch;
    static constexpr int N = lanes<A>;
    using V = Vec<A>;

    int k_pad = 0, v_pad = 0, count = 0, rows = 0;
    A *q = nullptr, *o = nullptr, *s = nullptr, *m = nullptr, *l = nullptr, *fix = nullptr;

    Worker(const Layer& a, const Step& b, const Call& c, Scratch<A, T>& d) : layer(a), step(b), call(c), scratch(d) {}

    // ---- shared by both loops ----

    void find_keys(const Item& item) {
        const T *k = static_cast<const T*>(layer.k), *v = static_cast<const T*>(layer.v);
        const int32_t* pages = step.pages + step.page_starts[item.segment];
        count = item.high - item.low;
        scratch.keys.resize(count), scratch.values.resize(count);
        const int64_t k_row = int64_t(layer.kv_heads) * layer.k_dim, v_row = int64_t(layer.kv_heads) * layer.v_dim;
        for (int i = 0; i < count;) {
            const int position = item.low + i, index = position / layer.page_tokens, slot = position % layer.page_tokens;
            const int64_t page = pages[index - step.first_page[item.segment]];
            const T* kp = k + page * layer.k_page_stride + slot * k_row + int64_t(item.kv_head) * layer.k_dim;
            const T* vp = v + page * layer.v_page_stride + slot * v_row + int64_t(item.kv_head) * layer.v_dim;
            for (int j = slot; j < layer.page_tokens && i < count; j++, i++, kp += k_row, vp += v_row)
                scratch.keys[i] = kp, scratch.values[i] = vp;
        }
    }

    // Row r is token r / heads and head r % heads. Sinks are the softmax's first term, so they start m and l.
    void start(const Item& item, int row_pad) {
        rows = item.rows();
        k_pad = padded(layer.k_dim, N), v_pad = padded(layer.v_dim, 4 * N);
        o = scratch.aligned(scratch.o, size_t(row_pad) * v_pad);
        m = scratch.aligned(scratch.m, row_pad), l = scratch.aligned(scratch.l, row_pad);
        fix = scratch.aligned(scratch.fix, row_pad);
        scratch.lows.resize(row_pad), scratch.highs.resize(row_pad);
        std::fill(o, o + size_t(row_pad) * v_pad, A(0));
        for (int r = 0; r < row_pad; r++) {
            const bool real = r < rows, sinks = real && call.sinks && item.part == 0;
            const int position = step.starts[item.segment] + item.token + (real ? r / item.heads : 0);
            m[r] = sinks ? A(read_one(call.sinks, call.sinks_type, item.head + r % item.heads)) : minus_infinity<A>;
            l[r] = sinks ? A(1) : A(0);
            scratch.lows[r] = std::max(lower_bound(layer, position), item.low) - item.low;
            scratch.highs[r] = std::min(position + 1, item.high) - item.low;  // may be at or below the low: nothing
        }
    }

    void load_query(const Item& item, int r, A* to) const {
        const int64_t row = step.query_starts[item.segment] + item.token + r / item.heads;
        const int64_t offset = row * call.query_row + (item.head + r % item.heads) * call.query_head;
        read_row(call.query, call.query_type, offset, to, layer.k_dim);
        for (int d = 0; d < layer.k_dim; d++) to[d] *= A(call.scaling);
    }

    void finish(const Item& item, A* partials) const {
        for (int r = 0; r < rows; r++) {
            A* out = o + size_t(r) * v_pad;
            if (item.parts > 1) {
                A* to = partials + item.partial + int64_t(r) * (layer.v_dim + 2);
                to[0] = m[r], to[1] = l[r];
                std::copy(out, out + layer.v_dim, to + 2);
            } else {
                const A scale = A(1) / l[r];
                for (int d = 0; d < layer.v_dim; d++) out[d] *= scale;
                write_output(item, r, out);
            }
        }
    }

    void write_output(const Item& item, int r, const A* from) const {
        const int64_t row = step.query_starts[item.segment] + item.token + r / item.heads;
        const int64_t offset = (row * call.heads + item.head + r % item.heads) * layer.v_dim;
        write_row(from, call.output, call.query_type, offset, layer.v_dim);
    }

    V cap(V x) const {
        const A c = A(call.softcap);
        return c == A(0) ? x : tanh_v(x / c) * c;
    }

    // ---- few rows: s is [row][BLOCK] ----

    void few(const Item& item, A* partials) {
        find_keys(item);
        start(item, FEW);
        q = scratch.aligned(scratch.q, size_t(FEW) * k_pad), s = scratch.aligned(scratch.s, size_t(FEW) * BLOCK);
        for (int r = 0; r < rows; r++) {
            load_query(item, r, q + size_t(r) * k_pad);
            std::fill(q + size_t(r) * k_pad + layer.k_dim, q + size_t(r + 1) * k_pad, A(0));
        }
        for (int base = 0; base < count; base += BLOCK) {
            const int n = std::min(BLOCK, count - base);
            int r = 0;
            for (; r + 4 <= rows; r += 4) dot<4, 2>(r, base, n);
            for (; r + 2 <= rows; r += 2) dot<2, 4>(r, base, n);
            for (; r < rows; r++) dot<1, 4>(r, base, n);
            for (r = 0; r < rows; r++) soften(r, base, n);
            for (r = 0; r + 4 <= rows; r += 4) weigh<4>(r, base, n);
            for (; r + 2 <= rows; r += 2) weigh<2>(r, base, n);
            for (; r < rows; r++) weigh<1>(r, base, n);
        }
        finish(item, partials);
    }

    template <int R, int K> INLINE void dot_keys(int r, int base, int j) {
        const T* k[K];
        for (int i = 0; i < K; i++) k[i] = scratch.keys[base + j + i];
        V acc[K][R] = {};
        const A* at = q + size_t(r) * k_pad;
        int d = 0;
        for (; d + N <= layer.k_dim; d += N)
            for (int i = 0; i < K; i++) {
                const V x = load<A>(k[i] + d);
                for (int a = 0; a < R; a++) acc[i][a] += x * load_own(at + size_t(a) * k_pad + d);
            }
        if (d < layer.k_dim)
            for (int i = 0; i < K; i++) {
                const V x = load_tail<A>(k[i] + d, layer.k_dim - d);
                for (int a = 0; a < R; a++) acc[i][a] += x * load_own(at + size_t(a) * k_pad + d);
            }
        for (int i = 0; i < K; i++)
            for (int a = 0; a < R; a++) s[(r + a) * BLOCK + j + i] = sum(acc[i][a]);
    }

    template <int R, int K> void dot(int r, int base, int n) {
        int j = 0;
        for (; j + K <= n; j += K) {
            if (r == 0) prefetch(base + j, K);
            dot_keys<R, K>(r, base, j);
        }
        for (; j < n; j++) dot_keys<R, 1>(r, base, j);
    }

    // The keys a little ahead (pages lie anywhere, the hardware cannot guess), and the values of this block.
    INLINE void prefetch(int at, int keys) const {
        for (int i = 0; i < keys; i++) {
            const char* k = reinterpret_cast<const char*>(scratch.keys[std::min(at + AHEAD + i, count - 1)]);
            const char* v = reinterpret_cast<const char*>(scratch.values[at + i]);
            for (size_t b = 0; b < layer.k_dim * sizeof(T); b += 64) __builtin_prefetch(k + b);
            for (size_t b = 0; b < layer.v_dim * sizeof(T); b += 64) __builtin_prefetch(v + b);
        }
    }

    // Scores of one row become probabilities; fix[r] is what the output so far must be multiplied with.
    void soften(int r, int base, int n) {
        A* row = s + r * BLOCK;
        const int low = scratch.lows[r] - base, high = scratch.highs[r] - base;
        for (int j = n; j < padded(n, N); j++) row[j] = minus_infinity<A>;
        V top = splat(minus_infinity<A>);
        for (int j = 0; j < n; j += N) {
            V x = cap(load_own(row + j));
            store(row + j, x);
        }
        for (int j = 0; j < std::min(low, n); j++) row[j] = minus_infinity<A>;
        for (int j = std::max(high, 0); j < padded(n, N); j++) row[j] = minus_infinity<A>;
        for (int j = 0; j < n; j += N) top = larger<A>(top, load_own(row + j));
        A most = m[r];
        for (int i = 0; i < N; i++) most = std::max(most, top[i]);
        if (most == minus_infinity<A>) {  // nothing seen yet: exp(-inf - -inf) would be NaN
            std::fill(row, row + padded(n, N), A(0));
            fix[r] = A(1);
            return;
        }
        V total{};
        for (int j = 0; j < n; j += N) {
            const V p = exp_v(load_own(row + j) - most);
            total += p;
            store(row + j, p);
        }
        fix[r] = m[r] == minus_infinity<A> ? A(0) : std::exp(m[r] - most);
        l[r] = l[r] * fix[r] + sum(total);
        m[r] = most;
    }

    template <int R> void weigh(int r, int base, int n) {
        int d = 0;
        for (; d + 4 * N <= layer.v_dim; d += 4 * N) weigh_at<R, 4, false>(r, base, n, d);
        for (; d + N <= layer.v_dim; d += N) weigh_at<R, 1, false>(r, base, n, d);
        if (d < layer.v_dim) weigh_at<R, 1, true>(r, base, n, d);
    }

    template <int R, int D, bool TAIL> INLINE void weigh_at(int r, int base, int n, int d) {
        V acc[R][D];
        for (int a = 0; a < R; a++)
            for (int i = 0; i < D; i++) acc[a][i] = load_own(o + size_t(r + a) * v_pad + d + i * N) * fix[r + a];
        for (int j = 0; j < n; j++) {
            const T* v = scratch.values[base + j] + d;
            V x[D];
            for (int i = 0; i < D; i++) x[i] = TAIL ? load_tail<A>(v, layer.v_dim - d) : load<A>(v + i * N);
            for (int a = 0; a < R; a++) {
                const A p = s[(r + a) * BLOCK + j];
                for (int i = 0; i < D; i++) acc[a][i] += x[i] * p;
            }
        }
        for (int a = 0; a < R; a++)
            for (int i = 0; i < D; i++) store(o + size_t(r + a) * v_pad + d + i * N, acc[a][i]);
    }

    // ---- many rows: q is [k_dim][rows], s is [key][rows], vectors run across rows ----

    template <int VECTORS> void many(const Item& item, A* partials) {
        constexpr int wide = VECTORS * N;
        find_keys(item);
        start(item, wide);
        q = scratch.aligned(scratch.q, size_t(layer.k_dim) * wide + layer.k_dim);
        s = scratch.aligned(scratch.s, size_t(BLOCK) * wide);
        std::fill(q, q + size_t(layer.k_dim) * wide, A(0));
        A* row = q + size_t(layer.k_dim) * wide;
        for (int r = 0; r < rows; r++) {
            load_query(item, r, row);
            for (int d = 0; d < layer.k_dim; d++) q[size_t(d) * wide + r] = row[d];
        }
        const A *k[BLOCK], *v[BLOCK];
        for (int base = 0; base < count; base += BLOCK) {
            const int n = std::min(BLOCK, count - base);
            convert(scratch.keys.data() + base, n, layer.k_dim, k_pad, scratch.k, k);
            convert(scratch.values.data() + base, n, layer.v_dim, v_pad, scratch.v, v);
            int j = 0;
            for (; j + KEYS <= n; j += KEYS) multiply<VECTORS, KEYS>(k + j, j);
            for (; j < n; j++) multiply<VECTORS, 1>(k + j, j);
            for (int i = 0; i < VECTORS; i++) soften_rows<VECTORS>(i, base, n);
            for (int r = 0; r < wide; r += ROWS)
                if (r < rows) accumulate<VECTORS>(r, v, n);
        }
        finish(item, partials);
    }

    // Point `at` to the n rows as type A; `pad` elements of each may be read.
    void convert(const T* const* from, int n, int dim, int pad, std::vector<A>& store_in, const A** at) {
        if constexpr (std::is_same_v<A, T>)
            if (dim == pad) {
                for (int j = 0; j < n; j++) at[j] = from[j];
                return;
            }
        A* to = scratch.aligned(store_in, size_t(BLOCK) * pad);
        for (int j = 0; j < n; j++, to += pad) {
            int d = 0;
            for (; d + N <= dim; d += N) store(to + d, load<A>(from[j] + d));
            if (d < dim) store(to + d, load_tail<A>(from[j] + d, dim - d)), d += N;
            for (; d < pad; d += N) store(to + d, V{});
            at[j] = to;
        }
    }

    template <int VECTORS, int K> INLINE void multiply(const A* const* k, int j) {
        constexpr int wide = VECTORS * N;
        const A* key[K];
        for (int i = 0; i < K; i++) key[i] = k[i];
        V acc[K][VECTORS] = {};
        const A* at = q;
        for (int d = 0; d < layer.k_dim; d++, at += wide) {
            V x[VECTORS];
            for (int a = 0; a < VECTORS; a++) x[a] = load_own(at + a * N);
            for (int i = 0; i < K; i++)
                for (int a = 0; a < VECTORS; a++) acc[i][a] += x[a] * key[i][d];
        }
        for (int i = 0; i < K; i++)
            for (int a = 0; a < VECTORS; a++) store(s + size_t(j + i) * wide + a * N, acc[i][a]);
    }

    template <int VECTORS> void soften_rows(int vector, int base, int n) {
        typedef typename std::conditional<sizeof(A) == 4, int32_t, int64_t>::type Whole;
        typedef Whole I __attribute__((vector_size(VECTOR_BYTES)));
        constexpr int wide = VECTORS * N;
        A* at = s + vector * N;
        I low, high;
        bool all = true;
        for (int i = 0; i < N; i++) {
            low[i] = scratch.lows[vector * N + i] - base, high[i] = scratch.highs[vector * N + i] - base;
            all = all && low[i] <= 0 && high[i] >= n;
        }
        V top = load_own(m + vector * N);
        const V before = top, nothing = splat(minus_infinity<A>);
        for (int j = 0; j < n; j++) {
            V x = cap(load_own(at + size_t(j) * wide));
            if (!all) x = ((low <= Whole(j)) & (high > Whole(j))) ? x : nothing;
            store(at + size_t(j) * wide, x);
            top = larger<A>(top, x);
        }
        // Rows that have seen nothing: any finite maximum makes their probabilities 0 instead of NaN.
        const V finite = top == nothing ? splat(A(0)) : top;
        V total{};
        for (int j = 0; j < n; j++) {
            const V p = exp_v(load_own(at + size_t(j) * wide) - finite);
            total += p;
            store(at + size_t(j) * wide, p);
        }
        const V correct = exp_v(before - finite);
        store(fix + vector * N, correct);
        store(l + vector * N, load_own(l + vector * N) * correct + total);
        store(m + vector * N, top);
    }

    template <int VECTORS> void accumulate(int r, const A* const* v, int n) {
        constexpr int wide = VECTORS * N;
        for (int d = 0; d < v_pad; d += 2 * N) {
            if (d >= layer.v_dim) break;
            V acc[ROWS][2];
            for (int a = 0; a < ROWS; a++)
                for (int i = 0; i < 2; i++) acc[a][i] = load_own(o + size_t(r + a) * v_pad + d + i * N) * fix[r + a];
            const A* p = s + r;
            for (int j = 0; j < n; j++, p += wide) {
                const V x = load_own(v[j] + d), y = load_own(v[j] + d + N);
                for (int a = 0; a < ROWS; a++) acc[a][0] += x * p[a], acc[a][1] += y * p[a];
            }
            for (int a = 0; a < ROWS; a++)
                for (int i = 0; i < 2; i++) store(o + size_t(r + a) * v_pad + d + i * N, acc[a][i]);
        }
    }

    void run(const Item& item, A* partials) {
        const int vectors = padded(item.rows(), N) / N;
        if (item.rows() <= FEW) few(item, partials);
        else if (vectors == 1) many<1>(item, partials);
        else if (vectors == 2) many<2>(item, partials);
        else many<MOST_VECTORS>(item, partials);
    }

    // Join the parts of the rows that `first` (part 0) begins.
    void join(const Item* first, const A* partials) {
        k_pad = padded(layer.k_dim, N), v_pad = padded(layer.v_dim, 4 * N);
        const int64_t width = layer.v_dim + 2;
        A* out = scratch.aligned(scratch.o, v_pad);
        for (int r = 0; r < first->rows(); r++) {
            A most = minus_infinity<A>, total = 0;
            for (int i = 0; i < first->parts; i++) most = std::max(most, partials[first[i].partial + r * width]);
            std::fill(out, out + layer.v_dim, A(0));
            for (int i = 0; i < first->parts; i++) {
                const A* part = partials + first[i].partial + r * width;
                const A weight = part[0] == minus_infinity<A> ? A(0) : std::exp(part[0] - most);
                total += part[1] * weight;
                for (int d = 0; d < layer.v_dim; d++) out[d] += part[2 + d] * weight;
            }
            for (int d = 0; d < layer.v_dim; d++) out[d] /= total;
            write_output(*first, r, out);
        }
    }
};

template <class T> void write_new(const Layer& layer, const Step& step, const Call& call, int write) {
    const int64_t page = step.write_pages[write], slot = step.write_slots[write];
    const int64_t token = step.write_rows ? step.write_rows[write] : write;
    for (int h = 0; h < layer.kv_heads; h++) {
        T* k = static_cast<T*>(layer.k) + page * layer.k_page_stride + (slot * layer.kv_heads + h) * layer.k_dim;
        T* v = static_cast<T*>(layer.v) + page * layer.v_page_stride + (slot * layer.kv_heads + h) * layer.v_dim;
        read_row(call.key, call.new_type, token * call.key_row + h * call.key_head, k, layer.k_dim);
        read_row(call.value, call.new_type, token * call.value_row + h * call.value_head, v, layer.v_dim);
    }
}

template <class A, class T> void attend(const Layer& layer, const Step& step, const Call& call) {
    int64_t partial_count;
    const std::vector<Item> items = make_items<A>(layer, step, call, partial_count);
    static thread_local std::vector<A> partials_of_thread;
    if (int64_t(partials_of_thread.size()) < partial_count) partials_of_thread.resize(partial_count);
    A* partials = partials_of_thread.data();
    const int count = int(items.size());
#pragma omp parallel num_threads(call.threads)
    {
        static thread_local Scratch<A, T> scratch;
        Worker<A, T> worker(layer, step, call, scratch);
        if (call.key) {
#pragma omp for schedule(static)
            for (int w = 0; w < step.writes; w++) write_new<T>(layer, step, call, w);
        }
        // Backwards: the long items are the last chunks of prefills, and they should not be what everyone waits for.
#pragma omp for schedule(dynamic, 1)
        for (int i = count - 1; i >= 0; i--) worker.run(items[i], partials);
        if (partial_count) {
#pragma omp for schedule(dynamic, 4)
            for (int i = 0; i < count; i++)
                if (items[i].parts > 1 && items[i].part == 0) worker.join(&items[i], partials);
        }
    }
}

}  // namespace

// Write the step's new K and V, then attend. 0: done; 1: a type it does not know.
extern "C" int halocline_attend(const Layer* layer, const Step* step, const Call* call) {
    switch (layer->type) {
        case FLOAT32: attend<float, float>(*layer, *step, *call); return 0;
        case BFLOAT16: attend<float, bf16>(*layer, *step, *call); return 0;
        case FLOAT16: attend<float, fp16>(*layer, *step, *call); return 0;
        case FLOAT64: attend<double, double>(*layer, *step, *call); return 0;
        default: return 1;
    }
}
