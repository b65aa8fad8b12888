/* A Llama-like decoder's forward for a CPU: few tokens, many rows, weights that stream from memory.
 *
 * Decoding reads every weight once a forward, so its time is the memory's as long as the arithmetic hides
 * behind the reading. Library kernels for such narrow products repack the matrix or read it at half speed;
 * here it lies packed as it is read, and is fetched ahead. Where tokens need several passes, the passes take
 * turns on small blocks of weights, so that all of them hide behind the reading.
 *
 * A token's result is the same to the last bit whatever else the forward holds: every output is summed in
 * one order, along k, by one accumulator, however many tokens are multiplied at once. So exact mode's text is
 * one-token mode's in any weight type, any batch and any cut of the prompt.
 *
 * Weights are float32 or bfloat16, and arithmetic is float32; or weights and what they are multiplied with are whole
 * numbers of 8 or 16 bits, with a scale for each GROUP of k, and a group's sum is an integer's. V floats make a
 * vector. Shapes are row-major.
 */
#if defined(__AVX512F__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif
#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#endif
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
#if V == 16
#define ROWS 13    /* tokens of one pass: two accumulators each, and registers left for the weights */
#define QUERIES 12 /* a key head's queries of one pass, of one or several tokens */
#else
#define ROWS 6
#define QUERIES 4
#endif
#define PASSES 4   /* passes that share a block of weights while it is in the first cache */
#define BLOCK 128  /* k of such a block, a multiple of GROUP */
#define GROUP 64   /* k that share a scale, where weights are whole numbers */
#define TILE 64    /* slots whose weights lie beside each other in one pass over the values */
#define KV_AHEAD 12288 /* bytes to fetch ahead of a pass over keys or values */
#define NEAR 2048  /* and from the second cache into the first one, which is full of x: flat from 2048 to 4096 */
/* Bytes of weights in the second cache that are still to be read: below the first, a pass fetches more than it reads;
 * from the second on less; from the third on nothing is fetched. */
#define LITTLE 12288
#define PLENTY 65536
#define MOST 524288

