// Decode attention over packed keys and values: dequantize, rotate, score, softmax and sum in one pass.
//
// Compiled once for each combination of
//   KB VB   bits of key and value codes (2, 3, 4, 8)
//   D DV    head size of keys and values (multiples of 16)
//   L       tokens of a block; GK tokens and GV channels that share a scale
//   R       query rows of one key/value head
//   ROPE    0: keys are read as stored, 1: pairs (i, i + width/2), 2: pairs (2i, 2i + 1)
//
// Legend: B batch, H key/value heads, N blocks, T tokens. Rows of codes are packed as in packing.py: units of U codes,
// so that one load, one shift and one mask give U/16 vectors of consecutive codes.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint8_t v16u8 __attribute__((vector_size(16)));
typedef uint64_t v2u64 __attribute__((vector_size(16)));
typedef uint32_t v4u32 __attribute__((vector_size(16)));
typedef uint16_t v8u16 __attribute__((vector_size(16)));
typedef _Float16 v16h __attribute__((vector_size(32)));
typedef float vfu __attribute__((vector_size(64), aligned(4)));
typedef _Float16 v16hu __attribute__((vector_size(32), aligned(2)));

#define NEG_INF (-__builtin_inff())
static inline vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
static inline vf load(const float *p) { return *(const vfu *)p; }
static inline void store(float *p, vf x) { *(vfu *)p = x; }
template <class V, class P> static inline V raw(const P *p) { V v; memcpy(&v, p, sizeof v); return v; }

constexpr int unit_of(int n) { return n % 32 == 0 ? 32 : 16; }
constexpr int UK = unit_of(L), UV = unit_of(DV), WK = UK / 16, WV = UV / 16;

// U codes of B bits at p, as U/16 vectors of floats.
template <int B, int U> static inline void unpack(const uint8_t *p, vf *out) {
  v16u8 code[2];
  if constexpr (B == 8) {
    for (int i = 0; i < U / 16; i++) code[i] = raw<v16u8>(p + 16 * i);
  } else if constexpr (B == 4) {
    if constexpr (U == 32) {
      v16u8 b = raw<v16u8>(p);
      code[0] = b & 15;
      code[1] = b >> 4;
    } else {
      uint64_t w = raw<uint64_t>(p);
      code[0] = (v16u8)(v2u64{w, w >> 4}) & 15;
    }
  } else {
    if constexpr (U == 32) {
      uint64_t w = raw<uint64_t>(p);
      code[0] = (v16u8)(v2u64{w, w >> 2}) & 3;
      code[1] = (v16u8)(v2u64{w >> 4, w >> 6}) & 3;
    } else {
      uint32_t w = raw<uint32_t>(p);
      code[0] = (v16u8)(v4u32{w, w >> 2, w >> 4, w >> 6}) & 3;
    }
    if constexpr (B == 3) {
      if constexpr (U == 32) {
        uint32_t h = raw<uint32_t>(p + 8);
        code[0] |= ((v16u8)(v4u32{h, h >> 1, h >> 2, h >> 3}) & 1) << 2;
        code[1] |= ((v16u8)(v4u32{h >> 4, h >> 5, h >> 6, h >> 7}) & 1) << 2;
      } else {
        uint16_t h = raw<uint16_t>(p + 4);
        v8u16 x = {h, uint16_t(h >> 1), uint16_t(h >> 2), uint16_t(h >> 3),
                   uint16_t(h >> 4), uint16_t(h >> 5), uint16_t(h >> 6), uint16_t(h >> 7)};
        code[0] |= ((v16u8)x & 1) << 2;
      }
    }
  }
  for (int i = 0; i < U / 16; i++) out[i] = __builtin_convertvector(__builtin_convertvector(code[i], vi), vf);
}

// 2^x for x <= 0, relative error about 2e-7; 0 far below.
static inline vf exp2v(vf x) {
  x = x < -126.f ? splat(-126.f) : x;
  vf shifted = x + 12582912.f;
  vi n = (vi)shifted - 0x4B400000;
  vf f = x - (shifted - 12582912.f);
  vf y = f * 1.53513695e-4f + 1.33988744e-3f;
  y = y * f + 9.61843735e-3f;
  y = y * f + 5.55033080e-2f;
  y = y * f + 2.40226479e-1f;
  y = y * f + 6.93147182e-1f;
  y = y * f + 1.0f;
  vf r = (vf)((vi)y + (n << 23));
  return x <= -126.f ? vf{} : r;
}
static inline float hsum(vf v) { float s = 0; for (int i = 0; i < 16; i++) s += v[i]; return s; }
static inline float hmax(vf v) { float s = v[0]; for (int i = 1; i < 16; i++) s = v[i] > s ? v[i] : s; return s; }
static inline vf vmax(vf x, vf y) { return x > y ? x : y; }

