/* A Llama-like decoder's forward for a CPU: few tokens, many rows, weights that stream from memory.
 *
 * Decoding reads every weight once a forward, so its time is the memory's as long as the arithmetic hides
 * behind the reading. Library kernels for such narrow products repack the matrix or read it at half speed;
 * here it lies packed as it is read, and is fetched ahead.
 *
 * A token's result is the same to the last bit whatever else the forward holds: every output is summed in
 * one order, along k, by one accumulator, however many tokens are multiplied at once. So exact mode's text is
 * one-token mode's in any weight type, any batch and any cut of the prompt.
 *
 * Arithmetic is float32; weights are float32 or bfloat16. V floats make a vector. Shapes are row-major.
 */
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define V 16
#else
#define V 8 /* the compiler cuts it in two where the machine's vectors are shorter */
#endif
#define PANEL (2 * V) /* outputs of one pass over k */
#define ROWS 8        /* tokens of one pass */
#define HEADS 4       /* query heads of one pass */
#define AHEAD 8192    /* bytes to fetch ahead of the pass: measured, flat between 4096 and 16384 */

typedef float vf __attribute__((vector_size(V * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(V * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(V * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(V * 2), aligned(2), may_alias));

static inline vf load_f32(const void *w, int64_t i) { return *(const vf *)((const float *)w + i); }
static inline vf load_bf16(const void *w, int64_t i) {
  vh half = *(const vh *)((const uint16_t *)w + i);
  return (vf)(__builtin_convertvector(half, vu) << 16);
}

/* ---- threads ----------------------------------------------------------------------------------------- */

/* OpenMP's own barrier spins for a millisecond before it lets go of the core. Where another process has taken a
 * core, that is the core that the missing thread needs, at each of a forward's 240 barriers. */
#define SPINS 2000

typedef struct {
  atomic_long arrived, phase;
} Barrier;

static void meet(Barrier *barrier) {
  long phase = atomic_load(&barrier->phase);
  if (atomic_fetch_add(&barrier->arrived, 1) == omp_get_num_threads() - 1) {
    atomic_store(&barrier->arrived, 0);
    atomic_fetch_add(&barrier->phase, 1);
    return;
  }
  for (long spins = 0; atomic_load(&barrier->phase) == phase; spins++)
    if (spins > SPINS) sched_yield();
}

/* ---- products ---------------------------------------------------------------------------------------- */

enum { STORE, ADD, SWIGLU }; /* what becomes of a product */

typedef struct {
  const void *w;     /* [panels][k][PANEL]; SWIGLU: V columns of the gate, then V of the up projection */
  const float *bias; /* [n] or null */
  int64_t k, n;      /* n: outputs; for SWIGLU gate and up together */
} Linear;

/* acc[m][0..1] = sum over k of x[m][k] * panel[k], for M tokens. */
#define PANEL_PRODUCT(TYPE, BYTES, M)                                                                        \
  static void panel_##TYPE##_##M(const float *x, int64_t ldx, const char *w, int64_t k, int64_t ahead,       \
                                 vf (*out)[2]) {                                                             \
    vf acc[M][2];                                                                                            \
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = (vf){0};                                             \
    for (int64_t i = 0; i < k; i++) {                                                                        \
      for (int line = 0; line < PANEL * BYTES; line += 64)                                                   \
        __builtin_prefetch(w + i * PANEL * BYTES + ahead + line, 0, 3);                                      \
      vf w0 = load_##TYPE(w, i * PANEL), w1 = load_##TYPE(w, i * PANEL + V);                                 \
      _Pragma("GCC unroll 8") for (int m = 0; m < M; m++) {                                                  \
        float scalar = x[m * ldx + i];                                                                       \
        acc[m][0] += w0 * scalar;                                                                            \
        acc[m][1] += w1 * scalar;                                                                            \
      }                                                                                                      \
    }                                                                                                        \
    for (int m = 0; m < M; m++) out[m][0] = acc[m][0], out[m][1] = acc[m][1];                                \
  }
#define PANEL_PRODUCTS(TYPE, BYTES)                                                                          \
  PANEL_PRODUCT(TYPE, BYTES, 1)                                                                              \
  PANEL_PRODUCT(TYPE, BYTES, 2)                                                                              \
  PANEL_PRODUCT(TYPE, BYTES, 3)                                                                              \
  PANEL_PRODUCT(TYPE, BYTES, 4)                                                                              \
  PANEL_PRODUCT(TYPE, BYTES, 5)                                                                              \
  PANEL_PRODUCT(TYPE, BYTES, 6)                                                                              \
  PANEL_PRODUCT(TYPE, BYTES, 7)                                                                              \
  PANEL_PRODUCT(TYPE, BYTES, 8)                                                                              \
  static const PanelProduct by_tokens_##TYPE[ROWS] = {                                                       \
      panel_##TYPE##_1, panel_##TYPE##_2, panel_##TYPE##_3, panel_##TYPE##_4,                                \
      panel_##TYPE##_5, panel_##TYPE##_6, panel_##TYPE##_7, panel_##TYPE##_8};

typedef void (*PanelProduct)(const float *, int64_t, const char *, int64_t, int64_t, vf (*)[2]);
PANEL_PRODUCTS(f32, 4)
PANEL_PRODUCTS(bf16, 2)

/* e^x, relative error below 1e-6: x = n ln 2 + r, e^r by its Taylor polynomial. */
static inline vf vexp(vf x) {
  const vf low = (vf){0} - 87.0f;
  vi is_low = x < low;
  x = (vf)(((vi)low & is_low) | ((vi)x & ~is_low));
  vf shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum's last bits are the rounded n */
  vf n = shifted - 12582912.0f;
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = (vf){0} + 1.9841270e-4f;
  p = p * r + 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  vi power = __builtin_convertvector(n, vi) << 23;
  return (vf)((vi)p + power);
}

static inline vf silu(vf x) { return x / (1.0f + vexp(-x)); }

/* One panel of y = x W for all tokens. */
static void panel(const Linear *linear, int bf16, const float *x, int64_t tokens, int64_t index, float *y,
                  int64_t ldy, int mode, float *wide) {
  int64_t k = linear->k, size = k * PANEL * (bf16 ? 2 : 4), first = index * PANEL;
  const char *w = (const char *)linear->w + index * size;
  int64_t ahead = AHEAD;
  if (bf16 && tokens > 2 * ROWS) { /* widen once, not once a pass: the same numbers */
    for (int64_t i = 0; i < k * 2; i++) *(vf *)(wide + i * V) = load_bf16(w, i * V);
    w = (const char *)wide, bf16 = 0, ahead = 0;
  }
  for (int64_t m = 0; m < tokens; m += ROWS) {
    int64_t count = tokens - m < ROWS ? tokens - m : ROWS;
    vf acc[ROWS][2];
    (bf16 ? by_tokens_bf16 : by_tokens_f32)[count - 1](x + m * k, k, w, k, ahead, acc);
    ahead = 0; /* from now on it is in the cache */
    for (int64_t r = 0; r < count; r++) {
      float out[PANEL] __attribute__((aligned(64)));
      int64_t width = linear->n - first < PANEL ? linear->n - first : PANEL, at = first;
      if (mode == SWIGLU) {
        *(vf *)out = silu(acc[r][0]) * acc[r][1];
        width = V, at = first / 2;
      } else {
        *(vf *)out = acc[r][0], *(vf *)(out + V) = acc[r][1];
      }
      float *to = y + (m + r) * ldy + at;
      if (linear->bias)
        for (int64_t i = 0; i < width; i++) out[i] += linear->bias[at + i];
      if (mode == ADD)
        for (int64_t i = 0; i < width; i++) to[i] += out[i];
      else
        memcpy(to, out, width * sizeof(float));
    }
  }
}

/* y[tokens][n] = x[tokens][k] W; by all threads of the region that calls it. */
static void linear(const Linear *linear, int bf16, const float *x, int64_t tokens, float *y, int64_t ldy,
                   int mode, float *wide, Barrier *barrier) {
  int64_t panels = (linear->n + PANEL - 1) / PANEL;
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < panels; i++) panel(linear, bf16, x, tokens, i, y, ldy, mode, wide);
  meet(barrier);
}

/* ---- what stands between them ------------------------------------------------------------------------ */

static void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *y) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
  float scale = 1.0f / sqrtf(sum / (float)n + eps);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