typedef float vf __attribute__((vector_size(V * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(V * 4), aligned(4), may_alias));
typedef int8_t vb __attribute__((vector_size(V), aligned(1), may_alias));
typedef uint8_t vc __attribute__((vector_size(V), aligned(1), may_alias));
typedef int16_t vh __attribute__((vector_size(V * 2), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(V * 4), aligned(4), may_alias));

/* ---- products ---------------------------------------------------------------------------------------- */

enum { STORE, ADD, SWIGLU };   /* what becomes of a product */
/* What weights are; the last two are bfloat16 and int8 that the tile registers multiply. */
enum { FLOAT32, BFLOAT16, INT8, INT16, TILES, INT8_TILES };
static const int64_t bytes_of[] = {4, 2, 1, 2, 2, 1};
#define IS_WHOLE(weights) ((weights) == INT8 || (weights) == INT16 || (weights) == INT8_TILES)
#define IN_TILES(weights) ((weights) == TILES || (weights) == INT8_TILES)

typedef struct {
  /* [panels][k][PANEL]; bfloat16 and int16: [panels][k / 2][PANEL][2]; int8: [panels][k / 4][PANEL][4], 128 added
   * to each, but not for tiles. SWIGLU: V columns of the gate, then V of up */
  const void *w;
  const void *scale;  /* [panels][k / GROUP][PANEL]; int8: floats; int16: powers of two, as a float's exponent bits */
  const float *bias;  /* [n] or null */
  int64_t k, n;       /* k a multiple of V, or of GROUP; n: outputs, for SWIGLU gate and up together */
} Linear;

/* ---- reading ahead ------------------------------------------------------------------------------------ */

/* A thread's part of what there are `count` of. */
static void share(int64_t count, int64_t *begin, int64_t *end) {
  int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
  *begin = count * thread / threads, *end = count * (thread + 1) / threads;
}

static int64_t panels_of(const Linear *linear) { return (linear->n + PANEL - 1) / PANEL; }

/* The weights that a thread will read, in that order. A forward waits for memory, so memory is kept at work also
 * while nothing is read: attention, norms and waiting fetch what the next products will want. */
typedef struct {
  const Linear *const *linears;
  int64_t count, weights;
  const char *at; /* what is fetched next */
  int64_t left;   /* bytes from there to the end of the thread's part of the matrix */
  int64_t ahead;  /* bytes fetched and not read yet */
} Stream;

static void next_part(Stream *stream) {
  while (!stream->left && stream->count) {
    const Linear *linear = *stream->linears++;
    int64_t begin, end, size = linear->k * PANEL * bytes_of[stream->weights];
    share(panels_of(linear), &begin, &end);
    stream->at = (const char *)linear->w + begin * size, stream->left = (end - begin) * size;
    stream->count--;
  }
}

/* Up to so many bytes from here on are fetched by the caller. */
static const char *fetching(Stream *stream, int64_t *bytes) {
  const char *at = stream->at;
  if (*bytes > stream->left) *bytes = stream->left;
  stream->at += *bytes, stream->left -= *bytes, stream->ahead += *bytes;
  if (!stream->left) next_part(stream);
  return at;
}

static inline void fetch(Stream *stream, int64_t lines) {
  if (stream->ahead >= MOST) return;
  int64_t bytes = 64 * lines;
  const char *at = fetching(stream, &bytes);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

/* The same for a pass that reads so many bytes. */
static const char *fetching_beside(Stream *stream, int64_t *bytes) {
  if (stream->ahead < LITTLE)
    *bytes += *bytes / 2;
  else if (stream->ahead >= MOST)
    *bytes = 0;
  else if (stream->ahead >= PLENTY)
    *bytes /= 2;
  return fetching(stream, bytes);
}

/* ---- threads ----------------------------------------------------------------------------------------- */

/* OpenMP's own barrier spins for a millisecond before it lets go of the core. Where another process has taken a
 * core, that is the core that the missing thread needs, at each of a forward's 240 barriers. */
#define SPINS 2000

typedef struct {
  atomic_long arrived, phase;
} Barrier;

static void meet(Barrier *barrier, Stream *stream) {
  long phase = atomic_load(&barrier->phase);
  if (atomic_fetch_add(&barrier->arrived, 1) == omp_get_num_threads() - 1) {
    atomic_store(&barrier->arrived, 0);
    atomic_fetch_add(&barrier->phase, 1);
    return;
  }
  for (long spins = 0; atomic_load(&barrier->phase) == phase; spins++) {
    fetch(stream, 1);
    if (spins > SPINS) sched_yield();
  }
}

/* Half of the weights of one k. A float32 panel has a row for each k; a bfloat16 panel one for each two, the
 * even k's weight in a word's low half, the odd one's in its high half: one operation widens either. */
static inline vf load_f32(const char *w, int odd, int half) {
  return *(const vf *)(w + odd * PANEL * 4 + half * V * 4);
}
static inline vf load_bf16(const char *w, int odd, int half) {
  vu pair = *(const vu *)(w + half * V * 4);
  return odd ? (vf)(pair & 0xffff0000u) : (vf)(pair << 16);
}

#define FETCH(far, here) __builtin_prefetch(far, 0, 2), __builtin_prefetch((here) + NEAR, 0, 3)

/* out[m][0..1] += sum over k, a multiple of V, of x[k / V][m][V] * panel[k], for M tokens; fetches `next`, `step`
 * bytes further for each k. */
#define PANEL_PRODUCT(TYPE, M)                                                                               \
  static void panel_##TYPE##_##M(const float *x, const char *w, int64_t k, const char *next, int64_t step,   \
                                 vf (*out)[2]) {                                                             \
    vf acc[M][2];                                                                                            \
    for (int m = 0; m < M; m++) acc[m][0] = out[m][0], acc[m][1] = out[m][1];                                \
    for (int64_t i = 0; i < k; i += V, x += (M - 1) * V)                                                     \
      for (int j = 0; j < V; j += 2, x += 2, w += 2 * PANEL * sizeof_##TYPE, next += 2 * step) {             \
        for (int line = 0; line < 2 * PANEL * sizeof_##TYPE; line += 64) FETCH(next + line, w + line);       \
        _Pragma("GCC unroll 2") for (int odd = 0; odd < 2; odd++) {                                          \
          vf w0 = load_##TYPE(w, odd, 0), w1 = load_##TYPE(w, odd, 1);                                       \
          _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) {                                             \
            float scalar = x[m * V + odd];                                                                   \
            acc[m][0] += w0 * scalar;                                                                        \
            acc[m][1] += w1 * scalar;                                                                        \
          }                                                                                                  \
        }                                                                                                    \
      }                                                                                                      \
    for (int m = 0; m < M; m++) out[m][0] = acc[m][0], out[m][1] = acc[m][1];                                \
  }
#define UP_TO_6(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#define UP_TO_12(DO) UP_TO_6(DO) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#if V == 16
#define UP_TO_ROWS(DO) UP_TO_12(DO) DO(13)
#else
#define UP_TO_ROWS(DO) UP_TO_6(DO)
#endif
enum { sizeof_f32 = 4, sizeof_bf16 = 2 };

typedef void (*PanelProduct)(const float *, const char *, int64_t, const char *, int64_t, vf (*)[2]);
#define PRODUCT_F32(M) PANEL_PRODUCT(f32, M)
#define PRODUCT_BF16(M) PANEL_PRODUCT(bf16, M)
#define NAME_F32(M) panel_f32_##M,
#define NAME_BF16(M) panel_bf16_##M,
UP_TO_ROWS(PRODUCT_F32)
UP_TO_ROWS(PRODUCT_BF16)
static const PanelProduct by_tokens_f32[ROWS] = {UP_TO_ROWS(NAME_F32)};
static const PanelProduct by_tokens_bf16[ROWS] = {UP_TO_ROWS(NAME_BF16)};

/* The larger one; b where either is no number. */
static inline vf larger(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  vi more = a > b;
  return (vf)(((vi)a & more) | ((vi)b & ~more));
#endif
}

/* The sum of a vector, in one order. */
static inline float sum_of(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float part[V] __attribute__((aligned(64)));
  *(vf *)part = v;
  for (int half = V / 2; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] += part[i + half];
  return part[0];
#endif
}

/* The largest number of a vector that has one. */
static inline float largest_of(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float top = v[0];
  for (int i = 1; i < V; i++) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

/* e^x for x up to 88, where float32 ends; relative error below 1e-6: x = n ln 2 + r, e^r by its Taylor polynomial. */
static inline vf vexp(vf x) {
  x = larger((vf){0} - 87.0f, x);
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

static inline vf silu(vf x) {
  /* Below -88 the divisor stays as it is, and the result next to 0. */
  vf d = 1.0f + vexp(-larger((vf){0} - 88.0f, x));
#if defined(__AVX512F__)
  vf r = (vf)_mm512_rcp14_ps((__m512)d);
  r = r * (2.0f - d * r);
  r = r * (2.0f - d * r);
  return x * r;
#else
  return x / d;
#endif
}

/* ---- tiles ------------------------------------------------------------------------------------------- */

/* Processors with AMX multiply a tile of up to 16 tokens and 32 of k with one of the same k and 16 outputs, all
 * bfloat16, into a tile of float32. What is multiplied with tiles lies packed as bfloat16, [passes of TILE_ROWS
 * tokens][k / TILE_K][rows][TILE_K], with TILE_ROWS rows, of which the last pass's last ones are nobody's, or as many
 * as there are tokens, if these are fewer. */
#define TILE_ROWS 16
#define TILE_K 32

static int64_t tile_rows(int64_t tokens) { return tokens < TILE_ROWS ? tokens : TILE_ROWS; }

/* Where a token's entry of k lies in x packed for tiles. */
static uint16_t *tiled(float *x, int64_t k, int64_t tokens, int64_t token, int64_t i) {
  int64_t rows = tile_rows(tokens), pass = token / TILE_ROWS;
  return (uint16_t *)x + pass * TILE_ROWS * k + i / TILE_K * rows * TILE_K + token % TILE_ROWS * TILE_K + i % TILE_K;
}

/* Tiles that follow each other along k: where the first one is, bytes from row to row, bytes from tile to tile. */
typedef struct {
  const char *at;
  int64_t stride, step;
} Strided;

#if HAS_TILES
/* GCC does not know that the instructions for tiles read memory: what they read must be there. */
#define WRITTEN(at) __asm__ volatile("" : : "r"(at) : "memory")

static void begin_tiles(int64_t rows) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = i == 4 || i == 5 ? TILE_K / 2 : rows;
  WRITTEN(&config);
  _tile_loadconfig(&config);
}
static void end_tiles(void) { _tile_release(); }

/* out[2 TILE_ROWS][PANEL] = a w, with `steps` times TILE_K of k; the second half only where there is `other`. Fetches
 * `each` bytes of `next` beside each step. */
static void multiply_tiles(Strided a, const char *other, Strided w, int64_t steps, const char *next, int64_t each,
                           float *out, int64_t stride) {
  const char *x = a.at, *y = w.at;
  WRITTEN(x);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < steps; i++, x += a.step, y += w.step) {
    for (int64_t j = 0; j < each; j += 64) __builtin_prefetch(next + j, 0, 2);
    next += each;
    _tile_loadd(4, y, w.stride);
    _tile_loadd(5, y + V * 4, w.stride);
    _tile_loadd(6, x, a.stride);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    if (other) {
      _tile_loadd(7, other, a.stride);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
      other += a.step;
    }
  }
  _tile_stored(0, out, stride * 4);
  _tile_stored(1, out + V, stride * 4);
  if (!other) return;
  _tile_stored(2, out + TILE_ROWS * stride, stride * 4);
  _tile_stored(3, out + TILE_ROWS * stride + V, stride * 4);
}

/* out[TILE_ROWS][PANEL] = x w for one group of k, both int8. */
static inline void multiply_int8_tiles(const int32_t *x, const char *w, int32_t *out) {
  WRITTEN(x);
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(6, x, GROUP);
  _tile_loadd(4, w, 4 * PANEL);
  _tile_loadd(5, w + 4 * V, 4 * PANEL);
  _tile_dpbssd(0, 6, 4);
  _tile_dpbssd(1, 6, 5);
  _tile_stored(0, out, 4 * PANEL);
  _tile_stored(1, out + V, 4 * PANEL);
}

static inline void to_bfloat16(uint16_t *to, vf low, vf high) {
  *(__m512i_u *)to = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
static inline void to_half_bfloat16(uint16_t *to, vf x) { *(__m256i_u *)to = (__m256i)_mm512_cvtneps_pbh((__m512)x); }
#else /* nobody asks for them: `mars_has_tiles` */
static void begin_tiles(int64_t rows) {}
static void end_tiles(void) {}
static void multiply_tiles(Strided a, const char *other, Strided w, int64_t steps, const char *next, int64_t each,
                           float *out, int64_t stride) {}
static inline void multiply_int8_tiles(const int32_t *x, const char *w, int32_t *out) {}
static inline void to_bfloat16(uint16_t *to, vf low, vf high) {}
static inline void to_half_bfloat16(uint16_t *to, vf x) {}
#endif

/* Tokens are multiplied in passes of up to ROWS. What is to be multiplied lies packed, [passes][k / V][tokens of
 * the pass][V], so that a pass reads it one behind the other. */
static int64_t passes_of(int64_t tokens) { return (tokens + ROWS - 1) / ROWS; }
static int64_t pass_begin(int64_t tokens, int64_t pass) { return tokens * pass / passes_of(tokens); }

/* Rows of the tiles that so many tokens need: int8's passes are those of ROWS tokens, and what a shorter pass than
 * the last one multiplies behind its own rows, nobody reads. */
static int64_t rows_of(int weights, int64_t tokens) {
  return weights == TILES ? tile_rows(tokens) : (tokens + passes_of(tokens) - 1) / passes_of(tokens);
}

/* Where a token's entry of k, a multiple of V, lies in packed x. */
static float *packed(float *x, int64_t k, int64_t tokens, int64_t token, int64_t i) {
  int64_t pass = ((token + 1) * passes_of(tokens) - 1) / tokens, from = pass_begin(tokens, pass);
  return x + from * k + i * (pass_begin(tokens, pass + 1) - from) + (token - from) * V;
}

/* Where weights are whole numbers, so is what they are multiplied with: packed x is then, in the room of the floats,
 * the passes' words of 4 int8 or 2 int16 [passes][k / GROUP][tokens of the pass][words of a group], then their scales
 * [passes][k / GROUP][tokens of the pass], then, likewise, for int8 what makes up for the 128 added to every weight. */
typedef struct {
  int32_t *words;
  float *scales;
  int32_t *shifts;
} Quantized;

static int64_t words_of(int weights) { return GROUP * bytes_of[weights] / 4; }

/* The parts of x, packed of width k, of the pass that begins with token `begin`. */
static Quantized quantized(float *x, int weights, int64_t k, int64_t tokens, int64_t begin) {
  int64_t groups = k / GROUP, words = groups * words_of(weights);
  float *scales = x + tokens * words, *shifts = scales + tokens * groups;
  return (Quantized){(int32_t *)x + begin * words, scales + begin * groups, (int32_t *)shifts + begin * groups};
}

/* To each sum, four products of a word's bytes: unsigned ones of w, signed ones of x. */
static inline vi dot_int8(vi sums, vi w, int32_t x) {
#if defined(__AVX512VNNI__) && V == 16
  return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__) && V == 8
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, _mm256_set1_epi32(x));
#else
  for (int shift = 0; shift < 32; shift += 8) sums += ((w >> shift) & 255) * (int32_t)(int8_t)(x >> shift);
  return sums;
#endif
}