struct Exact {           // tokens kept as they came
  const float *k, *v;    // [B, H, count, D]
  int64_t kb, kh, vb, vh;  // strides of batch and head; tokens are contiguous
  int64_t first, count;  // slot of the first in the mask
};
struct Args {
  const float *q, *qb;   // [B, H, rows, D], scaled by log2(e): for exact tokens, for blocks
  const uint8_t *kc, *vc;
  const void *ks, *kz, *vs, *vz;  // scales and zero points, float16 or float32 (wide)
  int64_t kcb, kch, ksb, ksh, vcb, vch, vsb, vsh;  // strides of batch and head, in elements
  const float *mask;     // additive, times log2(e); [.., .., .., T], or null
  int64_t mb, mh, mq;    // strides of batch, query head and query row
  const float *cosa, *sina;  // [N, width/2] rotation of block starts
  const float *cosb, *sinb;  // [width/2, L] rotation of offsets
  Exact exact[3];
  float *out, *outb;     // [B, H, rows, DV]: exact and block part
  float *scratch;        // [tasks, R, 2 + 2 DV] for splits
  int64_t batch, heads, rows, q_len, blocks, first, offset, width, splits, wide;
};

struct State {
  float peak[R], total[R];
  alignas(64) float sum[2][R][DV];
};

static inline vf meta(const void *p, int64_t i, bool wide) {
  return wide ? load((const float *)p + i) : __builtin_convertvector((v16h) * (const v16hu *)((const _Float16 *)p + i), vf);
}
static inline float meta1(const void *p, int64_t i, bool wide) {
  return wide ? ((const float *)p)[i] : (float)((const _Float16 *)p)[i];
}

// Fold `count` scores of each row into the running softmax; scores become weights.
template <int COUNT> static inline void soften(State &st, float (*s)[COUNT], int count) {
  for (int r = 0; r < R; r++) {
    for (int t = count; t < COUNT; t++) s[r][t] = NEG_INF;
    vf most = splat(st.peak[r]);
    for (int t = 0; t < COUNT; t += 16) most = vmax(load(&s[r][t]), most);
    float peak = hmax(most);
    if (peak == NEG_INF) { for (int t = 0; t < count; t++) s[r][t] = 0; continue; }
    float decay = st.peak[r] == NEG_INF ? 0.f : exp2f(st.peak[r] - peak);
    if (decay != 1.f) {
      st.total[r] *= decay;
      for (int part = 0; part < 2; part++)
        for (int d = 0; d < DV; d += 16) store(&st.sum[part][r][d], load(&st.sum[part][r][d]) * decay);
    }
    st.peak[r] = peak;
    vf sum = {};
    for (int t = 0; t < COUNT; t += 16) { vf w = exp2v(load(&s[r][t]) - peak); store(&s[r][t], w); sum += w; }
    st.total[r] += hsum(sum);
  }
}

static void exact_part(const Args &a, const Exact &e, int b, int h, int row, State &st) {
  const float *q = a.q + ((b * a.heads + h) * a.rows + row) * D;
  const float *k = e.k + b * e.kb + h * e.kh, *v = e.v + b * e.vb + h * e.vh;
  int64_t group = a.rows / a.q_len;
  alignas(64) float s[R][32];
  for (int64_t t0 = 0; t0 < e.count; t0 += 32) {
    int n = e.count - t0 < 32 ? e.count - t0 : 32;
    for (int t = 0; t < n; t++) {
      vf acc[R] = {};
      for (int d = 0; d < D; d += 16) {
        vf x = load(k + (t0 + t) * D + d);
        for (int r = 0; r < R; r++) acc[r] += x * load(q + r * D + d);
      }
      for (int r = 0; r < R; r++) s[r][t] = hsum(acc[r]);
    }
    if (a.mask)
      for (int r = 0; r < R; r++) {
        int64_t head = h * group + (row + r) / a.q_len, i = (row + r) % a.q_len;
        const float *m = a.mask + b * a.mb + head * a.mh + i * a.mq + e.first + t0;
        for (int t = 0; t < n; t++) s[r][t] += m[t];
      }
    soften<32>(st, s, n);
    for (int d = 0; d < DV; d += 16) {
      vf acc[R];
      for (int r = 0; r < R; r++) acc[r] = load(&st.sum[0][r][d]);
      for (int t = 0; t < n; t++) {
        vf x = load(v + (t0 + t) * DV + d);
        for (int r = 0; r < R; r++) acc[r] += x * s[r][t];
      }
      for (int r = 0; r < R; r++) store(&st.sum[0][r][d], acc[r]);
    }
  }
}

