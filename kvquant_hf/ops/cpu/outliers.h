// Outliers: entries of a block that are stored as they are, beside codes that say nothing of them.
#pragma once
#include "decode.h"

#if KO || VO
typedef uint32_t __attribute__((may_alias, aligned(1))) word;

// Byte `at` of a buffer, in the low bits. Rows and blocks begin where words do, so that a whole word can be loaded: of
// words, unlike bytes, compilers gather sixteen at a time.
INLINE uint32_t byte_at(const void *p, int at) { return ((const word *)p)[at >> 2] >> (at & 3) * 8; }

// Code `element` of row `row` of rows of LEN codes.
template <int B, int LEN> INLINE int code_of(const uint8_t *codes, int row, int element) {
  constexpr int U = unit_of(LEN), SPAN = B == 8 ? U : B == 4 ? U / 2 : U / 4, LOW = B == 3 ? 2 : B;
  int start = row * (LEN * B / 8) + element / U * (U * B / 8), i = element % U;
  int code = byte_at(codes, start + i % SPAN) >> i / SPAN * LOW & ((1 << LOW) - 1);
  if constexpr (B == 3) code |= (byte_at(codes, start + U / 4 + i % (U / 8)) >> i / (U / 8) & 1) << 2;
  return code;
}

// Sixteen numbers of a buffer of float32 or float16.
INLINE vf gathered(const char *p, const int *at, bool wide) {
  vf out;
  if (wide) {
    for (int j = 0; j < 16; j++) out[j] = ((const float *)p)[at[j]];
    return out;
  }
  uint16_t half[16];
  for (int j = 0; j < 16; j++) half[j] = ((const word *)p)[at[j] >> 1] >> (at[j] & 1) * 16;
  return half16(half);
}

// Outliers of a block, and what they differ by from what their codes say; sixteen are read together.
template <int COUNT> struct Differences {
  static constexpr int FULL = (COUNT + 15) / 16 * 16;
  int row[FULL], element[FULL];
  float by[FULL];

  // `codes`: those of block `n`. `places`, `values`, `meta0`: where outliers and parameters of block 0 begin.
  template <int B, int S, int ROWS, int LEN, int G>
  INLINED void read(const Sparse &sparse, int64_t places, int64_t values, const uint8_t *codes, const float *levels,
                    const char *scales, const char *zeros, bool wide, int64_t meta0, int64_t n) {
    constexpr int NG = (LEN + G - 1) / G;
    int place[FULL] = {}, group[FULL], code[FULL];
    const uint16_t *narrow = (const uint16_t *)sparse.place + places + n * COUNT;
    const int32_t *whole = (const int32_t *)sparse.place + places + n * COUNT;
    if (sparse.pwide) for (int j = 0; j < COUNT; j++) place[j] = whole[j];
    else for (int j = 0; j < COUNT; j++) place[j] = narrow[j];
    for (int j = 0; j < FULL; j++) {
      row[j] = place[j] / LEN;
      element[j] = place[j] % LEN;
      group[j] = row[j] * NG + element[j] / G;
      code[j] = code_of<B, LEN>(codes, row[j], element[j]);
    }
    char exact[4 * FULL] = {};
    int64_t first = values + n * COUNT, start = (meta0 + n * ROWS * NG) * (wide ? 4 : 2);
    if (sparse.vwide) memcpy(exact, sparse.value + 4 * first, 4 * COUNT);
    else memcpy(exact, sparse.value + 2 * first, 2 * COUNT);
    for (int j = 0; j < FULL; j += 16) {
      vf level;
      for (int i = 0; i < 16; i++) level[i] = is_even(S) ? code[j + i] : levels[code[j + i]];
      vf scale = gathered(scales + start, group + j, wide);
      vf zero = zeros ? gathered(zeros + start, group + j, wide) : scale * middle_of(B, S);
      store(by + j, meta(exact, j, sparse.vwide) - (scale * level + zero));
    }
  }
};
#endif

