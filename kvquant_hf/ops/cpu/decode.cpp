// Decode attention over packed keys and values: dequantize, rotate, score, softmax and sum in one pass.
//
// See decode.h for what it is compiled for and for a legend.
#include <atomic>
#include "across.h"
#include "outliers.h"
#include "unrotate.h"

// Whether weighted sums of values go through 8-bit dot products.
#define DOT8 (AVX512_DOT8 && VB != 16 && (VT == 0 || VT == 4) && !VX && DV % 32 == 0)

// ---- softmax ---------------------------------------------------------------------------------------------------------

static void rescale(State &st, int r, float decay) {
  st.total[r] *= decay;
  if (VB != 16) for (int g = 0; g < NGV; g++) st.zero[r][g] *= decay;
  for (int part = 0; part < PARTS; part++)
    for (int d = 0; d < DV; d += 16) store(&st.sum[part][r][d], load(&st.sum[part][r][d]) * decay);
}

// Scores of `count` tokens become weights of the running softmax.
static inline void soften(State &st, int count) {
  int full = (count + 15) / 16 * 16;
  for (int r = 0; r < R; r++) {
    float *s = st.s[r];
    for (int t = count; t < full; t++) s[t] = NEG_INF;
    vf most = load(s);
    for (int t = 16; t < full; t += 16) most = vmax(load(s + t), most);
    if (any_above(most, st.peak[r])) {
      float peak = hmax(most);
      if (st.peak[r] != NEG_INF) rescale(st, r, exp2f(st.peak[r] - peak));
      st.peak[r] = peak;
    }
    float peak = st.peak[r];
    if (peak == NEG_INF) { for (int t = 0; t < full; t += 16) store(s + t, vf{}); continue; }
    vf sum = {};
    for (int t = 0; t < full; t += 16) {
      vf w = exp2v(load(s + t) - peak);
      store(s + t, w);
      sum += w;
    }
    st.total[r] += sum;
  }
}

// Add the mask of the columns from `column` on; `row` is the task's first row.
static void add_mask(const Args &a, State &st, int b, int h, int64_t row, int64_t column, int count) {
  int64_t rows = a.group * a.q_len;
  for (int r = 0; r < R; r++) {
    int64_t j = row + r < rows ? row + r : rows - 1, head = h * a.group + j / a.q_len;
    int64_t at = b * a.mb + head * a.mh + j % a.q_len * a.mq + column;
    float *s = st.s[r];
    if (a.mkind == 3) {
      for (int t = 0; t < count; t++) s[t] = a.mask[at + t] ? s[t] : NEG_INF;
    } else if (a.mkind == F32) {
      const float *m = (const float *)a.mask + at;
      for (int t = 0; t < count; t++) s[t] += m[t] * LOG2E;
    } else {
      for (int t = 0; t < count; t++) s[t] += fetch1(a.mkind, a.mask, at + t) * LOG2E;
    }
  }
}

// ---- exact tokens ----------------------------------------------------------------------------------------------------

static __attribute__((noinline)) void score_exact(State &st, const char *k, int64_t step, int count) {
  for (int t0 = 0; t0 < count; t0 += 16) {
    auto row = [&](int t) INLINED { return (t0 + t < count ? t0 + t : count - 1) * step; };
    auto numbers = [&](int64_t at, int d, int) INLINED { return fetch<KIND>(k, at + d); };
    vf out[R];
    sixteen_rows<D, 1, D>(st.q[0], row, numbers, out);
    for (int r = 0; r < R; r++) store(&st.s[r][t0], out[r]);
  }
}

static __attribute__((noinline)) void sum_exact(State &st, const char *v, int64_t step, int count) {
  for (int d = 0; d < DV; d += 16 * ACROSS) {
    vf acc[ACROSS][R];
    each<ACROSS>([&](auto i) INLINED { each<R>([&](auto r) INLINED { acc[i][r] = vf{}; }); });
    for (int t = 0; t < count; t++)
      each<ACROSS>([&](auto i) INLINED {
        vf x = fetch<KIND>(v, t * step + d + 16 * i);
        each<R>([&](auto r) INLINED { acc[i][r] += x * st.s[r][t]; });
      });
    each<ACROSS>([&](auto i) INLINED {
      each<R>([&](auto r) INLINED {
        float *sum = &st.sum[0][r][d + 16 * i];
        store(sum, load(sum) + acc[i][r]);
      });
    });
  }
}