/* To each sum, two products of a word's signed halves. */
static inline vi dot_int16(vi sums, vi w, int32_t x) {
#if defined(__AVX512VNNI__) && V == 16
  return (vi)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__) && V == 8
  return (vi)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)w, _mm256_set1_epi32(x));
#else
  return sums + ((w << 16) >> 16) * (int32_t)(int16_t)x + (w >> 16) * (x >> 16);
#endif
}

static inline vf scale_int8(const void *scale, int64_t at) { return *(const vf *)((const float *)scale + at); }
static inline vf scale_int16(const void *scale, int64_t at) {
  return (vf)(__builtin_convertvector(*(const vc *)((const uint8_t *)scale + at), vi) << 23);
}

/* out[m][0..1] += sum over the groups of k from `g` on of x[k / GROUP][m][GROUP] * panel[k], for M tokens. */
#define PANEL_WHOLE(TYPE, SIZE, START, M)                                                                    \
  static void panel_##TYPE##_##M(const int32_t *x, const float *x_scale, const int32_t *shift, const char *w, \
                                 const void *w_scale, int64_t g, int64_t k, const char *next, int64_t step,  \
                                 vf (*out)[2]) {                                                             \
    enum { WORDS = GROUP * SIZE / 4 };                                                                       \
    for (int64_t at = g * PANEL; k > 0; k -= GROUP, x += M * WORDS, at += PANEL, x_scale += M, shift += M) { \
      vi acc[M][2];                                                                                          \
      for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = (vi){0} + START;                                   \
      for (int i = 0; i < WORDS; i++, w += 4 * PANEL, next += 4 * step / SIZE) {                             \
        for (int line = 0; line < 4 * PANEL; line += 64) FETCH(next + line, w + line);                       \
        vi w0 = *(const vi *)w, w1 = *(const vi *)(w + 4 * V);                                               \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) {                                               \
          acc[m][0] = dot_##TYPE(acc[m][0], w0, x[m * WORDS + i]);                                           \
          acc[m][1] = dot_##TYPE(acc[m][1], w1, x[m * WORDS + i]);                                           \
        }                                                                                                    \
      }                                                                                                      \
      vf s0 = scale_##TYPE(w_scale, at), s1 = scale_##TYPE(w_scale, at + V);                                 \
      for (int m = 0; m < M; m++) {                                                                          \
        out[m][0] += __builtin_convertvector(acc[m][0], vf) * (s0 * x_scale[m]);                             \
        out[m][1] += __builtin_convertvector(acc[m][1], vf) * (s1 * x_scale[m]);                             \
      }                                                                                                      \
    }                                                                                                        \
  }
typedef void (*WholeProduct)(const int32_t *, const float *, const int32_t *, const char *, const void *, int64_t,
                             int64_t, const char *, int64_t, vf (*)[2]);
#define PRODUCT_INT8(M) PANEL_WHOLE(int8, 1, shift[m], M)
#define PRODUCT_INT16(M) PANEL_WHOLE(int16, 2, 0, M)
#define NAME_INT8(M) panel_int8_##M,
#define NAME_INT16(M) panel_int16_##M,
UP_TO_ROWS(PRODUCT_INT8)
UP_TO_ROWS(PRODUCT_INT16)
static const WholeProduct by_tokens_int8[ROWS] = {UP_TO_ROWS(NAME_INT8)};
static const WholeProduct by_tokens_int16[ROWS] = {UP_TO_ROWS(NAME_INT16)};

/* The sum of the squares of x[width], for a width up to PANEL. */
static inline float squares_of(const float *x, int64_t width) {
  float padded[PANEL] = {0};
  if (width < PANEL) memcpy(padded, x, width * sizeof *x), x = padded;
  vf low = *(const vf *)x, high = *(const vf *)(x + V);
  return sum_of(low * low + high * high);
}

/* The same in tiles of a group each: `shift` is nobody's, since weights have their signs. */
#define PANEL_INT8_TILES(M)                                                                                  \
  static void panel_int8_tiles_##M(const int32_t *x, const float *x_scale, const int32_t *shift, const char *w, \
                                   const void *w_scale, int64_t g, int64_t k, const char *next, int64_t step, \
                                   vf (*out)[2]) {                                                           \
    int32_t sums[2][TILE_ROWS][PANEL] __attribute__((aligned(64)));                                          \
    int64_t each = (step * GROUP + 63) / 64 * 64;                                                            \
    vf acc[M][2];                                                                                            \
    for (int m = 0; m < M; m++) acc[m][0] = out[m][0], acc[m][1] = out[m][1];                                \
    for (; k > 0; k -= GROUP, g++, x += M * GROUP / 4, x_scale += M, w += GROUP * PANEL, next += each) {     \
      int32_t(*sum)[PANEL] = sums[g % 2]; /* one is read while the other is multiplied */                    \
      for (int64_t line = 0; line < each; line += 64) __builtin_prefetch(next + line, 0, 2);                 \
      multiply_int8_tiles(x, w, *sum);                                                                       \
      vf s0 = scale_int8(w_scale, g * PANEL), s1 = scale_int8(w_scale, g * PANEL + V);                       \
      _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) {                                                 \
        acc[m][0] += __builtin_convertvector(*(vi *)sum[m], vf) * (s0 * x_scale[m]);                         \
        acc[m][1] += __builtin_convertvector(*(vi *)(sum[m] + V), vf) * (s1 * x_scale[m]);                   \
      }                                                                                                      \
    }                                                                                                        \
    for (int m = 0; m < M; m++) out[m][0] = acc[m][0], out[m][1] = acc[m][1];                                \
  }
#define NAME_INT8_TILES(M) panel_int8_tiles_##M,
UP_TO_ROWS(PANEL_INT8_TILES)
static const WholeProduct by_tokens_int8_tiles[ROWS] = {UP_TO_ROWS(NAME_INT8_TILES)};

