// Granularities the other way round: keys per token, values per channel. A row of codes runs along what a product sums
// over, so that scales wait until the products of a group are summed.
#pragma once
#include "decode.h"

// Products of the rows of codes of a block with the R rows of `query`, STEP apart: those of LEN numbers, G of which share
// a scale and a zero point, `[LEN / G][ROWS]`. `group[r]` has the sums of the query over each group, `put(r, j, x)` takes
// the products of sixteen rows from `j` on, `expect(j)` is told of each row.
template <int B, int S, int ROWS, int LEN, int G, int STEP, class Expect, class Put>
INLINE void rows_of_codes(const uint8_t *codes, const Levels<B, S> &levels, const float (*scale)[ROWS],
                          const float (*zero)[ROWS], bool has_zero, const float *query,
                          const float (*group)[(LEN + G - 1) / G], Expect expect, Put put) {
  constexpr int U = unit_of(LEN), NG = (LEN + G - 1) / G;
  for (int j0 = 0; j0 < ROWS; j0 += 16) {
    auto row = [&](int j) INLINED { expect(j0 + j); return j0 + j; };
    auto numbers = [&](int j, int d, auto i) INLINED {
      vf x = levels.template of<U>(codes + j * (LEN * B / 8) + d * B / 8, i);
      return NG == 1 ? x : x * scale[(d + 16 * i) / G][j];  // that of a whole row can wait
    };
    vf out[R];
    sixteen_rows<LEN, U / 16, STEP>(query, row, numbers, out);
    for (int r = 0; r < R; r++) {
      if (NG == 1) out[r] *= load(&scale[0][j0]);
      if (has_zero) for (int g = 0; g < NG; g++) out[r] += load(&zero[g][j0]) * group[r][g];
      put(r, j0, out[r]);
    }
  }
}

#if KB != 16 && (KX || UNROTATE)
// Rotate sixteen keys `[16, D]`, token `t0` of a block the first, by their offsets in it.
INLINE void turn_keys(const Args &a, int t0, float (*keys)[D]) {
  for (int t = 0; t < 16; t++) {
    const float *c = a.cosb + (t0 + t) * PAIRS, *s = a.sinb + (t0 + t) * PAIRS;
    float *x = keys[t] + RO, *y = x + (ROPE == 1 ? HALF : 1);
    constexpr int STEP = ROPE == 1 ? 1 : 2;
    for (int p = 0; p < HALF; p++) {
      float kx = x[STEP * p], ky = y[STEP * p];
      x[STEP * p] = kx * c[p] - ky * s[p];
      y[STEP * p] = ky * c[p] + kx * s[p];
    }
  }
}
#endif