static void exact_part(const Args &a, const Exact &e, int b, int h, int64_t row, State &st) {
  const char *k = e.k + (b * e.kb + h * e.kh) * size_of(KIND), *v = e.v + (b * e.vb + h * e.vh) * size_of(KIND);
  for (int64_t t = 0; t < e.count; t += TILE) {
    int n = e.count - t < TILE ? e.count - t : TILE;
    score_exact(st, k + t * e.kt * size_of(KIND), e.kt, n);
    if (a.mask) add_mask(a, st, b, h, row, e.first + t, n);
    soften(st, n);
    sum_exact(st, v + t * e.vt * size_of(KIND), e.vt, n);
  }
}

// ---- blocks of codes -------------------------------------------------------------------------------------------------

#if KB != 16 && !KX && !UNROTATE
// `factors`: place of the first factor of block 0, with KF; `bases`: of its base, with KM.
// `extra` and `promoted`: those of block 0, with KP.
static __attribute__((noinline)) void score_codes(const Args &a, State &st, const uint8_t *k, int64_t meta0,
                                                  [[maybe_unused]] int64_t factors, [[maybe_unused]] int64_t bases,
                                                  [[maybe_unused]] const uint8_t *extra,
                                                  [[maybe_unused]] const uint8_t *promoted, int64_t n, int first,
                                                  const Next &next) {
  constexpr int ROW = L * KB / 8;
  alignas(64) float scale[D * NGK], zero[D * NGK], x[R][PAIRS + 1], y[R][PAIRS + 1];
  float base = base_of<KM>(a.kbase, a.kbwide, bases + n);
  parameters<KB, KT, KM, D * NGK>(a.ks, a.kz, a.kwide, meta0 + n * D * NGK, base, scale, zero);
  [[maybe_unused]] const Levels<KB, KT> levels(a.klevels);
#if KP
  // A promoted code is 4 · high + low: the scale of the high part is four times that of the low one.
  float fine[KP * NGK];
  int16_t place[D];
  memset(place, -1, sizeof place);
  for (int j = 0; j < KP; j++) {
    int d = promoted[n * KP + j];
    place[d] = j;
    for (int g = 0; g < NGK; g++) {
      fine[j * NGK + g] = scale[d * NGK + g];
      scale[d * NGK + g] *= 4;
    }
  }
#endif
  if (ROPE) turn_queries(a, st, n, x, y);
  const uint8_t *block = k + n * D * ROW;
  const float(*q)[D] = KH ? st.qb : st.q;
  for (int u = 0; u < L / UK; u++) {
    vf acc[R][WK];
    each<R>([&](auto r) INLINED { each<WK>([&](auto i) INLINED { acc[r][i] = vf{}; }); });
    auto channel = [&](int d, vf *out) INLINED {
      const uint8_t *p = block + d * ROW + u * UK * KB / 8;
      if constexpr (GK >= UK) {
        int g = d * NGK + u * UK / GK;
        const auto values = levels.scaled(scale[g], zero[g]);
        each<WK>([&](auto i) INLINED { out[i] = values.template of<UK>(p, i); });
      } else {
        each<WK>([&](auto i) INLINED {
          int g = d * NGK + (u * UK + 16 * i) / GK;
          out[i] = levels.scaled(scale[g], zero[g]).template of<UK>(p, i);
        });
      }
#if KP
      if (int j = place[d]; j >= 0) {
        const uint8_t *low = extra + (n * KP + j) * (L / 4) + u * UK / 4;
        each<WK>([&](auto i) INLINED {
          out[i] += Values<2>(fine[j * NGK + (u * UK + 16 * i) / GK], 0.f).template of<UK>(low, i);
        });
      }
#endif
    };
    auto plain = [&](int d) INLINED {
      vf k16[WK];
      channel(d, k16);
      each<R>([&](auto r) INLINED { each<WK>([&](auto i) INLINED { acc[r][i] += k16[i] * q[r][d]; }); });
    };
    for (int d = 0; d < (ROPE ? RO : D); d++) {
      if (!ROPE && u == 0) next.expect(d, D);
      plain(d);
    }
    if constexpr (ROPE != 0) {
      for (int p = 0; p < HALF; p++) {
        if (u == 0) next.expect(p, HALF);
        vf kx[WK], ky[WK];
        channel(RO + (ROPE == 1 ? p : 2 * p), kx);
        channel(RO + (ROPE == 1 ? p + HALF : 2 * p + 1), ky);
        each<WK>([&](auto i) INLINED {
          vf c = load(a.cosb + p * L + u * UK + 16 * i), s = load(a.sinb + p * L + u * UK + 16 * i);
          vf rx = kx[i] * c - ky[i] * s;
          ky[i] = ky[i] * c + kx[i] * s;
          kx[i] = rx;
        });
        each<R>([&](auto r) INLINED {
          vf qx = splat(x[r][p]), qy = splat(y[r][p]);
          each<WK>([&](auto i) INLINED { acc[r][i] += kx[i] * qx; });
          each<WK>([&](auto i) INLINED { acc[r][i] += ky[i] * qy; });
        });
      }
      for (int d = RO + RW; d < D; d++) plain(d);
    }
    if constexpr (KF != 0)
      each<WK>([&](auto i) INLINED {
        vf factor = meta(a.kfactor, factors + n * L + u * UK + 16 * i, a.kfwide);
        each<R>([&](auto r) INLINED { acc[r][i] *= factor; });
      });
    each<R>([&](auto r) INLINED {
      each<WK>([&](auto i) INLINED { store(&st.s[r][first + u * UK + 16 * i], acc[r][i]); });
    });
  }
}
#endif

