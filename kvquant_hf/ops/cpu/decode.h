// What the parts of decode.cpp share: constants of a variant, arguments, state, and how a block is read.
//
// Compiled once for each combination of
//   KB VB    bits of key and value codes (2, 3, 4, 8), or 16: stored as they came
//   D DV     head size of keys and values (multiples of 16)
//   L        tokens of a block; GK tokens and GV channels share a scale
//   R        query rows of one key/value head that share every load of its keys and values
//   ROPE     0: keys are read as stored, 1: pairs (i, i + RW/2), 2: pairs (2i, 2i + 1)
//   RO RW    first rotated channel and number of rotated channels
//   KH VH    basis in which keys, values are stored (enum Basis)
//   KG VG    heads of keys, of values that are mixed with each other at equal channel, 1: none
//   KF VF    whether blocks have a factor per element of a row: keys one per token, values one per channel of a block
//   KP       channels of a block of keys that have two more bits
//   KM VM    what bytes of scales of keys, values stand for (enum Coding); symmetric codes only
//   KT VT    what codes of keys, values stand for (enum Spacing)
//   KX VX    whether keys lie per token, values per channel: across the usual granularity
//   KO VO    outliers of a block of keys, of values: entries that are stored as they are, whatever their codes say
//   KIND     element type of exact tokens (enum Kind)
//
// Legend: B batch, H key/value heads, G query heads that share one, N blocks, T tokens. Rows of codes are packed as in
// packing.py: units of U codes, so that one load and one shift give sixteen consecutive codes.
#pragma once
#include "levels.h"

// Whether the rotation of keys has to be undone before they are scored; else the query is rotated like them.
#define UNROTATE (KB != 16 && KH && (ROPE || KG > 1))

constexpr int unit_of(int n) { return n % 32 == 0 ? 32 : 16; }
// Rows of codes of a block, and codes of a row.
constexpr int KROWS = KX ? L : D, KLEN = KX ? D : L, VROWS = VX ? DV : L, VLEN = VX ? L : DV;
constexpr int UK = unit_of(KLEN), UV = unit_of(VLEN), WK = UK / 16, WV = UV / 16;
// Blocks and tokens that share one softmax step: one block where its values are summed apart, for their factors.
constexpr int NB = !VF && L < 64 ? 64 / L : 1, TILE = NB * L;
constexpr int HALF = RW / 2, PAIRS = (HALF + 15) / 16 * 16;
constexpr int NGK = (KLEN + GK - 1) / GK, NGV = (VLEN + GV - 1) / GV;
enum Basis { PLAIN = 0, HADAMARD = 1, SIGNED_HADAMARD = 2 };  // the last: channels had a sign each first
enum Coding { NUMBERS = 0, OCTAVES = 1, FP8 = 2 };  // scales are numbers, or bytes relative to one of their block
constexpr int PARTS = VH ? 2 : 1;  // sums in the plain and in the Hadamard basis
constexpr float LOG2E = 1.44269504088896340736f;