static void rotate(float *x, const float *cos, const float *sin, int64_t dim) {
  int64_t half = dim / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

typedef struct {
  const float *norm_attention, *norm_mlp, *norm_q, *norm_k; /* the last two null where the model has none */
  Linear qkv, out, gate_up, down;
  float *keys;   /* [rows][kv_heads][slots / V][head_dim][V]: slots beside each other are one load */
  float *values; /* [rows][kv_heads][slots][head_dim] */
} Layer;

typedef struct {
  int64_t layers, hidden, intermediate, q_heads, kv_heads, head_dim, slots; /* slots: a multiple of 4 V */
  float eps, scale;
  int64_t bf16;
  const float *norm_final;
  const float *cos, *sin; /* [positions][head_dim / 2] */
  const Layer *layer;
} Model;

/* A token sees its row's slots before `before` and those from `from` to its own. */
typedef struct {
  const int64_t *row, *slot, *position, *before, *from;
  int64_t tokens;
} Feed;

/* Scores of the slots 0 .. end become e^(score - best), 0 where unseen; gives 1 / their sum. */
static float softmax(float *scores, int64_t before, int64_t from, int64_t end) {
  const vf unseen = (vf){0} - INFINITY;
  int64_t padded = (end + V - 1) / V * V;
  for (int64_t s = before; s < from; s++) scores[s] = -INFINITY;
  for (int64_t s = end; s < padded; s++) scores[s] = -INFINITY;
  vf best = unseen;
  for (int64_t s = 0; s < padded; s += V) {
    vf score = *(vf *)(scores + s);
    vi more = score > best;
    best = (vf)(((vi)score & more) | ((vi)best & ~more));
  }
  float top = best[0];
  for (int i = 1; i < V; i++) top = best[i] > top ? best[i] : top;
  vf sums = {0};
  for (int64_t s = 0; s < padded; s += V) {
    vf score = *(vf *)(scores + s), p = vexp(score - top);
    p = (vf)((vi)p & (score > unseen)); /* e^-87 is little, and unseen is nothing */
    /* a NaN compares as unseen: let it through, so that the row is known to be broken */
    p = (vf)(((vi)score & (score != score)) | ((vi)p & (score == score)));
    *(vf *)(scores + s) = p;
    sums += p;
  }
  float sum = 0;
  for (int i = 0; i < V; i++) sum += sums[i];
  return 1.0f / sum;
}

/* softmax(q K) V of `heads` query heads beside each other that share a key head; scores: scratch of heads x
 * slots. `heads` is a constant where it is called, so that the loops over it are unrolled. */
static inline __attribute__((always_inline)) void attend_heads(const int heads, const Model *model, const float *q,
                                                               const float *keys, const float *values,
                                                               int64_t before, int64_t from, int64_t own,
                                                               float *scores, float *out) {
  int64_t dim = model->head_dim, slots = model->slots, end = before > own + 1 ? before : own + 1;
  if (from < before) from = before;
  for (int64_t s = 0; s < end; s += 2 * V) {
    const float *k = keys + s * dim;
    vf acc[HEADS][2];
    for (int h = 0; h < heads; h++) acc[h][0] = acc[h][1] = (vf){0};
    for (int64_t d = 0; d < dim; d++) {
      vf k0 = *(const vf *)(k + d * V), k1 = *(const vf *)(k + (dim + d) * V);
      _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++) {
        float scalar = q[h * dim + d];
        acc[h][0] += k0 * scalar;
        acc[h][1] += k1 * scalar;
      }
    }
    for (int h = 0; h < heads; h++)
      for (int b = 0; b < 2; b++) *(vf *)(scores + h * slots + s + b * V) = acc[h][b] * model->scale;
  }
  float inverse[HEADS];
  for (int h = 0; h < heads; h++) inverse[h] = softmax(scores + h * slots, before, from, end);
  for (int64_t d = 0; d < dim; d += 2 * V) {
    int wide = dim - d < 2 * V ? 1 : 2;
    vf acc[HEADS][2];
    for (int h = 0; h < heads; h++) acc[h][0] = acc[h][1] = (vf){0};
    for (int part = 0; part < 2; part++) {
      int64_t s = part ? from : 0, stop = part ? own + 1 : before;
      const float *v = values + s * dim + d;
      for (; s < stop; s++, v += dim) {
        vf v0 = *(const vf *)v, v1 = wide == 2 ? *(const vf *)(v + V) : v0;
        _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++) {
          float p = scores[h * slots + s];
          acc[h][0] += v0 * p;
          acc[h][1] += v1 * p;
        }
      }
    }
    for (int h = 0; h < heads; h++)
      for (int i = 0; i < wide; i++) *(vf *)(out + h * dim + d + i * V) = acc[h][i] * inverse[h];
  }
}