/* The sums of one panel of the `count` tokens of a pass that begins with token `from` go where they belong: for
 * SWIGLU into packed y, but for whole numbers, which need a whole group to be packed, into y[tokens][n / 2]. ADD also
 * leaves squares[n / PANEL][tokens]: what a norm asks of the columns that a thread has just written. */
static void finish(const Linear *linear, int weights, int64_t tokens, int64_t from, int64_t count, int64_t first,
                   vf (*sums)[2], float *y, int64_t ldy, int mode, float *squares, Stream *stream) {
  int64_t width = linear->n - first < PANEL ? linear->n - first : PANEL;
  if (mode == SWIGLU && weights == TILES) {
    for (int64_t begin = 0; begin < count; begin += TILE_ROWS) {
      uint16_t *to = tiled(y, linear->n / 2, tokens, from + begin, first / 2);
      int64_t end = count < begin + TILE_ROWS ? count : begin + TILE_ROWS;
      for (int64_t m = begin; m < end; m++, to += TILE_K) {
        to_half_bfloat16(to, silu(sums[m][0]) * sums[m][1]);
        fetch(stream, 4);
      }
    }
    return;
  }
  if (mode == SWIGLU) {
    int64_t out = linear->n / 2, stride = IS_WHOLE(weights) ? out : V;
    float *to = y + from * out + first / 2 * (IS_WHOLE(weights) ? 1 : count);
    for (int64_t m = 0; m < count; m++) *(vf *)(to + m * stride) = silu(sums[m][0]) * sums[m][1];
    return;
  }
  float *to = y + from * ldy + first;
  for (int64_t m = 0; m < count; m++, to += ldy) {
    float *out = (float *)sums[m];
    fetch(stream, 2);
    if (linear->bias)
      for (int64_t i = 0; i < width; i++) out[i] += linear->bias[first + i];
    if (mode == ADD) {
      for (int64_t i = 0; i < width; i++) to[i] += out[i];
      squares[first / PANEL * tokens + from + m] = squares_of(to, width);
    } else if (width == PANEL)
      *(vf *)to = sums[m][0], *(vf *)(to + V) = sums[m][1];
    else
      memcpy(to, out, width * sizeof(float));
  }
}

/* One panel of y = x W for all tokens; x packed. */
static void panel(const Linear *linear, int weights, const float *x, int64_t tokens, int64_t index, float *y,
                  int64_t ldy, int mode, float *squares, Stream *stream) {
  int64_t k = linear->k, line = PANEL * bytes_of[weights], first = index * PANEL, all = passes_of(tokens);
  const char *w = (const char *)linear->w + index * k * line;
  int64_t bytes = k * line;
  const char *next = fetching_beside(stream, &bytes);
  stream->ahead -= k * line;
  if (weights == TILES) {
    int64_t rows = tile_rows(tokens), steps = k / TILE_K * ((tokens - 1) / (2 * TILE_ROWS) + 1);
    int64_t each = (bytes / 64 + steps - 1) / steps * 64;
    vf sums[2 * TILE_ROWS][2] __attribute__((aligned(64)));
    for (int64_t from = 0; from < tokens; from += 2 * TILE_ROWS, next += k / TILE_K * each) {
      int64_t left = tokens - from;
      Strided a = {(const char *)tiled((float *)x, k, tokens, from, 0), TILE_K * 2, rows * TILE_K * 2};
      multiply_tiles(a, left > TILE_ROWS ? a.at + TILE_ROWS * k * 2 : 0, (Strided){w, PANEL * 4, TILE_K * line},
                     k / TILE_K, next, each, (float *)sums, PANEL);
      finish(linear, weights, tokens, from, left < 2 * TILE_ROWS ? left : 2 * TILE_ROWS, first, sums, y, ldy, mode,
             squares, stream);
    }
    return;
  }
  int64_t step = bytes / (k * all);
  for (int64_t done = 0; done < all; done += PASSES) {
    int64_t passes = all - done < PASSES ? all - done : PASSES, block = passes > 1 ? BLOCK : k;
    int64_t begin = pass_begin(tokens, done), end = pass_begin(tokens, done + passes);
    vf acc[PASSES * ROWS][2];
    memset(acc, 0, (end - begin) * sizeof *acc);
    for (int64_t i = 0; i < k; i += block) {
      int64_t length = k - i < block ? k - i : block;
      const char *here = w + i * line;
      for (int64_t pass = 0; pass < passes; pass++, next += length * step) { /* each fetches its share */
        int64_t from = pass_begin(tokens, done + pass), count = pass_begin(tokens, done + pass + 1) - from;
        if (IS_WHOLE(weights)) {
          Quantized q = quantized((float *)x, weights, k, tokens, from);
          int64_t g = i / GROUP;
          (weights == INT16        ? by_tokens_int16
           : weights == INT8_TILES ? by_tokens_int8_tiles
                                   : by_tokens_int8)[count - 1](
              q.words + g * words_of(weights) * count, q.scales + g * count, q.shifts + g * count, here,
              linear->scale, index * k / GROUP + g, length, next, step, acc + (from - begin));
        } else
          (weights == BFLOAT16 ? by_tokens_bf16 : by_tokens_f32)[count - 1](
              x + from * k + i * count, here, length, next, step, acc + (from - begin));
      }
    }
    for (int64_t pass = done; pass < done + passes; pass++) {
      int64_t from = pass_begin(tokens, pass), count = pass_begin(tokens, pass + 1) - from;
      finish(linear, weights, tokens, from, count, first, acc + (from - begin), y, ldy, mode, squares, stream);
    }
  }
}

/* y[tokens][n] = x W, x packed; by all threads of the region that calls it. */
static void linear(const Linear *linear, int weights, const float *x, int64_t tokens, float *y, int64_t ldy,
                   int mode, float *squares, Barrier *barrier, Stream *stream) {
  int64_t begin, end;
  share(panels_of(linear), &begin, &end);
  for (int64_t i = begin; i < end; i++) panel(linear, weights, x, tokens, i, y, ldy, mode, squares, stream);
  meet(barrier, stream);
}

/* ---- what stands between them ------------------------------------------------------------------------ */

static float rms_scale(const float *x, int64_t n, float eps) {
  vf sums[4] = {{0}};
  int64_t i = 0;
  for (; i + 4 * V <= n; i += 4 * V)
    for (int j = 0; j < 4; j++) sums[j] += *(const vf *)(x + i + j * V) * *(const vf *)(x + i + j * V);
  float sum = 0;
  for (; i < n; i++) sum += x[i] * x[i];
  sums[0] += sums[1] + (sums[2] + sums[3]);
  for (int j = 0; j < V; j++) sum += sums[0][j];
  return 1.0f / sqrtf(sum / (float)n + eps);
}