#if DOT8
INLINE float most_of(const float *p, int count) {
  vf most = {};
  for (int t = 0; t < count; t += 16) most = vmax(most, load(p + t));
  return hmax(most);
}

// sum[r][d] += Σ_t p[r][t] · scale[g][t] · code[t][d] with integer dot products: the weights become integers of DIGITS
// bytes, and each byte is multiplied with the codes of four tokens at a time. `add(r, g, d, x)` adds sixteen sums.
template <int ROW, class Add>
INLINE void sum_integers(const uint8_t *rows, int tokens, const float (*p)[TILE], float (*scale)[TILE], Add add) {
  constexpr int DIGITS = KIND == F32 ? 3 : 2, AT_ONCE = R * DIGITS * WV <= 24 ? WV : 1;
  alignas(64) int32_t digits[NGV][R][TILE];  // of each four tokens: four lowest bytes, four next, …
  // A bit less than the largest integer, since products are rounded.
  constexpr float FULL = (1 << 8 * DIGITS) - (1 << 8 * (DIGITS - 2));
  float most_p[R], most_scale[NGV];
  for (int g = 0; g < NGV; g++) {
    most_scale[g] = most_of(scale[g], tokens);
    vf factor = splat(most_scale[g] > 0 ? 1 / most_scale[g] : 0.f);
    for (int t = 0; t < tokens; t += 16) store(&scale[g][t], load(&scale[g][t]) * factor);
  }
  const __m512i transpose = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  for (int r = 0; r < R; r++) {
    most_p[r] = most_of(p[r], tokens);
    vf factor = splat(most_p[r] > 1e-30f ? FULL / most_p[r] : 0.f);
    for (int t = 0; t < tokens; t += 16) {
      vf whole = load(&p[r][t]) * factor;
      for (int g = 0; g < NGV; g++) {
        __m512i x = _mm512_cvtps_epi32((__m512)(whole * load(&scale[g][t])));
        _mm512_store_si512(&digits[g][r][t], _mm512_shuffle_epi8(x, transpose));
      }
    }
  }
  for (int d = 0; d < DV; d += UV)
    for (int i0 = 0; i0 < WV; i0 += AT_ONCE) {
      __m512i acc[R * DIGITS][AT_ONCE];
      each<R * DIGITS>([&](auto j) INLINED { each<AT_ONCE>([&](auto i) INLINED { acc[j][i] = _mm512_setzero_si512(); }); });
      for (int t = 0; t < tokens; t += 4) {
        __m512i code[WV];
        four_tokens<VB, UV>(rows + t * ROW + d * VB / 8, ROW, code);
        each<R * DIGITS>([&](auto j) INLINED {
          each<AT_ONCE>([&](auto i) INLINED {
            int g = GV >= UV ? d / GV : (d + 16 * (i0 + i)) / GV;
            dot8(acc[j][i], _mm512_set1_epi32(digits[g][j / DIGITS][t + j % DIGITS]), code[AT_ONCE == 1 ? i0 : int(i)]);
          });
        });
      }
      each<AT_ONCE>([&](auto i) INLINED {
        each<R>([&](auto r) INLINED {
          __m512i high = acc[r * DIGITS + DIGITS - 1][i];
          if (DIGITS == 3) high = _mm512_add_epi32(_mm512_slli_epi32(high, 8), acc[r * DIGITS + 1][i]);
          vf x = (vf)_mm512_cvtepi32_ps(high) * 256.f + (vf)_mm512_cvtepi32_ps(acc[r * DIGITS][i]);
          int g = GV >= UV ? d / GV : (d + 16 * (i0 + i)) / GV;
          add(r, g, d + 16 * (i0 + i), x * (most_p[r] * most_scale[g] * (1 / FULL)));
        });
      });
    }
}
#endif