/* All query heads of one key head. */
static void attend(const Model *model, int64_t heads, const float *q, const float *keys, const float *values,
                   int64_t before, int64_t from, int64_t own, float *scores, float *out) {
  int64_t dim = model->head_dim;
  for (int64_t h = 0; h < heads; h += HEADS, q += HEADS * dim, out += HEADS * dim) {
    switch (heads - h < HEADS ? heads - h : HEADS) {
    case 1: attend_heads(1, model, q, keys, values, before, from, own, scores, out); break;
    case 2: attend_heads(2, model, q, keys, values, before, from, own, scores, out); break;
    case 3: attend_heads(3, model, q, keys, values, before, from, own, scores, out); break;
    default: attend_heads(HEADS, model, q, keys, values, before, from, own, scores, out);
    }
  }
}

/* Positions into q and k, and a token's key and value into its slot. */
static void store(const Model *model, const Layer *layer, const Feed *feed, int64_t t, float *qkv) {
  int64_t dim = model->head_dim, slots = model->slots, heads = model->q_heads + model->kv_heads;
  const float *cos = model->cos + feed->position[t] * dim / 2, *sin = model->sin + feed->position[t] * dim / 2;
  for (int64_t h = 0; h < heads; h++) {
    const float *norm = h < model->q_heads ? layer->norm_q : layer->norm_k;
    if (norm) rms_norm(qkv + h * dim, norm, dim, model->eps, qkv + h * dim);
    rotate(qkv + h * dim, cos, sin, dim);
  }
  int64_t slot = feed->slot[t];
  for (int64_t h = 0; h < model->kv_heads; h++) {
    int64_t base = (feed->row[t] * model->kv_heads + h) * slots * dim;
    const float *k = qkv + (model->q_heads + h) * dim, *v = k + model->kv_heads * dim;
    float *keys = layer->keys + base + slot / V * V * dim + slot % V;
    for (int64_t d = 0; d < dim; d++) keys[d * V] = k[d];
    memcpy(layer->values + base + slot * dim, v, dim * sizeof(float));
  }
}