#if KO && !UNROTATE
// The outliers of block `n` join its scores: a key that is off by x in channel c of the token at offset t adds the
// product of x with the query turned back by that offset, at c.
static __attribute__((noinline)) void score_outliers(const Args &a, State &st, int b, int h, const uint8_t *k,
                                                     int64_t meta0, int64_t n, int first) {
  const Sparse &sparse = a.koutliers;
  Differences<KO> off;
  off.read<KB, KT, KROWS, KLEN, GK>(sparse, b * sparse.pb + h * sparse.ph, b * sparse.vb + h * sparse.vh,
                                    k + n * KROWS * (KLEN * KB / 8), a.klevels, a.ks, a.kz, a.kwide, meta0, n);
  const int *channel = KX ? off.element : off.row, *token = KX ? off.row : off.element;
  const float(*q)[D] = KH ? st.qb : st.q;
  // The query turned back by the block's start. At a channel and at the one `mate` it is paired with, it comes in with the
  // cosine and sine of the token's offset: q · R(t) k = k · R(-t) q.
  constexpr int FULL = Differences<KO>::FULL;
  [[maybe_unused]] float turned[R][D], c[FULL], s[FULL];
  [[maybe_unused]] int mate[FULL];
  if (ROPE) {
    float x[R][PAIRS + 1], y[R][PAIRS + 1];
    turn_queries(a, st, n, x, y);
    for (int r = 0; r < R; r++) {
      memcpy(turned[r], q[r], sizeof turned[r]);
      float *first_of = turned[r] + RO, *second_of = first_of + (ROPE == 1 ? HALF : 1);
      constexpr int STEP = ROPE == 1 ? 1 : 2;
      for (int p = 0; p < HALF; p++) {
        first_of[STEP * p] = x[r][p];
        second_of[STEP * p] = y[r][p];
      }
    }
    const float *cosines = a.cosb, *sines = a.sinb;
    for (int j = 0; j < FULL; j++) {
      int d = channel[j] - RO, p = ROPE == 1 ? d % (HALF > 0 ? HALF : 1) : d / 2;
      bool is_turned = RW == D || (d >= 0 && d < RW), is_second = ROPE == 1 ? d >= HALF : d % 2;
      int at = is_turned ? KX ? token[j] * PAIRS + p : p * L + token[j] : 0;
      float cosine = cosines[at], sine = sines[at];
      c[j] = is_turned ? cosine : 1.f;
      s[j] = !is_turned ? 0.f : is_second ? -sine : sine;
      mate[j] = !is_turned ? channel[j] : RO + (ROPE != 1 ? d ^ 1 : is_second ? d - HALF : d + HALF);
    }
  }
  for (int r = 0; r < R; r++) {
    float add[FULL];
    for (int j = 0; j < FULL; j++) {
      int d = channel[j];
      add[j] = off.by[j] * (ROPE ? turned[r][d] * c[j] + turned[r][mate[j]] * s[j] : q[r][d]);
    }
    for (int j = 0; j < KO; j++) st.s[r][first + token[j]] += add[j];
  }
}
#endif

#if VO
// The outliers of the blocks of a tile join the sums, times the weights of their tokens.
static __attribute__((noinline)) void sum_outliers(const Args &a, State &st, int b, int h, const uint8_t *v,
                                                   int64_t meta0, int64_t n, int tokens) {
  const Sparse &sparse = a.voutliers;
  for (int t0 = 0; t0 < tokens; t0 += L, n++) {
    Differences<VO> off;
    off.read<VB, VT, VROWS, VLEN, GV>(sparse, b * sparse.pb + h * sparse.ph, b * sparse.vb + h * sparse.vh,
                                      v + n * VROWS * (VLEN * VB / 8), a.vlevels, a.vs, a.vz, a.vwide, meta0, n);
    const int *channel = VX ? off.row : off.element, *token = VX ? off.element : off.row;
    for (int r = 0; r < R; r++) {
      float add[Differences<VO>::FULL];
      for (int j = 0; j < Differences<VO>::FULL; j++) add[j] = st.s[r][t0 + token[j]] * off.by[j];
      for (int j = 0; j < VO; j++) st.sum[PARTS - 1][r][channel[j]] += add[j];
    }
  }
}
#endif