static void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *y) {
  float scale = rms_scale(x, n, eps);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* One group of a token, of which `count` entries are there, normalised where there is a weight, as whole numbers with
 * their scale. */
static void quantize(const float *x, const float *weight, float norm, int64_t count, int weights, int32_t *words,
                     float *scale, int32_t *shift) {
  const float limit = weights == INT16 ? 8191.0f : 127.0f;
  float padded[2][GROUP] = {0};
  if (count < GROUP) {
    memcpy(padded[0], x, count * sizeof *x), x = padded[0];
    if (weight) memcpy(padded[1], weight, count * sizeof *weight), weight = padded[1];
  }
  vf v[GROUP / V];
  vi most = {0}, sums = {0}; /* floats without a sign are ordered as their bits are, NaN above all */
  for (int i = 0; i < GROUP / V; i++) {
    v[i] = *(const vf *)(x + i * V);
    if (weight) v[i] = v[i] * norm * *(const vf *)(weight + i * V);
    vi size = (vi)v[i] & 0x7fffffff, more = size > most;
    most = (size & more) | (most & ~more);
  }
  int32_t bits[V] __attribute__((aligned(64)));
  *(vi *)bits = most;
  for (int half = V / 2; half; half /= 2)
    for (int j = 0; j < half; j++) bits[j] = bits[j] > bits[j + half] ? bits[j] : bits[j + half];
  float top;
  memcpy(&top, bits, sizeof top);
  float times = limit / top;
  if (!(times < INFINITY)) times = 0.0f; /* next to nothing, or no number */
  for (int i = 0; i < GROUP / V; i++) {
    vi q = (vi)(v[i] * times + 12582912.0f) - 0x4b400000; /* 1.5 * 2^23: the sum's last bits are the rounded value */
    if (weights == INT16)
      *(vh *)(words + i * V / 2) = __builtin_convertvector(q, vh);
    else
      *(vb *)(words + i * V / 4) = __builtin_convertvector(q, vb);
    sums += q;
  }
  *scale = top / limit + top * 0.0f; /* an infinity must not become a number */
  if (weights == INT16) return;
  int32_t sum = 0;
  for (int j = 0; j < V; j++) sum += sums[j];
  *shift = -128 * sum;
}

/* TILE_K entries of a token, of which `left` are there, normalised where there is a weight, as bfloat16. */
static void tile_up(const float *x, const float *weight, float norm, int64_t left, uint16_t *to) {
  float padded[2][TILE_K] = {0};
  if (left < TILE_K) {
    memcpy(padded[0], x, left * sizeof *x), x = padded[0];
    if (weight) memcpy(padded[1], weight, left * sizeof *weight), weight = padded[1];
  }
  vf low = *(const vf *)x, high = *(const vf *)(x + V);
  if (weight) low = low * norm * *(const vf *)weight, high = high * norm * *(const vf *)(weight + V);
  to_bfloat16(to, low, high);
}

/* Packs x[tokens][width], with zeros up to k, and normalised where there is a `weight`: then `squares` has the sums of
 * its squares, [width / PANEL][tokens]. By all threads, each of which takes its share of k for all tokens: of x that
 * is what it wrote itself, and what another core wrote takes long to come. */
static void pack(const float *x, int64_t width, int64_t k, int64_t tokens, int weights, const float *weight,
                 float eps, const float *squares, float *y, Barrier *barrier, Stream *stream) {
  int64_t piece = IS_WHOLE(weights) ? GROUP : weights == TILES ? TILE_K : V, pieces = k / piece;
  int64_t all = passes_of(tokens);
  int64_t begin, end;
  share(pieces, &begin, &end);
  for (int64_t pass = 0; pass < all; pass++) {
    int64_t from = pass_begin(tokens, pass), count = pass_begin(tokens, pass + 1) - from;
    Quantized q = quantized(y, weights, k, tokens, from);
    for (int64_t m = 0; m < count; m++, x += width) {
      float scale = 1.0f;
      if (weight) {
        float sum = 0;
        for (int64_t p = 0; p < width; p += PANEL) sum += squares[p / PANEL * tokens + from + m];
        scale = 1.0f / sqrtf(sum / (float)width + eps);
      }
      for (int64_t p = begin; p < end; p++) {
        const float *source = x + p * piece, *factor = weight ? weight + p * piece : 0;
        int64_t place = p * count + m;
        fetch(stream, 4);
        if (IS_WHOLE(weights)) {
          int64_t left = width - p * piece;
          quantize(source, factor, scale, left < GROUP ? left : GROUP, weights, q.words + place * words_of(weights),
                   q.scales + place, q.shifts + place);
          continue;
        }
        if (weights == TILES) {
          tile_up(source, factor, scale, width - p * piece, tiled(y, k, tokens, from + m, p * piece));
          continue;
        }
        float *to = y + from * k + place * V;
        if (p * V + V > width)
          for (int64_t i = 0; i < V; i++)
            to[i] = p * V + i < width ? source[i] * (factor ? scale * factor[i] : 1.0f) : 0.0f;
        else {
          vf value = *(const vf *)source;
          if (factor) value = value * scale * *(const vf *)factor;
          *(vf *)to = value;
        }
      }
    }
  }
  meet(barrier, stream);
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

enum { QKV, OUT, GATE_UP, DOWN };

typedef struct {
  const float *norm_attention, *norm_mlp, *norm_q, *norm_k; /* the last two null where the model has none */
  Linear linear[4];
  void *keys;   /* float [rows][kv_heads][slots / V][head_dim][V]: slots beside each other are one load */
  void *values; /* float [rows][kv_heads][slots][head_dim] */
  /* for TILES bfloat16 [rows][kv_heads][slots / PANEL][head_dim / 2][PANEL][2] and
   * [rows][kv_heads][slots / 2][head_dim][2] */
} Layer;

typedef struct {
  int64_t layers, hidden, intermediate, q_heads, kv_heads, head_dim, slots; /* slots: a multiple of 4 V */
  float eps, scale;
  int64_t weights; /* FLOAT32 .. TILES */
  const void *embedding; /* [vocabulary][hidden], float or bfloat16 */
  const float *norm_final;
  const float *cos, *sin; /* [positions][head_dim / 2] */
  const Layer *layer;
  int64_t embedding_bytes; /* of an entry: 4 or 2 */
} Model;

/* A token sees its row's slots before `before` and those from `from` to its own. */
typedef struct {
  const int64_t *ids, *row, *slot, *position, *before, *from;
  const int64_t *group; /* [groups + 1] where tokens begin that share an attention pass: all of one row */
  int64_t tokens, groups;
} Feed;

/* Scores of the slots 0 .. end become e^(score - best), 0 where unseen, and up to slot `last`, a multiple of 2 V;
 * floats, or where `narrow` bfloat16, in the same place. Gives 1 / their sum. */
static inline float softmax(float *scores, int64_t before, int64_t from, int64_t end, int64_t last, int narrow) {
  const vf unseen = (vf){0} - INFINITY;
  for (int64_t s = before; s < from; s++) scores[s] = -INFINITY;
  for (int64_t s = end; s < last; s++) scores[s] = -INFINITY;
  vf best[2] = {unseen, unseen}, sums[2] = {{0}};
  for (int64_t s = 0; s < last; s += 2 * V)
    for (int i = 0; i < 2; i++) best[i] = larger(*(vf *)(scores + s + i * V), best[i]);
  float top = largest_of(larger(best[0], best[1]));
  for (int64_t s = 0; s < last; s += 2 * V) {
    vf p[2];
    for (int i = 0; i < 2; i++) {
      vf score = *(vf *)(scores + s + i * V);
      vi seen = ~(score <= unseen); /* a NaN, too: let through, the row is known to be broken */
      p[i] = (vf)((vi)vexp(score - top) & seen); /* e^-87 is little, and unseen is nothing */
      sums[i] += p[i];
    }
    if (narrow)
      to_bfloat16((uint16_t *)scores + s, p[0], p[1]);
    else
      *(vf *)(scores + s) = p[0], *(vf *)(scores + s + V) = p[1];
  }
  return 1.0f / sum_of(sums[0] + sums[1]);
}

/* scores[j][s] = scale * sum over d of q[d][j] keys[s][d], for Q queries and the slots 0 .. end, rounded up. */
#define SCORE(Q)                                                                                             \
  static void score_##Q(const Model *model, const float *q, const float *keys, int64_t end, float *scores) { \
    int64_t dim = model->head_dim, slots = model->slots;                                                     \
    for (int64_t s = 0; s < end; s += 2 * V) {                                                               \
      const float *k = keys + s * dim, *x = q;                                                               \
      vf acc[Q][2];                                                                                          \
      for (int j = 0; j < Q; j++) acc[j][0] = acc[j][1] = (vf){0};                                           \
      for (int64_t d = 0; d < dim; d++, x += Q, k += V) {                                                    \
        __builtin_prefetch(k + 2 * V * dim, 0, 3), __builtin_prefetch(k + 3 * V * dim, 0, 3);                \
        vf k0 = *(const vf *)k, k1 = *(const vf *)(k + dim * V);                                             \
        _Pragma("GCC unroll 16") for (int j = 0; j < Q; j++) {                                               \
          acc[j][0] += k0 * x[j];                                                                            \
          acc[j][1] += k1 * x[j];                                                                            \
        }                                                                                                    \
      }                                                                                                      \
      for (int j = 0; j < Q; j++)                                                                            \
        for (int b = 0; b < 2; b++) *(vf *)(scores + j * slots + s + b * V) = acc[j][b] * model->scale;      \
    }                                                                                                        \
  }

/* out[j][d] += sum over the slots from .. to of p[j][s] values[s][d], for Q queries. */
#define WEIGH(Q)                                                                                             \
  static void weigh_##Q(const Model *model, const float *p, const float *values, int64_t from, int64_t to,   \
                        float *out) {                                                                        \
    int64_t dim = model->head_dim, slots = model->slots;                                                     \
    float tile[Q][TILE] __attribute__((aligned(64)));                                                        \
    for (int64_t s = from; s < to; s += TILE) {                                                              \
      int64_t count = to - s < TILE ? to - s : TILE;                                                         \
      for (int j = 0; j < Q; j++) memcpy(tile[j], p + j * slots + s, count * sizeof(float));                 \
      for (int64_t d = 0; d < dim; d += 2 * V) {                                                             \
        const int64_t other = dim - d < 2 * V ? 0 : V; /* an odd half is computed twice */                   \
        const float *v = values + s * dim + d;                                                               \
        vf acc[Q][2];                                                                                        \
        for (int j = 0; j < Q; j++) {                                                                        \
          acc[j][0] = *(vf *)(out + j * dim + d);                                                            \
          acc[j][1] = *(vf *)(out + j * dim + d + other);                                                    \
        }                                                                                                    \
        for (int64_t i = 0; i < count; i++, v += dim) {                                                      \
          __builtin_prefetch(v + TILE * dim, 0, 3), __builtin_prefetch(v + TILE * dim + other, 0, 3);        \
          vf v0 = *(const vf *)v, v1 = *(const vf *)(v + other);                                             \
          _Pragma("GCC unroll 16") for (int j = 0; j < Q; j++) {                                             \
            acc[j][0] += v0 * tile[j][i];                                                                    \
            acc[j][1] += v1 * tile[j][i];                                                                    \
          }                                                                                                  \
        }                                                                                                    \
        for (int j = 0; j < Q; j++) {                                                                        \
          *(vf *)(out + j * dim + d) = acc[j][0];                                                            \
          *(vf *)(out + j * dim + d + other) = acc[j][1];                                                    \
        }                                                                                                    \
      }                                                                                                      \
    }                                                                                                        \
  }