struct Exact {                     // tokens kept as they came
  const char *k, *v;               // [B, H, count, D]
  int64_t kb, kh, kt, vb, vh, vt;  // strides of batch, head and token
  int64_t first, count;            // column of the first in the mask
};
struct Sparse {                    // outliers of each block, ascending places and values, [B, H, N, KO or VO]
  const char *place, *value;
  int64_t pb, ph, vb, vh;          // strides of batch and head
  int64_t pwide, vwide;            // whether places have 32 bits instead of 16, values are float32 instead of float16
};
struct Args {
  const char *q;                   // [B, H·G, q_len, D]
  int64_t qb, qh, qt, kind;        // strides of batch, head and token; element type of query and output
  char *out;                       // [B, H·G, q_len, DV], contiguous
  const char *kc, *ks, *kz, *vc, *vs, *vz;         // codes, scales, zero points
  int64_t kcb, kch, ksb, ksh, vcb, vch, vsb, vsh;  // strides of batch and head, in elements
  int64_t kwide, vwide;            // whether scales and zero points are float32 instead of float16
  const char *mask;                // [.., .., .., T] or null
  int64_t mkind, mb, mh, mq;       // element type (3: boolean), strides of batch, query head and query row
  const float *cosa, *sina;        // [N, PAIRS] rotation of block starts
  const float *cosb, *sinb;        // [RW/2, L] rotation of offsets; [L, PAIRS] with KX or UNROTATE
  float *scratch;                  // [tasks, R, 2 + PARTS · DV] for splits
  int64_t batch, heads, group, q_len, blocks, first, splits;
  Exact exact[3];
  const char *kfactor, *vfactor;   // factors [B, H, N, L] of keys and [B, H, N, DV] of values; the other way with KX, VX
  int64_t kfb, kfh, vfb, vfh;      // their strides of batch and head, in elements
  int64_t kfwide, vfwide;          // whether they are float32 instead of float16
  const uint8_t *extra, *promoted; // low two bits [B, H, N, KP, L/4] and numbers [B, H, N, KP] of promoted channels
  int64_t eb, eh, pb, ph;          // their strides of batch and head
  const char *vbase;               // what bytes of scales of values are relative to, [B, H, N]
  int64_t vbb, vbh, vbwide;        // its strides of batch and head, and whether it is float32 instead of float16
  const float *klevels, *vlevels;  // tables of what codes stand for, with KT, VT
  Sparse koutliers, voutliers;
  const char *kbase;               // what bytes of scales of keys are relative to, like `vbase`
  int64_t kbb, kbh, kbwide;
  const float *ksigns, *vsigns;    // signs of channels, with SIGNED_HADAMARD
  const int *korder, *vorder;      // channel of each place before it was mixed, or null for the order they have
};

// Channels of a head in the order in which they are mixed …
template <int N> INLINE void ordered(const int *order, float *channels) {
  float plain[N];
  memcpy(plain, channels, sizeof plain);
  for (int p = 0; p < N; p++) channels[p] = plain[order[p]];
}

// … and back.
template <int N> INLINE void unordered(const int *order, float *channels) {
  float mixed[N];
  memcpy(mixed, channels, sizeof mixed);
  for (int p = 0; p < N; p++) channels[order[p]] = mixed[p];
}

struct State {
  float peak[R];
  vf total[R], zero[VB == 16 ? 1 : R][NGV];  // zero: Σ weight · zero point of each group, one lane per token
  alignas(64) float q[R][D], qb[KH && !UNROTATE ? R : 1][D], x[R][PAIRS + 1], y[R][PAIRS + 1];
  [[maybe_unused]] float group[KX ? R : 1][NGK];  // sums of the query over the channels of a group
  alignas(64) float sum[PARTS][R][DV];
  alignas(64) float s[R][TILE];
};

INLINE vf meta(const char *p, int64_t i, bool wide) { return wide ? load((const float *)p + i) : half16(p + 2 * i); }

// Tokens and vectors of channels taken together, so that enough sums are under way at a time.
constexpr int AHEAD = R <= 2 ? 4 : 2, ACROSS = DV % 64 == 0 && R <= 4 ? 4 : DV % 32 == 0 ? 2 : 1;

// out[r][j] = Σ_i of the products of `row(j)`, N numbers that `numbers(row, i, half)` gives sixteen at a time, with query
// row r, for sixteen rows; W vectors of a row are worth asking for together.
template <int N, int W, int STEP, class Row, class Numbers>
INLINE void sixteen_rows(const float *query, Row row, Numbers numbers, vf *out) {
  vf lanes[R][16];
  for (int t = 0; t < 16; t += AHEAD) {
    decltype(row(0)) at[AHEAD];
    for (int j = 0; j < AHEAD; j++) at[j] = row(t + j);
    vf acc[AHEAD][R];
    each<AHEAD>([&](auto j) INLINED { each<R>([&](auto r) INLINED { acc[j][r] = vf{}; }); });
    for (int d = 0; d < N; d += 16 * W)
      each<W>([&](auto i) INLINED {
        vf q[R];
        each<R>([&](auto r) INLINED { q[r] = load(query + r * STEP + d + 16 * i); });
        each<AHEAD>([&](auto j) INLINED {
          vf x = numbers(at[j], d, i);
          each<R>([&](auto r) INLINED { acc[j][r] += x * q[r]; });
        });
      });
    each<AHEAD>([&](auto j) INLINED { each<R>([&](auto r) INLINED { lanes[r][t + j] = acc[j][r]; }); });
  }
  for (int r = 0; r < R; r++) out[r] = sums_of_lanes(lanes[r]);
}