#if KB != 16 && KX && !UNROTATE
// Keys per token: a row of codes is a token, so that scales wait until the products of a row are summed.
static __attribute__((noinline)) void score_codes(const Args &a, State &st, const uint8_t *k, int64_t meta0,
                                                  [[maybe_unused]] int64_t factors, [[maybe_unused]] int64_t bases,
                                                  const uint8_t *, const uint8_t *, int64_t n, int first,
                                                  const Next &next) {
  constexpr int ROW = D * KB / 8;
  alignas(64) float scale[NGK][L], zero[NGK][L];
  float base = base_of<KM>(a.kbase, a.kbwide, bases + n);
  parameters<KB, KT, KM, L * NGK>(a.ks, a.kz, a.kwide, meta0 + n * L * NGK, base, scale[0], zero[0]);
  by_column<L, NGK>(scale[0]);
  by_column<L, NGK>(zero[0]);
  const uint8_t *block = k + n * L * ROW;
  const Levels<KB, KT> levels(a.klevels);
#if ROPE
  alignas(64) float x[R][PAIRS + 1], y[R][PAIRS + 1], q[R][D], keys[16][D];
  turn_queries(a, st, n, x, y);
  memcpy(q, st.q, sizeof q);
  for (int r = 0; r < R; r++)
    for (int p = 0; p < HALF; p++) {
      q[r][RO + (ROPE == 1 ? p : 2 * p)] = x[r][p];
      q[r][RO + (ROPE == 1 ? p + HALF : 2 * p + 1)] = y[r][p];
    }
  for (int t0 = 0; t0 < L; t0 += 16) {
    for (int t = 0; t < 16; t++) {
      next.expect(t0 + t, L);
      for (int d = 0; d < D; d += UK)
        each<WK>([&](auto i) INLINED {
          int g = (d + 16 * i) / GK;
          vf x = levels.template of<UK>(block + (t0 + t) * ROW + d * KB / 8, i);
          x = x * scale[g][t0 + t] + zero[g][t0 + t];
          if constexpr (KF != 0) x *= meta(a.kfactor, factors + n * D + d + 16 * i, a.kfwide);
          store(&keys[t][d + 16 * i], x);
        });
    }
    turn_keys(a, t0, keys);
    vf out[R];
    sixteen_rows<D, 1, D>(q[0], [&](int t) INLINED { return keys[t]; },
                          [&](const float *key, int d, int) INLINED { return load(key + d); }, out);
    for (int r = 0; r < R; r++) store(&st.s[r][first + t0], out[r]);
  }
#else
  const float(*q)[D] = KH ? st.qb : st.q;
  const float(*group)[NGK] = st.group;
#if KF  // of channels: they join the query
  alignas(64) float turned[R][D], sums[R][NGK];
  for (int r = 0; r < R; r++) {
    times_factors<D>(q[r], a.kfactor, factors + n * D, a.kfwide, turned[r]);
    sums_of_groups<D, GK>(turned[r], sums[r]);
  }
  q = turned;
  group = sums;
#endif
  rows_of_codes<KB, KT, L, D, GK, D>(
      block, levels, scale, zero, a.kz || middle_of(KB, KT) != 0, q[0], group,
      [&](int t) INLINED { next.expect(t, L); },
      [&](int r, int t, vf x) INLINED { store(&st.s[r][first + t], x); });
#endif
}
#endif

#if VB != 16 && VX
// Values per channel: a row of codes is a channel of a block; its product with the weights of the tokens joins the sum.
static __attribute__((noinline)) void sum_codes(const Args &a, State &st, const uint8_t *v, int64_t meta0,
                                                [[maybe_unused]] int64_t factors, [[maybe_unused]] int64_t bases, int64_t n,
                                                int tokens) {
  const Levels<VB, VT> levels(a.vlevels);
  for (int t0 = 0; t0 < tokens; t0 += L, n++) {
    alignas(64) float scale[NGV][DV], zero[NGV][DV];
    float base = base_of<VM>(a.vbase, a.vbwide, bases + n);
    parameters<VB, VT, VM, DV * NGV>(a.vs, a.vz, a.vwide, meta0 + n * DV * NGV, base, scale[0], zero[0]);
    by_column<DV, NGV>(scale[0]);
    by_column<DV, NGV>(zero[0]);
    const float(*weights)[TILE] = st.s;
#if VF  // of tokens: they join the weights of the one block of a tile
    alignas(64) float scaled[R][TILE];
    for (int r = 0; r < R; r++) times_factors<L>(st.s[r], a.vfactor, factors + n * L, a.vfwide, scaled[r]);
    weights = scaled;
#endif
    float group[R][NGV];
    for (int r = 0; r < R; r++) sums_of_groups<L, GV>(&weights[r][t0], group[r]);
    rows_of_codes<VB, VT, DV, L, GV, TILE>(
        v + n * DV * (L * VB / 8), levels, scale, zero, a.vz || middle_of(VB, VT) != 0, &weights[0][t0], group,
        [](int) INLINED {},
        [&](int r, int d, vf x) INLINED {
          float *sum = &st.sum[PARTS - 1][r][d];
          store(sum, load(sum) + x);
        });
  }
}
#endif