#if V == 16
#define UP_TO_QUERIES(DO) UP_TO_12(DO)
#else
#define UP_TO_QUERIES(DO) DO(1) DO(2) DO(3) DO(4)
#endif
#define NAME_SCORE(Q) score_##Q,
#define NAME_WEIGH(Q) weigh_##Q,
UP_TO_QUERIES(SCORE)
UP_TO_QUERIES(WEIGH)
static void (*const score[QUERIES])(const Model *, const float *, const float *, int64_t, float *) = {
    UP_TO_QUERIES(NAME_SCORE)};
static void (*const weigh[QUERIES])(const Model *, const float *, const float *, int64_t, int64_t, float *) = {
    UP_TO_QUERIES(NAME_WEIGH)};

/* `times` what a token's head has read, packed where that can be done by heads, else mixed[tokens][q dim]. */
static void give(const Model *model, int64_t tokens, int64_t token, int64_t head, const float *x, float times,
                 float *mixed) {
  int64_t dim = model->head_dim, k = model->q_heads * dim, at = head * dim;
  if (model->weights == TILES) {
    for (int64_t d = 0; d < dim; d += 2 * V)
      to_bfloat16(tiled(mixed, k, tokens, token, at + d), *(const vf *)(x + d) * times,
                  *(const vf *)(x + d + V) * times);
    return;
  }
  for (int64_t d = 0; d < dim; d += V) {
    float *to = IS_WHOLE(model->weights) ? mixed + token * k + at + d : packed(mixed, k, tokens, token, at + d);
    *(vf *)to = *(const vf *)(x + d) * times;
  }
}

/* Queries of a key head that share a pass. */
int64_t mars_queries(int64_t weights) { return IN_TILES(weights) ? 2 * TILE_ROWS : QUERIES; }

/* softmax(q K) V of the tokens begin .. end of one row, for `heads` query heads from `first` on that share the
 * key head `kv`. Keys, and the values that all of these tokens see, are read once for all of them; what a token
 * sees behind those comes after, in the same order as if it were alone. */
static void attend(const Model *model, const Layer *layer, const Feed *feed, const float *qkv, int64_t begin,
                   int64_t end, int64_t kv, int64_t first, int64_t heads, float *scratch, float *mixed,
                   Stream *stream) {
  int64_t dim = model->head_dim, slots = model->slots, count = end - begin, queries = count * heads;
  int64_t base = (feed->row[begin] * model->kv_heads + kv) * slots * dim;
  int64_t width = (model->q_heads + 2 * model->kv_heads) * dim;
  float *scores = scratch, *q = scores + QUERIES * slots, *out = q + QUERIES * dim, inverse[QUERIES];
  for (int64_t j = 0; j < queries; j++) {
    const float *of = qkv + (begin + j / heads) * width + (first + j % heads) * dim;
    for (int64_t d = 0; d < dim; d++) q[d * queries + j] = of[d];
  }
  int64_t common = slots, last = 0;
  for (int64_t t = begin; t < end; t++) {
    int64_t own = feed->slot[t] + 1, before = feed->before[t];
    if (before < common) common = before;
    if (own > last) last = own;
    if (before > last) last = before;
  }
  const float *keys = (const float *)layer->keys + base, *values = (const float *)layer->values + base;
  score[queries - 1](model, q, keys, last, scores);
  for (int64_t j = 0; j < queries; j++) {
    int64_t t = begin + j / heads, own = feed->slot[t] + 1, before = feed->before[t], from = feed->from[t];
    own = own > before ? own : before;
    inverse[j] = softmax(scores + j * slots, before, from, own, (own + 2 * V - 1) / (2 * V) * 2 * V, 0);
    fetch(stream, 16);
  }
  memset(out, 0, queries * dim * sizeof(float));
  weigh[queries - 1](model, scores, values, 0, common, out);
  for (int64_t t = begin, j = 0; t < end; t++, j += heads) {
    int64_t before = feed->before[t], from = feed->from[t] > before ? feed->from[t] : before;
    weigh[heads - 1](model, scores + j * slots, values, common, before, out + j * dim);
    weigh[heads - 1](model, scores + j * slots, values, from, feed->slot[t] + 1, out + j * dim);
    for (int64_t h = 0; h < heads; h++)
      give(model, feed->tokens, t, first + h, out + (j + h) * dim, inverse[j + h], mixed);
  }
}