#if VB != 16 && !VX
// `factors`: place of the first factor of block 0, with VF; `bases`: of its base, with VM.
static __attribute__((noinline)) void sum_codes(const Args &a, State &st, const uint8_t *v, int64_t meta0,
                                                [[maybe_unused]] int64_t factors, [[maybe_unused]] int64_t bases, int64_t n,
                                                int tokens) {
  constexpr int ROW = DV * VB / 8;
  alignas(64) float scale[NGV][TILE];
  // With factors the zero points of a block are added to its sums: st.zero stays empty.
  [[maybe_unused]] vf apart[R][NGV] = {};
  auto &zeros = VF ? apart : st.zero;
  for (int t0 = 0; t0 < tokens; t0 += L) {
    alignas(64) float step[NGV][L], zero[NGV][L];
    float base = base_of<VM>(a.vbase, a.vbwide, bases + n + t0 / L);
    for (int i = 0; i < L * NGV; i += 16) {
      int64_t at = meta0 + (n * L + t0) * NGV + i;
      vf s, z;
      parameters<VB, VT, VM>(a.vs, a.vz, a.vwide, at, base, s, z);
      if (DOT8 && VB == 8) z += s * 128.f;  // the dot products read codes as signed: code - 128
      store(&step[0][0] + i, s);
      store(&zero[0][0] + i, z);
    }
    by_column<L, NGV>(&step[0][0]);
    by_column<L, NGV>(&zero[0][0]);
    for (int g = 0; g < NGV; g++) {
      memcpy(&scale[g][t0], step[g], sizeof step[g]);
      for (int r = 0; r < R; r++)
        for (int t = 0; t < L; t += 16) zeros[r][g] += load(&st.s[r][t0 + t]) * load(&zero[g][t]);
    }
  }
  [[maybe_unused]] float offset[R][NGV];
  if constexpr (VF != 0)
    for (int r = 0; r < R; r++)
      for (int g = 0; g < NGV; g++) offset[r][g] = hsum(apart[r][g]);
  auto add = [&](int r, [[maybe_unused]] int g, int d, vf x) INLINED {
    float *sum = &st.sum[PARTS - 1][r][d];
    if constexpr (VF != 0) x = (x + offset[r][g]) * meta(a.vfactor, factors + n * DV + d, a.vfwide);
    store(sum, load(sum) + x);
  };
  const uint8_t *rows = v + n * L * ROW;
#if DOT8
  sum_integers<ROW>(rows, tokens, st.s, scale, add);
#else
  alignas(64) float w[NGV][R][TILE];
  for (int g = 0; g < NGV; g++)
    for (int r = 0; r < R; r++)
      for (int t = 0; t < tokens; t += 16) store(&w[g][r][t], load(&st.s[r][t]) * load(&scale[g][t]));
  const Levels<VB, VT> values(a.vlevels);
  for (int d = 0; d < DV; d += UV) {
    vf acc[R][WV];  // sums of a tile first: rounding errors grow with their number
    each<R>([&](auto r) INLINED { each<WV>([&](auto i) INLINED { acc[r][i] = vf{}; }); });
    for (int t = 0; t < tokens; t++)
      each<WV>([&](auto i) INLINED {
        vf x = values.template of<UV>(rows + t * ROW + d * VB / 8, i);
        int g = GV >= UV ? d / GV : (d + 16 * i) / GV;
        each<R>([&](auto r) INLINED { acc[r][i] += x * w[g][r][t]; });
      });
    each<R>([&](auto r) INLINED {
      each<WV>([&](auto i) INLINED { add(r, GV >= UV ? d / GV : (d + 16 * i) / GV, d + 16 * i, acc[r][i]); });
    });
  }
#endif
}
#endif

