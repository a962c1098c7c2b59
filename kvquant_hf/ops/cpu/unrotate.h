// Keys whose rotation is undone before they are scored: pre-RoPE keys in the Hadamard basis, and keys of mixed heads.
//
// A stored key of head h is Σ_g M[h][g] · H k_g, with Hadamard matrices M of the KG heads of a group and H of the channels.
// Both are their own inverses, so k_h = H Σ_g M[h][g] · stored_g: rows of the heads are added, each with a sign, and
// transformed once. Channels get their signs back, with SIGNED_HADAMARD, and then their places, where there is an order.
#pragma once
#include "outliers.h"

#if UNROTATE
constexpr int HEAD = D & -D;  // channels that are mixed, see `hadamard_width` of rotation.py

// Lanes whose numbers differ in bit H, exchanged.
template <int H> INLINE vf exchanged(vf x) {
#define LANE(i) (i) ^ H
#define FOUR(i) LANE(i), LANE(i + 1), LANE(i + 2), LANE(i + 3)
#if defined(__clang__)
  return __builtin_shufflevector(x, x, FOUR(0), FOUR(4), FOUR(8), FOUR(12));
#else
  return __builtin_shuffle(x, vi{FOUR(0), FOUR(4), FOUR(8), FOUR(12)});
#endif
#undef FOUR
#undef LANE
}

// Sums in the lanes whose numbers have bit H clear, differences in the others.
template <int H> INLINE vf butterfly(vf x) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return exchanged<H>(x) + ((lane & H) != 0 ? -x : x);
}

// Multiply a key by the (block) Hadamard matrix of rotation.py, times sqrt(HEAD).
INLINE void butterflies(float *key) {
  static_assert(HEAD % 16 == 0, "head sizes are multiples of 16");
  for (int d = 0; d < D; d += 16) store(key + d, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(key + d))))));
  for (int h = 16; h < HEAD; h *= 2)
    for (int first = 0; first < D; first += 2 * h)
      for (int d = first; d < first + h; d += 16) {
        vf x = load(key + d), y = load(key + d + h);
        store(key + d, x + y);
        store(key + d + h, x - y);
      }
}

// Add `share` times the tokens from `t0` on of block `n` of head `h` to `keys`, `[16, D]`.
#if KX
INLINE void add_codes(const Args &a, const Levels<KB, KT> &levels, int b, int h, int64_t n, int t0, float share,
                      float (*keys)[D]) {
  constexpr int ROW = D * KB / 8;
  alignas(64) float scale[NGK][16], zero[NGK][16];
  float base = base_of<KM>(a.kbase, a.kbwide, b * a.kbb + h * a.kbh + n);
  int64_t at = b * a.ksb + h * a.ksh + (n * L + t0) * NGK;
  parameters<KB, KT, KM, 16 * NGK>(a.ks, a.kz, a.kwide, at, base, scale[0], zero[0]);
  by_column<16, NGK>(scale[0]);
  by_column<16, NGK>(zero[0]);
  const uint8_t *rows = (const uint8_t *)a.kc + b * a.kcb + h * a.kch + (n * L + t0) * ROW;
  [[maybe_unused]] int64_t factors = KF ? b * a.kfb + h * a.kfh + n * D : 0;
  for (int t = 0; t < 16; t++)
    for (int d = 0; d < D; d += UK)
      each<WK>([&](auto i) INLINED {
        int g = (d + 16 * i) / GK, c = d + 16 * i;
        vf x = levels.template of<UK>(rows + t * ROW + d * KB / 8, i) * scale[g][t] + zero[g][t];
        if constexpr (KF != 0) x *= meta(a.kfactor, factors + c, a.kfwide);
        store(&keys[t][c], load(&keys[t][c]) + x * share);
      });
}
#else
INLINE void add_codes(const Args &a, const Levels<KB, KT> &levels, int b, int h, int64_t n, int t0, float share,
                      float (*keys)[D]) {
  constexpr int ROW = L * KB / 8;
  alignas(64) float scale[D * NGK], zero[D * NGK], columns[D][16];
  float base = base_of<KM>(a.kbase, a.kbwide, b * a.kbb + h * a.kbh + n);
  parameters<KB, KT, KM, D * NGK>(a.ks, a.kz, a.kwide, b * a.ksb + h * a.ksh + n * D * NGK, base, scale, zero);
  int unit = t0 / UK, half = t0 % UK / 16, group = t0 / GK;
  auto sixteen = [&](const auto &values, const uint8_t *row, int nbits) INLINED {
    const uint8_t *p = row + unit * UK * nbits / 8;
    return WK == 1 || half == 0 ? values.template of<UK>(p, 0) : values.template of<UK>(p, WK - 1);
  };
#if KP
  // A promoted code is 4 · high + low: the scale of the high part is four times that of the low one.
  float fine[KP];
  const uint8_t *promoted = a.promoted + b * a.pb + h * a.ph + n * KP;
  const uint8_t *extra = a.extra + b * a.eb + h * a.eh + n * KP * (L / 4);
  for (int j = 0; j < KP; j++) {
    fine[j] = scale[promoted[j] * NGK + group];
    scale[promoted[j] * NGK + group] *= 4;
  }
#endif
  const uint8_t *rows = (const uint8_t *)a.kc + b * a.kcb + h * a.kch + n * D * ROW;
  for (int d = 0; d < D; d++)
    store(columns[d], sixteen(levels, rows + d * ROW, KB) * scale[d * NGK + group] + zero[d * NGK + group]);
#if KP
  for (int j = 0; j < KP; j++) {
    float *column = columns[promoted[j]];
    store(column, load(column) + sixteen(Values<2>(), extra + j * (L / 4), 2) * fine[j]);
  }
#endif
  vf factor = splat(share);
  if constexpr (KF != 0) factor *= meta(a.kfactor, b * a.kfb + h * a.kfh + n * L + t0, a.kfwide);
  for (int d = 0; d < D; d++) store(columns[d], load(columns[d]) * factor);
  by_column<D, 16>(columns[0]);
  for (int t = 0; t < 16; t++)
    for (int d = 0; d < D; d += 16) store(&keys[t][d], load(&keys[t][d]) + load(columns[0] + t * D + d));
}
#endif