static void block_part(const Args &a, int b, int h, int row, int64_t n0, int64_t n1, State &st) {
  constexpr int KROW = L * KB / 8, VROW = DV * VB / 8, NGK = L / GK, NGV = (DV + GV - 1) / GV;
  constexpr int GW = GV < UV ? UV / GV : 1;  // groups of a unit
  const uint8_t *kc = a.kc + b * a.kcb + h * a.kch, *vc = a.vc + b * a.vcb + h * a.vch;
  int64_t ks0 = b * a.ksb + h * a.ksh, vs0 = b * a.vsb + h * a.vsh;
  const float *q0 = a.qb + ((b * a.heads + h) * a.rows + row) * D;
  int64_t group = a.rows / a.q_len, half = a.width / 2;
  int64_t wide = a.wide;
  alignas(64) float q[R][D], s[R][L], ksf[D * NGK], kzf[D * NGK], vsf[L * NGV], vzf[L * NGV], w[GW][R][L], zero[GW][R];
  for (int64_t n = n0; n < n1; n++) {
    for (int i = 0; i < D * NGK; i += 16) {
      store(ksf + i, meta(a.ks, ks0 + n * D * NGK + i, wide & 1));
      store(kzf + i, a.kz ? meta(a.kz, ks0 + n * D * NGK + i, wide & 1) : load(ksf + i) * -float(1 << (KB - 1)));
    }
    for (int r = 0; r < R; r++) {
      memcpy(q[r], q0 + r * D, sizeof q[r]);
      if (ROPE) {  // q · R(a + b) k = (R(-a) q) · R(b) k: block starts are undone on the query
        const float *c = a.cosa + n * half, *sn = a.sina + n * half;
        for (int64_t i = 0; i < half; i++) {
          int64_t x = a.offset + (ROPE == 1 ? i : 2 * i), y = a.offset + (ROPE == 1 ? i + half : 2 * i + 1);
          float qx = q0[r * D + x], qy = q0[r * D + y];
          q[r][x] = qx * c[i] + qy * sn[i];
          q[r][y] = qy * c[i] - qx * sn[i];
        }
      }
    }
    const uint8_t *kb = kc + n * D * KROW;
    for (int u = 0; u < L / UK; u++) {
      vf acc[R][WK] = {};
      int gi = u * UK / GK;
      auto channel = [&](int d, vf *x) {
        unpack<KB, UK>(kb + d * KROW + u * UK * KB / 8, x);
        vf sc = splat(ksf[d * NGK + gi]), z = splat(kzf[d * NGK + gi]);
        for (int i = 0; i < WK; i++) x[i] = x[i] * sc + z;
      };
      auto plain = [&](int d) {
        vf x[WK];
        channel(d, x);
        for (int r = 0; r < R; r++)
          for (int i = 0; i < WK; i++) acc[r][i] += x[i] * q[r][d];
      };
      if (ROPE) {
        for (int d = 0; d < a.offset; d++) plain(d);
        for (int64_t p = 0; p < half; p++) {
          int dx = a.offset + (ROPE == 1 ? p : 2 * p), dy = a.offset + (ROPE == 1 ? p + half : 2 * p + 1);
          vf x[WK], y[WK];
          channel(dx, x);
          channel(dy, y);
          for (int i = 0; i < WK; i++) {
            vf c = load(a.cosb + p * L + u * UK + 16 * i), sn = load(a.sinb + p * L + u * UK + 16 * i);
            vf rx = x[i] * c - y[i] * sn, ry = y[i] * c + x[i] * sn;
            for (int r = 0; r < R; r++) acc[r][i] += rx * q[r][dx] + ry * q[r][dy];
          }
        }
        for (int d = a.offset + a.width; d < D; d++) plain(d);
      } else {
        for (int d = 0; d < D; d++) plain(d);
      }
      for (int r = 0; r < R; r++)
        for (int i = 0; i < WK; i++) store(&s[r][u * UK + 16 * i], acc[r][i]);
    }
    if (a.mask)
      for (int r = 0; r < R; r++) {
        int64_t head = h * group + (row + r) / a.q_len, i = (row + r) % a.q_len;
        const float *m = a.mask + b * a.mb + head * a.mh + i * a.mq + a.first + n * L;
        for (int t = 0; t < L; t += 16) store(&s[r][t], load(&s[r][t]) + load(m + t));
      }
    soften<L>(st, s, L);
    for (int i = 0; i < L * NGV; i += 16) {
      store(vsf + i, meta(a.vs, vs0 + n * L * NGV + i, wide & 2));
      store(vzf + i, a.vz ? meta(a.vz, vs0 + n * L * NGV + i, wide & 2) : load(vsf + i) * -float(1 << (VB - 1)));
    }
    const uint8_t *vb = vc + n * L * VROW;
    for (int d = 0; d < DV; d += UV) {
      if (d % GV == 0 || GV < UV)
        for (int j = 0; j < GW; j++)
          for (int r = 0; r < R; r++) {
            int g = d / GV + j;
            float sum = 0;
            for (int t = 0; t < L; t++) {
              w[j][r][t] = s[r][t] * vsf[t * NGV + g];
              sum += s[r][t] * vzf[t * NGV + g];
            }
            zero[j][r] = sum;
          }
      vf acc[R][WV];
      for (int r = 0; r < R; r++)
        for (int i = 0; i < WV; i++) acc[r][i] = load(&st.sum[1][r][d + 16 * i]) + zero[i % GW][r];
      for (int t = 0; t < L; t++) {
        vf x[WV];
        unpack<VB, UV>(vb + t * VROW + d * VB / 8, x);
        for (int r = 0; r < R; r++)
          for (int i = 0; i < WV; i++) acc[r][i] += x[i] * w[i % GW][r][t];
      }
      for (int r = 0; r < R; r++)
        for (int i = 0; i < WV; i++) store(&st.sum[1][r][d + 16 * i], acc[r][i]);
    }
  }
}