// The block to be read next. Its lines are asked for one by one while this block is worked on, so that reading and
// computing overlap; all at once they would fill the processor's queue of misses.
struct Next {
  const char *k, *v;
  INLINED void expect(int step, int steps) const {
    constexpr int KSIZE = D * L * KB / 8, VSIZE = L * DV * VB / 8;
    if (KB != 16) __builtin_prefetch(k + step * (KSIZE / steps));
    if (VB != 16) __builtin_prefetch(v + step * (VSIZE / steps));
  }
};

// Scales that sixteen bytes stand for, relative to `base`. OCTAVES, see quantizers/second_level.py: base · 2^-((255 -
// byte) / 32), eight to the octave where the base is negative; byte 0 is zero. FP8, see quantizers/nvfp4.py: base · e4m3 /
// 448; four bits of exponent and three of mantissa are those of a float16 from bit 7 on, times 2^-8.
template <int M> INLINE vf byte_scales(const uint8_t *p, float base) {
  if constexpr (M == FP8) {
    v16u16 half = __builtin_convertvector(raw<v16u8>(p), v16u16) << 7;
    return half16(&half) * (256.f / 448.f) * base;
  } else {
    vf byte = __builtin_convertvector(raw<v16u8>(p), vf);
    vf scale = exp2v((byte - 255.f) * (base < 0 ? 1 / 8.f : 1 / 32.f)) * fabsf(base);
    return byte > 0.f ? scale : vf{};
  }
}

// What the bytes of a block are relative to, number `at`.
template <int M> INLINE float base_of(const char *bases, bool wide, int64_t at) {
  if constexpr (M == NUMBERS) return 1;
  else return wide ? ((const float *)bases)[at] : fetch1(F16, bases, at);
}

// Scales and zero points of sixteen groups, from number `at` on; scales of bytes are relative to `base`.
template <int B, int S, int M>
INLINE void parameters(const char *scales, const char *zeros, bool wide, int64_t at, float base, vf &scale, vf &zero) {
  if constexpr (M != NUMBERS) {
    scale = byte_scales<M>((const uint8_t *)scales + at, base);
    zero = scale * middle_of(B, S);
    return;
  }
  scale = meta(scales, at, wide);
  if (!zeros) { zero = scale * middle_of(B, S); return; }
  zero = meta(zeros, at, wide);
  if constexpr (S == SIGNED) {  // a zero point where the sign bit of the scale is set, symmetric codes elsewhere
    vf size = (vf)((vi)scale & 0x7FFFFFFF);
    zero = (vi)scale < 0 ? zero : size * middle_of(B, S);
    scale = size;
  }
}

// Those of N groups.
template <int B, int S, int M, int N>
INLINE void parameters(const char *scales, const char *zeros, bool wide, int64_t at, float base, float *scale, float *zero) {
  for (int i = 0; i < N; i += 16) {
    vf s, z;
    parameters<B, S, M>(scales, zeros, wide, at + i, base, s, z);
    store(scale + i, s);
    store(zero + i, z);
  }
}

// Sums over each group of G of a row of N numbers.
template <int N, int G> INLINE void sums_of_groups(const float *row, float *sums) {
  for (int g = 0; g * G < N; g++) {
    vf sum = {};
    for (int i = g * G; i < (g + 1) * G && i < N; i += 16) sum += load(row + i);
    sums[g] = hsum(sum);
  }
}

// A row of N numbers times as many factors, from number `at` on.
template <int N> INLINE void times_factors(const float *row, const char *factors, int64_t at, bool wide, float *out) {
  for (int i = 0; i < N; i += 16) store(out + i, load(row + i) * meta(factors, at + i, wide));
}

#if KB != 16
// q · R(a + b) k = (R(-a) q) · R(b) k: the rotation of the block's start is undone on the query.
INLINE void turn_queries(const Args &a, State &st, int64_t n, float (*x)[PAIRS + 1], float (*y)[PAIRS + 1]) {
  for (int p = 0; p < PAIRS; p += 16) {
    vf c = load(a.cosa + n * PAIRS + p), s = load(a.sina + n * PAIRS + p);
    for (int r = 0; r < R; r++) {
      vf qx = load(&st.x[r][p]), qy = load(&st.y[r][p]);
      store(&x[r][p], qx * c + qy * s);
      store(&y[r][p], qy * c - qx * s);
    }
  }
}
#endif