// Scores of block `n` of head `h`, from place `first` of its tile on.
static __attribute__((noinline)) void score_unrotated(const Args &a, State &st, int b, int h, int64_t n, int first,
                                                      const Next &next) {
  const Levels<KB, KT> levels(a.klevels);
  const int place = h % KG, group = h - place;  // within its group, and the group's first head
  const float norm = 1 / std::sqrt((float)(HEAD * KG));
  alignas(64) float q[R][D], keys[16][D];
  memcpy(q, st.q, sizeof q);
#if ROPE
  alignas(64) float x[R][PAIRS + 1], y[R][PAIRS + 1];
  turn_queries(a, st, n, x, y);
  for (int r = 0; r < R; r++)
    for (int p = 0; p < HALF; p++) {
      q[r][RO + (ROPE == 1 ? p : 2 * p)] = x[r][p];
      q[r][RO + (ROPE == 1 ? p + HALF : 2 * p + 1)] = y[r][p];
    }
#endif
#if KO
  Differences<KO> off[KG];
  for (int g = 0; g < KG; g++) {
    const Sparse &sparse = a.koutliers;
    const uint8_t *codes = (const uint8_t *)a.kc + b * a.kcb + (group + g) * a.kch + n * KROWS * (KLEN * KB / 8);
    off[g].read<KB, KT, KROWS, KLEN, GK>(sparse, b * sparse.pb + (group + g) * sparse.ph,
                                         b * sparse.vb + (group + g) * sparse.vh, codes, a.klevels, a.ks, a.kz, a.kwide,
                                         b * a.ksb + (group + g) * a.ksh, n);
  }
#endif
  for (int t0 = 0; t0 < L; t0 += 16) {
    memset(keys, 0, sizeof keys);
    for (int g = 0; g < KG; g++) {
      float share = __builtin_parity(place & g) ? -norm : norm;
      add_codes(a, levels, b, group + g, n, t0, share, keys);
#if KO
      const int *channel = KX ? off[g].element : off[g].row, *token = KX ? off[g].row : off[g].element;
      for (int j = 0; j < KO; j++)
        if (token[j] / 16 == t0 / 16) keys[token[j] % 16][channel[j]] += off[g].by[j] * share;
#endif
    }
    for (int t = 0; t < 16; t++) {
      next.expect(t0 + t, L);
      butterflies(keys[t]);
      if constexpr (KH == SIGNED_HADAMARD)
        for (int d = 0; d < D; d += 16) store(&keys[t][d], load(&keys[t][d]) * load(a.ksigns + d));
      if (a.korder) unordered<D>(a.korder, keys[t]);
    }
#if ROPE
    turn_keys(a, t0, keys);
#endif
    vf out[R];
    sixteen_rows<D, 1, D>(q[0], [&](int t) INLINED { return keys[t]; },
                          [&](const float *key, int d, int) INLINED { return load(key + d); }, out);
    for (int r = 0; r < R; r++) store(&st.s[r][first + t0], out[r]);
  }
}
#endif