INLINE void expect_parameters(const Args &a, int64_t kmeta, int64_t vmeta, int64_t n) {
  const int ksize = KM ? 1 : a.kwide ? 4 : 2, vsize = VM ? 1 : a.vwide ? 4 : 2;
  if (KB != 16)
    for (int64_t i = 0; i < KROWS * NGK; i += 32) {
      __builtin_prefetch(a.ks + (kmeta + n * KROWS * NGK + i) * ksize);
      if (a.kz) __builtin_prefetch(a.kz + (kmeta + n * KROWS * NGK + i) * ksize);
    }
  if (VB != 16)
    for (int64_t i = 0; i < VROWS * NGV; i += 32) {
      __builtin_prefetch(a.vs + (vmeta + n * VROWS * NGV + i) * vsize);
      if (a.vz) __builtin_prefetch(a.vz + (vmeta + n * VROWS * NGV + i) * vsize);
    }
}

#if VG > 1
// Sums in the mixed basis change their sign.
static void negate(State &st) {
  for (int r = 0; r < R; r++) {
    for (int g = 0; g < NGV; g++) st.zero[r][g] = -st.zero[r][g];
    for (int d = 0; d < DV; d += 16) store(&st.sum[1][r][d], -load(&st.sum[1][r][d]));
  }
}

// Values of head `h` are sums of those of its group, each with a sign, times 1 / sqrt(VG), for which `finish` sees: codes
// are added with weights that are not negative, so that it is the sum before them that takes the sign.
static void sum_mixed(const Args &a, State &st, int b, int h, int64_t n, int tokens) {
  const int place = h % VG;
  for (int g = 0, sign = 0; g <= VG; g++) {
    int next = g < VG ? __builtin_parity(place & g) : 0;
    if (next != sign) negate(st);
    sign = next;
    if (g == VG) break;
    int64_t other = h - place + g, meta = b * a.vsb + other * a.vsh;
    const uint8_t *v = (const uint8_t *)a.vc + b * a.vcb + other * a.vch;
    sum_codes(a, st, v, meta, VF ? b * a.vfb + other * a.vfh : 0, VM ? b * a.vbb + other * a.vbh : 0, n, tokens);
#if VO
    sum_outliers(a, st, b, other, v, meta, n, tokens);
#endif
  }
}
#endif