/* The same as `attend`, with tiles: slots that a token does not see have weight 0. */
static void attend_tiles(const Model *model, const Layer *layer, const Feed *feed, const float *qkv, int64_t begin,
                         int64_t end, int64_t kv, int64_t first, int64_t heads, float *scratch, float *mixed,
                         Stream *stream) {
  int64_t dim = model->head_dim, stride = model->slots + V; /* rows must not all fall into one set of the cache */
  int64_t queries = (end - begin) * heads, rows = tile_rows(queries);
  int64_t base = (feed->row[begin] * model->kv_heads + kv) * model->slots * dim;
  int64_t width = (model->q_heads + 2 * model->kv_heads) * dim, last = 0;
  const char *keys = (const char *)layer->keys + 2 * base, *values = (const char *)layer->values + 2 * base;
  float *scores = scratch, *out = scores + 2 * TILE_ROWS * stride, *q = out + 2 * TILE_ROWS * dim;
  for (int64_t t = begin, j = 0; t < end; t++) {
    const float *of = qkv + t * width + first * dim;
    for (int64_t h = 0; h < heads; h++, j++, of += dim) {
      uint16_t *to = tiled(q, dim, queries, j, 0);
      for (int64_t d = 0; d < dim; d += TILE_K, to += rows * TILE_K)
        to_bfloat16(to, *(const vf *)(of + d) * model->scale, *(const vf *)(of + d + V) * model->scale);
    }
    if (feed->slot[t] >= last) last = feed->slot[t] + 1;
    if (feed->before[t] > last) last = feed->before[t];
  }
  last = (last + PANEL - 1) / PANEL * PANEL;
  begin_tiles(rows);
  int64_t second = queries > TILE_ROWS;
  for (int64_t s = 0; s < last; s += PANEL) {
    Strided a = {(const char *)q, TILE_K * 2, rows * TILE_K * 2};
    Strided k = {keys + s * dim * 2, PANEL * 4, TILE_K * PANEL * 2};
    multiply_tiles(a, second ? a.at + TILE_ROWS * dim * 2 : 0, k, dim / TILE_K, k.at + KV_AHEAD, k.step, scores + s,
                   stride);
  }
  float inverse[2 * TILE_ROWS];
  for (int64_t t = begin, j = 0; t < end; t++) {
    int64_t own = feed->slot[t] + 1, before = feed->before[t];
    if (own < before) own = before;
    for (int64_t h = 0; h < heads; h++, j++) {
      inverse[j] = softmax(scores + j * stride, before, feed->from[t], own, last, 1);
      fetch(stream, 16);
    }
  }
  for (int64_t d = 0; d < dim; d += PANEL) {
    Strided p = {(const char *)scores, stride * 4, TILE_K * 2};
    Strided v = {values + d * 4, dim * 4, TILE_K * dim * 2};
    multiply_tiles(p, second ? p.at + TILE_ROWS * stride * 4 : 0, v, last / TILE_K, v.at + KV_AHEAD, d ? 0 : v.step,
                   out + d, dim);
  }
  for (int64_t t = begin, j = 0; t < end; t++)
    for (int64_t h = 0; h < heads; h++, j++)
      give(model, feed->tokens, t, first + h, out + j * dim, inverse[j], mixed);
}

/* The i-th of a feed's pieces of attention, each a key head of a group; those of a key head lie beside each other. */
static void attend_piece(const Model *model, const Layer *layer, const Feed *feed, const float *qkv, int64_t i,
                         float *scratch, float *mixed, Stream *stream) {
  int64_t g = i % feed->groups, kv = i / feed->groups, heads = model->q_heads / model->kv_heads;
  int64_t most = mars_queries(model->weights);
  for (int64_t h = 0; h < heads; h += most)
    (IN_TILES(model->weights) ? attend_tiles : attend)(model, layer, feed, qkv, feed->group[g], feed->group[g + 1], kv,
                                                      kv * heads + h, heads - h < most ? heads - h : most, scratch,
                                                      mixed, stream);
}

/* A token's head h of queries, keys and values: its position into a query or key, and a key or value into its
 * slot. A thread does a head for all tokens, since keys of slots beside each other share lines. */
static void store(const Model *model, const Layer *layer, const Feed *feed, int64_t t, int64_t h, float *head) {
  int64_t dim = model->head_dim, slot = feed->slot[t], kv = h - model->q_heads, position = feed->position[t];
  if (kv < model->kv_heads) {
    const float *norm = kv < 0 ? layer->norm_q : layer->norm_k;
    if (norm) rms_norm(head, norm, dim, model->eps, head);
    rotate(head, model->cos + position * dim / 2, model->sin + position * dim / 2, dim);
  }
  if (kv < 0) return;
  int64_t base = (feed->row[t] * model->kv_heads + kv % model->kv_heads) * model->slots * dim;
  if (IN_TILES(model->weights)) {
    /* Tiles multiply the values that a token does not see with 0, and 0 x NaN is NaN: a value that is no number is
     * kept as 0, and the key beside it as NaN, which reaches those that see it and no other. */
    const float *value = kv < model->kv_heads ? head + model->kv_heads * dim : head;
    vf off = {0};
    for (int64_t d = 0; d < dim; d += V) off += *(const vf *)(value + d) - *(const vf *)(value + d);
    int broken = 0;
    for (int i = 0; i < V; i++) broken |= off[i] != off[i];
    const vf instead = (vf){0} + (kv < model->kv_heads ? NAN : 0.0f);
    for (int64_t d = 0; d < dim; d += 2 * V) {
      uint16_t narrow[2 * V];
      to_bfloat16(narrow, broken ? instead : *(vf *)(head + d), broken ? instead : *(vf *)(head + d + V));
      if (kv < model->kv_heads) {
        uint16_t *keys = (uint16_t *)layer->keys + base + slot / PANEL * PANEL * dim + slot % PANEL * 2 + d * PANEL;
        for (int64_t i = 0; i < 2 * V; i += 2) memcpy(keys + i * PANEL, narrow + i, 2 * sizeof *narrow);
      } else {
        uint16_t *values = (uint16_t *)layer->values + base + slot / 2 * 2 * dim + slot % 2 + d * 2;
        for (int64_t i = 0; i < 2 * V; i++) values[i * 2] = narrow[i];
      }
    }
    return;
  }
  if (kv >= model->kv_heads) {
    memcpy((float *)layer->values + base + slot * dim, head, dim * sizeof(float));
    return;
  }
  float *keys = (float *)layer->keys + base + slot / V * V * dim + slot % V;
  for (int64_t d = 0; d < dim; d++) keys[d * V] = head[d];
}

/* ---- what Python calls ------------------------------------------------------------------------------- */

int64_t mars_vector(void) { return V; }

/* Whether products of int16 are faster than those of floats. */
int64_t mars_has_int16(void) {
#if (defined(__AVX512VNNI__) && V == 16) || (defined(__AVXVNNI__) && V == 8)
  return 1;
#else
  return 0;
#endif
}

/* Whether this processor and system have tiles for bfloat16; asks the system for them. */
int64_t mars_has_tiles(void) {
#if HAS_TILES
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
  return 0;
#endif
}

int64_t mars_model_bytes(void) { return sizeof(Model) + sizeof(Layer); } /* to check both sides' structs */

/* y[tokens][n] = x[tokens][width] W; scratch: [tokens][k]; by all threads of the region that calls it. */
static void multiply(const Linear *w, int weights, const float *x, int64_t width, int64_t tokens, float *y,
                     float *scratch, Barrier *barrier, Stream *stream) {
  if (IN_TILES(weights)) begin_tiles(rows_of(weights, tokens));
  pack(x, width, w->k, tokens, weights, 0, 0, 0, scratch, barrier, stream);
  linear(w, weights, scratch, tokens, y, w->n, STORE, 0, barrier, stream);
}

/* The same, by so many threads. */
void mars_linear(const Linear *w, int64_t weights, const float *x, int64_t width, int64_t tokens, float *y,
                 float *scratch, int64_t threads) {
  Barrier barrier = {0};
#pragma omp parallel num_threads(threads)
  {
    Stream stream = {&w, 1, weights};
    next_part(&stream);
    multiply(w, (int)weights, x, width, tokens, y, scratch, &barrier, &stream);
    if (IN_TILES(weights)) end_tiles();
  }
}

/* p[i] = softmax(logits[i])[token[i]], for `count` rows of `n` logits. */
void mars_probability(const float *logits, int64_t n, const int64_t *token, int64_t count, float *p,
                      int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) {
    const float *x = logits + i * n, own = x[token[i]];
    const vf most = (vf){0} + 80.0f; /* a token this far behind another has no chance */
    vf sums = {0};
    int64_t j = 0;
    for (; j + V <= n; j += V) {
      vf ahead = *(const vf *)(x + j) - own;
      vi more = ahead > most;
      sums += vexp((vf)(((vi)most & more) | ((vi)ahead & ~more)));
    }
    float sum = 0;
    for (; j < n; j++) sum += expf(x[j] - own);
    for (int k = 0; k < V; k++) sum += sums[k];
    p[i] = 1.0f / sum;
  }
}