/* ---- what Python calls ------------------------------------------------------------------------------- */

int64_t mars_vector(void) { return V; }

int64_t mars_model_bytes(void) { return sizeof(Model) + sizeof(Layer); } /* to check both sides' structs */

/* y[tokens][n] = x[tokens][k] W; wide: [threads][k][PANEL]. */
void mars_linear(const Linear *w, int64_t bf16, const float *x, int64_t tokens, float *y, float *wide,
                 int64_t threads) {
  Barrier barrier = {0};
#pragma omp parallel num_threads(threads)
  linear(w, bf16, x, tokens, y, w->n, STORE, wide + omp_get_thread_num() * w->k * PANEL, &barrier);
}

/* x[tokens][hidden]: embeddings in, final hidden states out.
 * Scratch: normed [tokens][hidden]; qkv [tokens][(q + 2 kv) dim]; mixed [tokens][q dim];
 * mlp [tokens][intermediate]; own [threads][own_size], the widest k times PANEL or HEADS times `slots`, whichever is more.
 */
void mars_forward(const Model *model, const Feed *feed, float *x, float *normed, float *qkv, float *mixed,
                  float *mlp, float *own, int64_t own_size, int64_t threads) {
  int64_t tokens = feed->tokens, hidden = model->hidden, dim = model->head_dim, kv_heads = model->kv_heads;
  int64_t groups = model->q_heads / kv_heads, width = (model->q_heads + 2 * kv_heads) * dim;
  int bf16 = (int)model->bf16;
  Barrier barrier = {0};
#pragma omp parallel num_threads(threads)
  {
    float *scratch = own + omp_get_thread_num() * own_size;
    for (int64_t l = 0; l < model->layers; l++) {
      const Layer *layer = &model->layer[l];
#pragma omp for schedule(static) nowait
      for (int64_t t = 0; t < tokens; t++)
        rms_norm(x + t * hidden, layer->norm_attention, hidden, model->eps, normed + t * hidden);
      meet(&barrier);
      linear(&layer->qkv, bf16, normed, tokens, qkv, width, STORE, scratch, &barrier);
#pragma omp for schedule(static) nowait
      for (int64_t t = 0; t < tokens; t++) store(model, layer, feed, t, qkv + t * width);
      meet(&barrier);
#pragma omp for schedule(dynamic) nowait
      for (int64_t i = 0; i < tokens * kv_heads; i++) {
        int64_t t = i / kv_heads, h = i % kv_heads, base = (feed->row[t] * kv_heads + h) * model->slots * dim;
        attend(model, groups, qkv + t * width + h * groups * dim, layer->keys + base, layer->values + base,
               feed->before[t], feed->from[t], feed->slot[t], scratch, mixed + i * groups * dim);
      }
      meet(&barrier);
      linear(&layer->out, bf16, mixed, tokens, x, hidden, ADD, scratch, &barrier);
#pragma omp for schedule(static) nowait
      for (int64_t t = 0; t < tokens; t++)
        rms_norm(x + t * hidden, layer->norm_mlp, hidden, model->eps, normed + t * hidden);
      meet(&barrier);
      linear(&layer->gate_up, bf16, normed, tokens, mlp, model->intermediate, SWIGLU, scratch, &barrier);
      linear(&layer->down, bf16, mlp, tokens, x, hidden, ADD, scratch, &barrier);
    }
#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < tokens; t++)
      rms_norm(x + t * hidden, model->norm_final, hidden, model->eps, x + t * hidden);
  }
}
