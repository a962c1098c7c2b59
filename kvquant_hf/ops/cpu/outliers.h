// Outliers: entries of a block that are stored as they are, beside codes that say nothing of them.
#pragma once
#include "decode.h"

#if KO || VO
// Outliers of a block, and what they differ by from what their codes say.
template <int COUNT> struct Differences {
  int row[COUNT], element[COUNT];
  float by[COUNT];

  // `codes`: those of block `n`. `places`, `values`, `meta0`: where outliers and parameters of block 0 begin.
  template <int B, int S, int ROWS, int LEN, int G>
  INLINED void read(const Sparse &sparse, int64_t places, int64_t values, const uint8_t *codes, const float *levels,
                    const char *scales, const char *zeros, bool wide, int64_t meta0, int64_t n) {
    constexpr int U = unit_of(LEN), NG = (LEN + G - 1) / G;
    const int16_t *narrow = (const int16_t *)sparse.place + places + n * COUNT;
    for (int j = 0; j < COUNT; j++) {
      int place = sparse.pwide ? ((const int32_t *)sparse.place)[places + n * COUNT + j] : (uint16_t)narrow[j];
      row[j] = place / LEN;
      element[j] = place % LEN;
    }
    int kind = wide ? F32 : F16;
    for (int j = 0; j < COUNT; j++) {
      int code = code_at<B, U>(codes + row[j] * (LEN * B / 8), element[j]);
      int64_t group = meta0 + (n * ROWS + row[j]) * NG + element[j] / G;
      float scale = fetch1(kind, scales, group);
      float zero = zeros ? fetch1(kind, zeros, group) : scale * middle_of(B, S);
      float exact = fetch1(sparse.vwide ? F32 : F16, sparse.value, values + n * COUNT + j);
      by[j] = exact - (scale * (is_even(S) ? code : levels[code]) + zero);
    }
  }
};
#endif

#if KO
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
  // The query at each channel, and at the one it is paired with as it comes in: q · R(t) k = k · R(-t) q.
  [[maybe_unused]] float own[R][D], other[R][D], c[KO], s[KO];
  if (ROPE) {
    float x[R][PAIRS + 1], y[R][PAIRS + 1];
    turn_queries(a, st, n, x, y);
    for (int r = 0; r < R; r++) {
      memcpy(own[r], q[r], sizeof own[r]);
      memset(other[r], 0, sizeof other[r]);
      for (int p = 0; p < HALF; p++) {
        int i = RO + (ROPE == 1 ? p : 2 * p), j = RO + (ROPE == 1 ? p + HALF : 2 * p + 1);
        own[r][i] = other[r][j] = x[r][p];
        own[r][j] = other[r][i] = y[r][p];
        other[r][j] = -x[r][p];
      }
    }
    for (int j = 0; j < KO; j++) {
      int d = channel[j] - RO, p = ROPE == 1 ? d % (HALF > 0 ? HALF : 1) : d / 2;
      bool turned = d >= 0 && d < RW;
      int64_t at = !turned ? 0 : KX ? token[j] * PAIRS + p : p * L + token[j];
      c[j] = turned ? a.cosb[at] : 1.f;
      s[j] = turned ? a.sinb[at] : 0.f;
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < KO; j++) {
      int d = channel[j];
      st.s[r][first + token[j]] += off.by[j] * (ROPE ? own[r][d] * c[j] + other[r][d] * s[j] : q[r][d]);
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
    for (int r = 0; r < R; r++)
      for (int j = 0; j < VO; j++) st.sum[PARTS - 1][r][channel[j]] += st.s[r][t0 + token[j]] * off.by[j];
  }
}
#endif