static void block_part(const Args &a, int b, int h, int64_t row, int64_t n0, int64_t n1, State &st) {
  constexpr int KSIZE = KB == 16 ? size_of(KIND) : 1, VSIZE = VB == 16 ? size_of(KIND) : 1;
  const char *k = a.kc + (b * a.kcb + h * a.kch) * KSIZE, *v = a.vc + (b * a.vcb + h * a.vch) * VSIZE;
  [[maybe_unused]] int64_t kmeta = b * a.ksb + h * a.ksh, vmeta = b * a.vsb + h * a.vsh;
  [[maybe_unused]] int64_t kfactors = KF ? b * a.kfb + h * a.kfh : 0, vfactors = VF ? b * a.vfb + h * a.vfh : 0;
  [[maybe_unused]] const uint8_t *extra = KP ? a.extra + b * a.eb + h * a.eh : nullptr;
  [[maybe_unused]] const uint8_t *promoted = KP ? a.promoted + b * a.pb + h * a.ph : nullptr;
  for (int64_t n = n0; n < n1; n += NB) {
    int blocks = n1 - n < NB ? n1 - n : NB;
#if KB == 16
    score_exact(st, k + n * L * D * KSIZE, D, blocks * L);
#else
    for (int j = 0; j < blocks; j++) {
      int64_t next = n + j + 1 < n1 ? n + j + 1 : n;
      expect_parameters(a, kmeta, vmeta, next);
#if UNROTATE
      score_unrotated(a, st, b, h, n + j, j * L, {k + next * D * L * KB / 8, v + next * L * DV * VB / 8});
#else
      score_codes(a, st, (const uint8_t *)k, kmeta, kfactors, KM ? b * a.kbb + h * a.kbh : 0, extra, promoted,
                  n + j, j * L, {k + next * D * L * KB / 8, v + next * L * DV * VB / 8});
#if KO
      score_outliers(a, st, b, h, (const uint8_t *)k, kmeta, n + j, j * L);
#endif
#endif
    }
#endif
    if (a.mask) add_mask(a, st, b, h, row, a.first + n * L, blocks * L);
    soften(st, blocks * L);
#if VB == 16
    sum_exact(st, v + n * L * DV * VSIZE, DV, blocks * L);
#elif VG > 1
    sum_mixed(a, st, b, h, n, blocks * L);
#else
    sum_codes(a, st, (const uint8_t *)v, vmeta, vfactors, VM ? b * a.vbb + h * a.vbh : 0, n, blocks * L);
#if VO
    sum_outliers(a, st, b, h, (const uint8_t *)v, vmeta, n, blocks * L);
#endif
#endif
  }
}

// ---- tasks -----------------------------------------------------------------------------------------------------------

static void begin(const Args &a, State &st, int b, int h, int64_t row, float scale) {
  int64_t rows = a.group * a.q_len;
  for (int r = 0; r < R; r++) {
    int64_t j = row + r < rows ? row + r : rows - 1;  // rows beyond the last repeat it
    int64_t at = b * a.qb + (h * a.group + j / a.q_len) * a.qh + j % a.q_len * a.qt;
    if (a.kind == KIND) for (int d = 0; d < D; d += 16) store(&st.q[r][d], fetch<KIND>(a.q, at + d) * scale);
    else for (int d = 0; d < D; d++) st.q[r][d] = fetch1(a.kind, a.q, at + d) * scale;
    if (KH && !UNROTATE) {
      memcpy(st.qb[r], st.q[r], sizeof st.q[r]);
      if (a.korder) ordered<D>(a.korder, st.qb[r]);
      if constexpr (KH == SIGNED_HADAMARD) for (int d = 0; d < D; d++) st.qb[r][d] *= a.ksigns[d];
      hadamard(st.qb[r], D);
    }
    const float *q = KH && !UNROTATE ? st.qb[r] : st.q[r];
    if (KX) sums_of_groups<D, GK>(q, st.group[r]);
    memset(st.x[r], 0, sizeof st.x[r]);
    memset(st.y[r], 0, sizeof st.y[r]);
    for (int p = 0; p < HALF; p++) {
      st.x[r][p] = q[RO + (ROPE == 1 ? p : 2 * p)];
      st.y[r][p] = q[RO + (ROPE == 1 ? p + HALF : 2 * p + 1)];
    }
    st.peak[r] = NEG_INF;
    st.total[r] = vf{};
    if (VB != 16) for (int g = 0; g < NGV; g++) st.zero[r][g] = vf{};
  }
  memset(st.sum, 0, sizeof st.sum);
}

// The sums of a row, zero points included, and its total.
static float gather(State &st, int r) {
  if (VB != 16 && !VX)
    for (int g = 0; g < NGV; g++) {
      float zero = hsum(st.zero[r][g]);
      for (int d = g * GV; d < (g + 1) * GV && d < DV; d += 16) {
        float *sum = &st.sum[PARTS - 1][r][d];
        store(sum, load(sum) + zero);
      }
    }
  return hsum(st.total[r]);
}