struct Job { const Args *a; std::atomic<int64_t> next; };

static void work(void *data) {
  Job &job = *(Job *)data;
  const Args &a = *job.a;
  int64_t chunks = a.rows / R, tasks = a.batch * a.heads * chunks * a.splits;
  for (int64_t task; (task = job.next.fetch_add(1)) < tasks;) {
    int64_t split = task % a.splits, rest = task / a.splits;
    int64_t row = rest % chunks * R, bh = rest / chunks;
    int b = bh / a.heads, h = bh % a.heads;
    State st;
    for (int r = 0; r < R; r++) st.peak[r] = NEG_INF, st.total[r] = 0;
    memset(st.sum, 0, sizeof st.sum);
    block_part(a, b, h, row, a.blocks * split / a.splits, a.blocks * (split + 1) / a.splits, st);
    if (split == a.splits - 1)
      for (const Exact &e : a.exact) if (e.count) exact_part(a, e, b, h, row, st);
    float *o = a.scratch + task * R * (2 + 2 * DV);
    for (int r = 0; r < R; r++, o += 2 + 2 * DV) {
      o[0] = st.peak[r];
      o[1] = st.total[r];
      memcpy(o + 2, st.sum[0][r], sizeof st.sum[0][r]);
      memcpy(o + 2 + DV, st.sum[1][r], sizeof st.sum[1][r]);
    }
  }
}

// Merge the splits of every row by their peaks.
static void merge(const Args &a) {
  int64_t chunks = a.rows / R;
  for (int64_t bh = 0; bh < a.batch * a.heads; bh++)
    for (int64_t row = 0; row < a.rows; row++) {
      const float *first = a.scratch + (((bh * chunks + row / R) * a.splits) * R + row % R) * (2 + 2 * DV);
      int64_t step = R * (2 + 2 * DV);
      float peak = NEG_INF, total = 0;
      for (int64_t i = 0; i < a.splits; i++) peak = first[i * step] > peak ? first[i * step] : peak;
      float *o = a.out + (bh * a.rows + row) * DV, *ob = a.outb + (bh * a.rows + row) * DV;
      memset(o, 0, DV * sizeof(float));
      memset(ob, 0, DV * sizeof(float));
      if (peak == NEG_INF) continue;
      for (int64_t i = 0; i < a.splits; i++) total += first[i * step + 1] * exp2f(first[i * step] - peak);
      for (int64_t i = 0; i < a.splits; i++) {
        float f = exp2f(first[i * step] - peak) / total;
        if (f == 0) continue;
        for (int d = 0; d < DV; d++) o[d] += f * first[i * step + 2 + d], ob[d] += f * first[i * step + 2 + DV + d];
      }
    }
}

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
extern "C" void kvquant_decode(const Args *a, int threads, parallel_fn parallel) {
  Job job{a, {0}};
  if (threads > 1 && parallel) parallel(work, &job, threads, 0);
  else work(&job);
  merge(*a);
}