/* The token's embedding. */
static void embed(const Model *model, int64_t id, float *x) {
  int64_t hidden = model->hidden;
  if (model->embedding_bytes == sizeof(float)) {
    memcpy(x, (const float *)model->embedding + id * hidden, hidden * sizeof(float));
    return;
  }
  const uint16_t *from = (const uint16_t *)model->embedding + id * hidden;
  uint32_t *to = (uint32_t *)x;
  for (int64_t i = 0; i < hidden; i++) to[i] = (uint32_t)from[i] << 16;
}

/* Where a forward computes: x [tokens][hidden]; normed [tokens][hidden, up to whole vectors or groups], whole numbers:
 * or [tokens][intermediate]; qkv [tokens][(q + 2 kv) dim], or as wide as packed mixed; mixed [tokens][q dim]; mlp
 * [tokens][intermediate or hidden, if that is more]; squares [tokens][panels of hidden]; own [threads][own_size],
 * `mars_queries` times (slots + 2 dim). */
typedef struct {
  float *x, *normed, *qkv, *mixed, *mlp, *squares, *own;
  int64_t own_size;
} Scratch;

/* x: final hidden states out. By all threads of the region that calls it. */
static void forward(const Model *model, const Feed *feed, const Scratch *at, Barrier *barrier, Stream *stream) {
  int64_t tokens = feed->tokens, hidden = model->hidden, dim = model->head_dim, kv_heads = model->kv_heads;
  int64_t width = (model->q_heads + 2 * kv_heads) * dim;
  int weights = (int)model->weights;
  float *x = at->x, *normed = at->normed, *qkv = at->qkv, *mixed = at->mixed, *mlp = at->mlp;
  float *squares = at->squares;
  float *scratch = at->own + omp_get_thread_num() * at->own_size;
  if (IN_TILES(weights)) begin_tiles(rows_of(weights, tokens));
#pragma omp for schedule(static) nowait
  for (int64_t t = 0; t < tokens; t++) {
    float *to = x + t * hidden;
    embed(model, feed->ids[t], to);
    for (int64_t i = 0; i < hidden; i += PANEL)
      squares[i / PANEL * tokens + t] = squares_of(to + i, hidden - i < PANEL ? hidden - i : PANEL);
  }
  meet(barrier, stream);
  for (int64_t l = 0; l < model->layers; l++) {
    const Layer *layer = &model->layer[l];
    const Linear *to = layer->linear;
    pack(x, hidden, to[QKV].k, tokens, weights, layer->norm_attention, model->eps, squares, normed, barrier,
         stream);
    linear(&to[QKV], weights, normed, tokens, qkv, width, STORE, 0, barrier, stream);
#pragma omp for schedule(static) nowait
    for (int64_t h = 0; h < model->q_heads + 2 * kv_heads; h++)
      for (int64_t t = 0; t < tokens; t++) {
        store(model, layer, feed, t, h, qkv + t * width + h * dim);
        fetch(stream, 8);
      }
    meet(barrier, stream);
    int64_t pieces = feed->groups * kv_heads, begin, end;
    if (pieces <= 4 * omp_get_num_threads()) { /* a lone row's groups share its keys: one core shall read them */
      share(pieces, &begin, &end);
      for (int64_t i = begin; i < end; i++) attend_piece(model, layer, feed, qkv, i, scratch, mixed, stream);
    } else { /* rows and cuts of a prompt differ in length */
#pragma omp for schedule(dynamic) nowait
      for (int64_t i = 0; i < pieces; i++) attend_piece(model, layer, feed, qkv, i, scratch, mixed, stream);
    }
    if (IN_TILES(weights)) begin_tiles(rows_of(weights, tokens)); /* again, for the products */
    meet(barrier, stream);
    float *packed_mixed = mixed, *packed_mlp = mlp;
    if (IS_WHOLE(weights)) /* qkv is read by then */
      pack(mixed, model->q_heads * dim, to[OUT].k, tokens, weights, 0, 0, 0, packed_mixed = qkv, barrier, stream);
    linear(&to[OUT], weights, packed_mixed, tokens, x, hidden, ADD, squares, barrier, stream);
    pack(x, hidden, to[GATE_UP].k, tokens, weights, layer->norm_mlp, model->eps, squares, normed, barrier, stream);
    linear(&to[GATE_UP], weights, normed, tokens, mlp, model->intermediate, SWIGLU, 0, barrier, stream);
    if (IS_WHOLE(weights))
      pack(mlp, model->intermediate, to[DOWN].k, tokens, weights, 0, 0, 0, packed_mlp = normed, barrier, stream);
    linear(&to[DOWN], weights, packed_mlp, tokens, x, hidden, ADD, squares, barrier, stream);
  }
#pragma omp for schedule(static) nowait
  for (int64_t t = 0; t < tokens; t++)
    rms_norm(x + t * hidden, model->norm_final, hidden, model->eps, x + t * hidden);
  meet(barrier, stream);
}

/* Where the largest of n logits is, the first of equal ones; -2 where one is NaN, or the largest no number. */
static int64_t best_of(const float *x, int64_t n) {
  vf best = (vf){0} - INFINITY;
  vi at = {0}, broken = {0};
  int64_t i = 0;
  for (; i + V <= n; i += V) {
    vf v = *(const vf *)(x + i);
    vi more = v > best;
    best = (vf)(((vi)v & more) | ((vi)best & ~more));
    at = (((vi){0} + (int32_t)i) & more) | (at & ~more);
    broken |= v != v;
  }
  float top = -INFINITY;
  int64_t where = -2;
  for (int j = 0; j < V; j++) {
    if (broken[j]) return -2;
    if (best[j] > top || (best[j] == top && at[j] + j < where)) top = best[j], where = at[j] + j;
  }
  for (; i < n; i++) {
    if (x[i] != x[i]) return -2;
    if (x[i] > top) top = x[i], where = i;
  }
  return top < INFINITY ? where : -2;
}

/* A forward, and behind it logits[reads][n] of the tokens `read`, by `head`, -INFINITY at `never` (if that is not
 * -1), and where each one's best is. Gives the forward's seconds, without those of the logits. */
double mars_decode(const Model *model, const Feed *feed, const Scratch *at, const Linear *head, const int64_t *read,
                   int64_t reads, float *logits, int64_t never, int64_t *best, int64_t threads) {
  double begun = omp_get_wtime(), seconds = 0;
  const Linear *order[4 * model->layers + 1];
  for (int64_t i = 0; i < 4 * model->layers; i++) order[i] = &model->layer[i / 4].linear[i % 4];
  order[4 * model->layers] = head;
  Barrier barrier = {0};
#pragma omp parallel num_threads(threads)
  {
    Stream stream = {order, 4 * model->layers + (reads > 0), model->weights};
    next_part(&stream);
    forward(model, feed, at, &barrier, &stream);
    if (!omp_get_thread_num()) seconds = omp_get_wtime() - begun;
    if (reads) {
      int64_t begin, end;
      share(reads, &begin, &end);
      for (int64_t i = begin; i < end; i++)
        memcpy(at->mlp + i * model->hidden, at->x + read[i] * model->hidden, model->hidden * sizeof(float));
      meet(&barrier, &stream);
      multiply(head, (int)model->weights, at->mlp, model->hidden, reads, logits, at->normed, &barrier, &stream);
      for (int64_t i = begin; i < end; i++) {
        float *own = logits + i * head->n;
        if (never >= 0) own[never] = -INFINITY;
        best[i] = best_of(own, head->n);
      }
    }
    if (IN_TILES(model->weights)) end_tiles();
  }
  return seconds;
}