// Write output row `j` of head `h` from sums `[PARTS][DV]`, which lie `step` apart.
static void finish(const Args &a, int64_t b, int64_t h, int64_t j, float *sum, int64_t step, float total) {
  int64_t at = ((b * a.heads * a.group + h * a.group + j / a.q_len) * a.q_len + j % a.q_len) * DV;
  if (VH) {
    hadamard(sum + step, DV);
    if constexpr (VH == SIGNED_HADAMARD) for (int d = 0; d < DV; d++) sum[step + d] *= a.vsigns[d];
    if (a.vorder) unordered<DV>(a.vorder, sum + step);
    if constexpr (VG > 1) for (int d = 0; d < DV; d++) sum[step + d] *= 1 / std::sqrt((float)VG);
    for (int d = 0; d < DV; d++) sum[d] += sum[step + d];
  }
  float share = total > 0 ? 1 / total : 0.f;
  if (a.kind == F32) for (int d = 0; d < DV; d += 16) store((float *)a.out + at + d, load(sum + d) * share);
  else for (int d = 0; d < DV; d++) put1(a.kind, a.out, at + d, sum[d] * share);
}

struct Job {
  const Args *a;
  float scale;
  std::atomic<int64_t> next;
};

constexpr int RECORD = 2 + PARTS * DV;

static void work(void *data) {
  Job &job = *(Job *)data;
  const Args &a = *job.a;
  int64_t rows = a.group * a.q_len, chunks = (rows + R - 1) / R, tasks = a.batch * a.heads * chunks * a.splits;
  State st;
  for (int64_t task; (task = job.next.fetch_add(1)) < tasks;) {
    int64_t split = task % a.splits, rest = task / a.splits, row = rest % chunks * R, bh = rest / chunks;
    int b = bh / a.heads, h = bh % a.heads;
    begin(a, st, b, h, row, job.scale);
    block_part(a, b, h, row, a.blocks * split / a.splits, a.blocks * (split + 1) / a.splits, st);
    if (split == a.splits - 1)
      for (const Exact &e : a.exact)
        if (e.count) exact_part(a, e, b, h, row, st);
    float *record = a.scratch + task * R * RECORD;
    for (int r = 0; r < R && row + r < rows; r++, record += RECORD) {
      float total = gather(st, r);
      if (a.splits == 1) {
        finish(a, b, h, row + r, st.sum[0][r], &st.sum[PARTS - 1][0][0] - &st.sum[0][0][0], total);
        continue;
      }
      record[0] = st.peak[r];
      record[1] = total;
      for (int part = 0; part < PARTS; part++) memcpy(record + 2 + part * DV, st.sum[part][r], sizeof st.sum[part][r]);
    }
  }
}

// Merge the splits of every row by their peaks.
static void merge(const Args &a) {
  int64_t rows = a.group * a.q_len, chunks = (rows + R - 1) / R;
  for (int64_t bh = 0; bh < a.batch * a.heads; bh++)
    for (int64_t row = 0; row < rows; row++) {
      const float *first = a.scratch + ((bh * chunks + row / R) * a.splits * R + row % R) * RECORD;
      float peak = NEG_INF, total = 0, sum[PARTS * DV] = {};
      for (int64_t i = 0; i < a.splits; i++) peak = first[i * R * RECORD] > peak ? first[i * R * RECORD] : peak;
      for (int64_t i = 0; i < a.splits && peak != NEG_INF; i++) {
        const float *record = first + i * R * RECORD;
        float f = exp2f(record[0] - peak);
        if (f == 0) continue;
        total += f * record[1];
        for (int d = 0; d < PARTS * DV; d++) sum[d] += f * record[2 + d];
      }
      finish(a, bh / a.heads, bh % a.heads, row, sum, (PARTS - 1) * DV, total);
    }
}

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
extern "C" void kvquant_decode(const Args *a, double scale, int threads, parallel_fn parallel) {
  Job job{a, (float)(scale * LOG2E), {0}};
  if (threads > 1 && parallel) parallel(work, &job, threads, 0);
  else work(&job);
  if (a->splits > 1) merge(*a);
}
