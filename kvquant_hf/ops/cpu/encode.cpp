// Quantize and pack blocks of keys or values, and append single tokens to the residual window.
//
// One library for all formats. Compiled without contraction of products and sums, so that codes, scales and zero
// points are those of quantizers/affine.py bit for bit (min-max ranges); the search of `clip="mse"` sums its errors in
// another order and may choose another one of two almost equal ranges.
//
// A block is brought into the form x[element][lane]: the elements of a group lie one below the other, sixteen rows that
// are quantized independently lie side by side. For keys (per channel) the elements are tokens and the rows channels,
// for values (per token) the other way round.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include "simd.h"

constexpr int MAX_BLOCK = 128, MAX_DIM = 256;

struct Args {
  const char *states;              // [B, H, ≥ N·L, D]
  int64_t sb, sh, st, kind;        // strides of batch, head and token, element type (enum Kind)
  const float *fitted;             // [B, H, N, L, D] contiguous: what ranges are fitted to; null: the states
  int64_t batch, heads, blocks, length, dim;
  int64_t per_channel, nbits, group, symmetric, mse, hadamard;
  int64_t rope, first, width;      // 0 none, 1 half, 2 interleaved; first rotated channel, number of rotated channels
  int64_t pairs;                   // row length of the following tables
  const float *cosa, *sina;        // [N, pairs] rotation of block starts
  const float *cosb, *sinb;        // [L, pairs] rotation of offsets
  uint8_t *codes;                  // [B, H, N, rows, bytes]
  uint16_t *scale, *zero;          // [B, H, N, rows, groups], float16; no zero points of symmetric codes
  const float *feedback;           // [H, D, D] or null: what an error of channel j takes from channels i < j
  int64_t promotions;              // channels of a block that get two more bits, P
  const int64_t *partners;         // [D] or null: channels that are promoted together
  uint8_t *extra, *promoted;       // [B, H, N, P, L/4] their low two bits, [B, H, N, P] their numbers
  const float *bytes;              // [2, 256] or null: scales over the base that bytes stand for, fine and coarse
  uint8_t *byte_scale;             // [B, H, N, rows, groups]: these bytes, instead of `scale`
  uint16_t *base;                  // [B, H, N], float16
};

// ---- float16, rounded in one direction -------------------------------------------------------------------------------

INLINE float half_to_float(uint16_t bits) { return fetch1(F16, &bits, 0); }

// The smallest float16 that is not below `x` (up), or the largest that is not above.
INLINE uint16_t rounded(float x, bool up) {
  _Float16 h = (_Float16)x;
  uint16_t bits;
  memcpy(&bits, &h, 2);
  float back = (float)h;
  if (up ? back >= x : back <= x) return bits;
  bool negative = bits & 0x8000;
  int magnitude = bits & 0x7FFF;
  int moved = magnitude + (up == negative ? -1 : 1);
  if (moved < 0) { moved = 1; negative = !negative; }
  return moved >= 0x7C00 ? bits : (uint16_t)(moved | (negative ? 0x8000 : 0));
}

// ---- one group of sixteen rows ---------------------------------------------------------------------------------------

struct Grid {  // parameters of sixteen groups, as stored and as numbers
  uint16_t scale[16], zero[16];
  vf step, inverse, offset;
};

struct Format {
  int levels;    // steps between the lowest and the highest value
  float middle;  // where zero lies among symmetric codes
  bool symmetric;
  const float *bytes = nullptr;  // [256]: scales over the base that bytes stand for, increasing; symmetric codes only
  float base = 0;
};

// Symmetric codes with scales that are bytes: the smallest that is wide enough, or the largest there is. `wider`: the
// bytes of ranges that contain these, from where the way is short.
static Grid byte_grid(const Format &f, vf low, vf high, const uint16_t *wider) {
  Grid g;
  vf lowest = low / (float)f.levels, needed = high / (float)f.levels - lowest, wanted = f.base > 0 ? needed / f.base : needed;
  for (int i = 0; i < 16; i++) {
    int byte;
    if (wider) {
      for (byte = wider[i]; byte > 0 && f.bytes[byte - 1] >= wanted[i];) byte--;
    } else {
      byte = std::lower_bound(f.bytes, f.bytes + 255, wanted[i]) - f.bytes;
    }
    if (f.bytes[byte] * f.base < needed[i] && byte < 255) byte++;  // the quotient was rounded
    g.scale[i] = byte;
    g.step[i] = f.bytes[byte] * f.base;
  }
  g.offset = vf{};
  g.inverse = g.step >= 1.17549435e-38f ? 1 / g.step : vf{};
  return g;
}

static Grid grid_of(const Format &f, vf low, vf high, const uint16_t *wider = nullptr) {
  if (f.bytes) return byte_grid(f, low, high, wider);
  Grid g;
  for (int i = 0; i < 16; i++) {
    float lo = low[i], hi = high[i], z = 0, s;
    if (f.symmetric) {
      g.scale[i] = rounded(hi / f.middle, true);
    } else {
      g.zero[i] = rounded(lo, false);
      z = half_to_float(g.zero[i]);
      float a = hi / (float)f.levels, b = z / (float)f.levels;
      g.scale[i] = rounded(a - b, true);
    }
    s = half_to_float(g.scale[i]);
    g.step[i] = s;
    g.offset[i] = z;
    g.inverse[i] = s >= 1.17549435e-38f ? 1 / s : 0.f;
  }
  return g;
}

INLINE vf nearest(vf x) {
#if AVX512
  return (vf)_mm512_roundscale_ps((__m512)x, 0);
#else
  vf out;
  for (int i = 0; i < 16; i++) out[i] = __builtin_nearbyintf(x[i]);
  return out;
#endif
}
INLINE vf vmin(vf x, vf y) { return x < y ? x : y; }
INLINE vf within(vf x, float most) {
#if AVX512
  return (vf)_mm512_min_ps(_mm512_max_ps((__m512)x, _mm512_setzero_ps()), _mm512_set1_ps(most));
#else
  return vmin(vmax(x, vf{}), splat(most));
#endif
}

INLINE vf codes_of(const Format &f, const Grid &g, vf x) {
  return within(nearest(f.symmetric ? x * g.inverse + f.middle : (x - g.offset) * g.inverse), f.levels);
}

INLINE vf values_of(const Format &f, const Grid &g, vf c) {
  return f.symmetric ? (c - f.middle) * g.step : c * g.step + g.offset;
}

static vf squared_error(const Format &f, const Grid &g, const float *x, int64_t step, int count) {
  vf sum = {};
  for (int e = 0; e < count; e++) {
    vf value = load(x + e * step), c = codes_of(f, g, value);
    vf gap = values_of(f, g, c) - value;
    sum += gap * gap;
  }
  return sum;
}

// The range among shares of the full one whose codes have the least squared error.
static Grid clipped(const Format &f, const Grid &full, vf low, vf high, const float *x, int64_t step, int count) {
  Grid best = full, wider = full;
  vf least = squared_error(f, full, x, step, count), middle = low / 2 + high / 2, half = high / 2 - low / 2;
  for (int k = 1; k <= 10; k++) {
    float share = (float)(1 - 0.05 * k);
    Grid g = grid_of(f, middle - half * share, middle + half * share, wider.scale);
    wider = g;
    vf error = squared_error(f, g, x, step, count);
    for (int i = 0; i < 16; i++)
      if (error[i] < least[i]) {
        least[i] = error[i];
        best.scale[i] = g.scale[i];
        best.zero[i] = g.zero[i];
        best.step[i] = g.step[i];
        best.offset[i] = g.offset[i];
        best.inverse[i] = g.inverse[i];
      }
  }
  return best;
}

// Whether all of `count` elements are finite and scales and zero points of the range fit into float16.
INLINE bool fits_half(const Format &f, vf low, vf high, vi undefined) {
  for (int i = 0; i < 16; i++) {
    float extent = high[i] > -low[i] ? high[i] : -low[i];
    float spread = high[i] / (float)f.levels - low[i] / (float)f.levels;
    if (undefined[i] || !(extent <= 65504.f)) return false;
    if (spread > 0 && spread < 1.52587890625e-05f && spread * 1024.f > extent) return false;
  }
  return true;
}

// ---- a block ---------------------------------------------------------------------------------------------------------

struct Scratch {
  alignas(64) float x[MAX_BLOCK * MAX_DIM], other[MAX_BLOCK * MAX_DIM], range[MAX_BLOCK * MAX_DIM];
  alignas(64) uint8_t code[MAX_DIM > MAX_BLOCK ? MAX_DIM : MAX_BLOCK][16];
  alignas(64) uint8_t channel[MAX_DIM][MAX_BLOCK];  // codes of each channel, where channels are rounded one by one
  uint16_t fine[MAX_DIM * MAX_BLOCK / 16];            // scales that channels would have if they were promoted
  float spread[MAX_DIM];                              // widest range of a group of each channel
  bool chosen[MAX_DIM];                               // whether a channel is promoted
};

static void unrotate(const Args &a, int64_t n, float *x) {
  int64_t half = a.width / 2;
  const float *ca = a.cosa + n * a.pairs, *sa = a.sina + n * a.pairs;
  for (int64_t t = 0; t < a.length; t++, x += a.dim) {
    const float *cb = a.cosb + t * a.pairs, *sb = a.sinb + t * a.pairs;
    for (int64_t i = 0; i < half; i++) {
      float c = ca[i] * cb[i] - sa[i] * sb[i], s = sa[i] * cb[i] + ca[i] * sb[i];
      int64_t j = a.first + (a.rope == 1 ? i : 2 * i), k = a.first + (a.rope == 1 ? i + half : 2 * i + 1);
      float first = x[j], second = x[k];
      x[j] = first * c + second * s;
      x[k] = second * c - first * s;
    }
  }
}

static void transpose(const float *x, float *out, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) out[j * rows + i] = x[i * columns + j];
}

// `hadamard` of each of `columns` columns of `n` numbers, a multiple of sixteen columns side by side.
static void hadamard_columns(float *x, int64_t n, int64_t columns) {
  int64_t width = n & -n;
  for (int64_t h = 1; h < width; h *= 2)
    for (int64_t i = 0; i < n; i += 2 * h)
      for (float *p = x + i * columns, *q = p + h * columns, *end = q; p < end; p += 16, q += 16) {
        vf a = load(p), b = load(q);
        store(p, a + b);
        store(q, a - b);
      }
  float norm = (float)std::sqrt((double)width);
  for (int64_t i = 0; i < n * columns; i += 16) store(x + i, load(x + i) / norm);
}

template <int KIND> static void read_rows(const Args &a, const char *p, float *x) {
  for (int64_t t = 0; t < a.length; t++)
    for (int64_t d = 0; d < a.dim; d += 16) store(x + t * a.dim + d, fetch<KIND>(p, t * a.st + d));
}

// Codes of one row and sixteen lanes to bytes, as PlanarLayout lays them out.
static void pack(const uint8_t (*code)[16], int64_t length, int nbits, uint8_t *out, int64_t row_bytes) {
  int unit = length % 32 == 0 ? 32 : 16;
  for (int64_t u = 0; u < length; u += unit) {
    int64_t at = u * nbits / 8;
    for (int low = 0; low < nbits;) {
      int plane = nbits == 3 ? (low == 0 ? 2 : 1) : nbits, bytes = unit * plane / 8;
      for (int j = 0; j < bytes; j++) {
        v16u8 byte = {};
        for (int k = 0; k * plane < 8; k++) {
          v16u8 c = raw<v16u8>(code[u + j + k * bytes]) >> low;
          if (plane < 8) c &= (uint8_t)((1 << plane) - 1);
          byte |= c << (k * plane);
        }
        for (int i = 0; i < 16; i++) out[i * row_bytes + at + j] = byte[i];
      }
      at += bytes;
      low += plane;
    }
  }
}

// Choose the channels of widest range, pairs by both, and write their numbers.
static void promote(const Args &a, Scratch &s, uint8_t *numbers) {
  float score[MAX_DIM];
  int order[MAX_DIM];
  for (int d = 0; d < a.dim; d++) {
    float own = s.spread[d];
    score[d] = own;
    if (a.partners) {
      float other = s.spread[a.partners[d]], square = own * own;
      score[d] = square + other * other;
    }
    order[d] = d;
    s.chosen[d] = false;
  }
  std::stable_sort(order, order + a.dim, [&](int i, int j) { return score[i] > score[j]; });
  for (int j = 0; j < a.promotions; j++) s.chosen[order[j]] = true;
  for (int d = 0; d < a.dim; d++)
    if (s.chosen[d]) *numbers++ = d;
}

// The low two bits of the codes of a promoted channel, as PlanarLayout lays them out.
static void pack_low(const uint8_t *code, int64_t length, uint8_t *out) {
  int unit = length % 32 == 0 ? 32 : 16, bytes = unit / 4;
  for (int64_t u = 0; u < length; u += unit, out += bytes)
    for (int j = 0; j < bytes; j++) {
      uint8_t byte = 0;
      for (int k = 0; k < 4; k++) byte |= (code[u + j + k * bytes] & 3) << 2 * k;
      out[j] = byte;
    }
}

// Codes of channels `x` [L, D] against stored parameters [D, groups], from the last channel to the first. With feedback,
// what a channel is off by is made good in those still to come, which are `other` [D, L] by then.
static void round_channels(const Args &a, const Format &plain, const Format &fine, Scratch &s, const uint16_t *scale,
                           const uint16_t *zero, int64_t groups, const float *feedback) {
  int64_t L = a.length, D = a.dim;
  transpose(s.x, s.other, L, D);
  for (int64_t d = D - 1; d >= 0; d--) {
    const Format &f = a.promotions && s.chosen[d] ? fine : plain;
    for (int64_t t = 0; t < L; t += 16) {
      int64_t at = d * groups + t / a.group;
      float step = half_to_float(scale[at]), offset = f.symmetric ? 0.f : half_to_float(zero[at]);
      Grid g;
      g.step = splat(step);
      g.offset = splat(offset);
      g.inverse = splat(step >= 1.17549435e-38f ? 1 / step : 0.f);
      vf c = codes_of(f, g, load(s.other + d * L + t)), own;
      v16u8 bytes = __builtin_convertvector(__builtin_convertvector(c, vi), v16u8);
      memcpy(s.channel[d] + t, &bytes, 16);
      if (!feedback) continue;
      for (int i = 0; i < 16; i++) own[i] = s.x[(t + i) * D + d];
      vf error = values_of(f, g, c) - own;
      for (int64_t i = 0; i < d; i++) {
        float *target = s.other + i * L + t;
        store(target, load(target) - error * feedback[d * D + i]);
      }
    }
  }
}

// Range of `count` elements in each of sixteen lanes, evenly about zero for symmetric codes. `undefined`: lanes in which
// something is not finite, of what is ranged over or of what is coded.
struct Range {
  vf low, high;
  vi undefined;
};

static Range range_of(const Format &f, const float *from, const float *own, int64_t step, int64_t count) {
  Range r{load(from), load(from), {}};
  for (int64_t e = 0; e < count; e++) {
    vf v = load(from + e * step), w = load(own + e * step);
    r.low = vmin(v, r.low);
    r.high = vmax(v, r.high);
    r.undefined |= (v != v) | (w - w != vf{});  // not a number, or infinite where only the range was checked
  }
  if (f.symmetric) {
    r.high = vmax(r.high, -r.low);
    r.low = -r.high;
  }
  return r;
}

// The base of a block whose scales are bytes: its largest scale, rounded up to float16, negative if the scales span so
// much that bytes take coarser steps. False if float16 does not hold it.
static bool find_base(Format &f, const float *range, const float *own, int64_t rows, int64_t elements, int64_t group,
                      uint16_t *base) {
  float most = 0, least = INFINITY;
  for (int64_t lane = 0; lane < rows; lane += 16)
    for (int64_t first = 0; first < elements; first += group) {
      int64_t count = elements - first < group ? elements - first : group, at = first * rows + lane;
      Range r = range_of(f, range + at, own + at, rows, count);
      for (int i = 0; i < 16; i++) {
        if (r.undefined[i] || !(r.high[i] <= 65504.f)) return false;
        float lowest = r.low[i] / (float)f.levels, needed = r.high[i] / (float)f.levels - lowest;
        if (needed > most) most = needed;
        if (needed > 0 && needed < least) least = needed;
      }
    }
  if (most > 0 && most < 6.103515625e-05f) return false;
  if (most > 0.98f * 65504.f) return false;
  *base = rounded(most, true);
  f.base = half_to_float(*base);
  if (std::isfinite(least) && least < f.bytes[1] * f.base) {
    *base |= 0x8000;
    f.bytes += 256;
  }
  return true;
}

// Encode block `n` of head `h` of row `b`; false if it does not fit into float16 parameters.
static bool encode_block(const Args &a, Scratch &s, int64_t b, int64_t h, int64_t n) {
  int64_t L = a.length, D = a.dim, index = (b * a.heads + h) * a.blocks + n;
  const char *p = a.states + (b * a.sb + h * a.sh + n * L * a.st) * size_of(a.kind);
  if (a.kind == F32) read_rows<F32>(a, p, s.x);
  else if (a.kind == BF16) read_rows<BF16>(a, p, s.x);
  else read_rows<F16>(a, p, s.x);
  if (a.rope) unrotate(a, n, s.x);
  const float *x = s.x, *range = s.x;
  if (a.fitted) {
    memcpy(s.range, a.fitted + index * L * D, L * D * sizeof(float));
    range = s.range;
  }
  for (int64_t t = 0; t < L && a.hadamard && a.per_channel; t++) {
    hadamard(s.x + t * D, D);
    if (a.fitted) hadamard(s.range + t * D, D);
  }
  int64_t elements = a.per_channel ? L : D, rows = a.per_channel ? D : L;
  if (!a.per_channel) {
    transpose(s.x, s.other, L, D);
    x = s.other;
    if (a.fitted) transpose(s.range, s.x, L, D);
    range = a.fitted ? s.x : x;
    if (a.hadamard) {
      hadamard_columns(s.other, D, L);
      if (a.fitted) hadamard_columns(s.x, D, L);
    }
  }
  int64_t groups = (elements + a.group - 1) / a.group, row_bytes = elements * a.nbits / 8;
  int levels = (1 << a.nbits) - 1;
  Format f{levels, levels / 2.f, a.symmetric != 0, a.bytes};
  if (a.bytes && !find_base(f, range, x, rows, elements, a.group, a.base + index)) return false;
  int most = (1 << (a.nbits + 2)) - 1;
  Format fine{most, most / 2.f, false};
  bool one_by_one = a.feedback || a.promotions;
  for (int64_t d = 0; d < rows && a.promotions; d++) s.spread[d] = 0;
  uint8_t *codes = a.codes + index * rows * row_bytes;
  for (int64_t lane = 0; lane < rows; lane += 16) {
    for (int64_t g = 0; g < groups; g++) {
      int64_t first = g * a.group, count = elements - first < a.group ? elements - first : a.group;
      const float *from = range + first * rows + lane, *own = x + first * rows + lane;
      auto [low, high, undefined] = range_of(f, from, own, rows, count);
      if (!a.bytes && !fits_half(f, low, high, undefined)) return false;
      Grid grid = grid_of(f, low, high);
      if (a.promotions) {
        if (!fits_half(fine, low, high, undefined)) return false;
        Grid finer = grid_of(fine, low, high);
        vf wide = vmax(load(s.spread + lane), high - low);
        store(s.spread + lane, wide);
        for (int i = 0; i < 16; i++) s.fine[(lane + i) * groups + g] = finer.scale[i];
      }
      if (a.mse) grid = clipped(f, grid, low, high, from, rows, count);
      for (int64_t e = 0; e < count && !one_by_one; e++) {
        vi c = __builtin_convertvector(codes_of(f, grid, load(own + e * rows)), vi);
        v16u8 bytes = __builtin_convertvector(c, v16u8);
        memcpy(s.code[first + e], &bytes, 16);
      }
      for (int i = 0; i < 16; i++) {
        int64_t at = (index * rows + lane + i) * groups + g;
        if (a.bytes) a.byte_scale[at] = grid.scale[i];
        else a.scale[at] = grid.scale[i];
        if (a.zero) a.zero[at] = grid.zero[i];
      }
    }
    if (!one_by_one) pack(s.code, elements, a.nbits, codes + lane * row_bytes, row_bytes);
  }
  if (one_by_one) {
    int64_t parameters = index * rows * groups;
    const uint16_t *zero = a.zero ? a.zero + parameters : nullptr;
    if (a.promotions) {
      promote(a, s, a.promoted + index * a.promotions);
      for (int64_t d = 0; d < rows; d++)
        if (s.chosen[d]) memcpy(a.scale + parameters + d * groups, s.fine + d * groups, 2 * groups);
    }
    round_channels(a, f, fine, s, a.scale + parameters, zero, groups, a.feedback ? a.feedback + h * D * D : nullptr);
    uint8_t *extra = a.extra + index * a.promotions * (elements / 4);
    for (int64_t d = 0; d < rows && a.promotions; d++)
      if (s.chosen[d]) {
        pack_low(s.channel[d], elements, extra);
        extra += elements / 4;
        for (int64_t e = 0; e < elements; e++) s.channel[d][e] >>= 2;
      }
    for (int64_t lane = 0; lane < rows; lane += 16) {
      for (int64_t e = 0; e < elements; e++)
        for (int i = 0; i < 16; i++) s.code[e][i] = s.channel[lane + i][e];
      pack(s.code, elements, a.nbits, codes + lane * row_bytes, row_bytes);
    }
  }
  return true;
}

struct Job {
  const Args *a;
  std::atomic<int64_t> next;
  std::atomic<int> failed;
};

static void work(void *data) {
  Job &job = *(Job *)data;
  const Args &a = *job.a;
  Scratch *scratch = new (std::align_val_t(64)) Scratch;
  int64_t tasks = a.batch * a.heads * a.blocks;
  for (int64_t task; !job.failed && (task = job.next.fetch_add(1)) < tasks;)
    if (!encode_block(a, *scratch, task / a.blocks / a.heads, task / a.blocks % a.heads, task % a.blocks)) job.failed = 1;
  ::operator delete(scratch, std::align_val_t(64));
}

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);

// 0: done. 1: something is not finite or needs float32 parameters; nothing that was written counts then.
extern "C" int kvquant_encode(const Args *a, int threads, parallel_fn parallel) {
  Job job{a, {0}, {0}};
  if (threads > 1 && parallel && a->batch * a->heads * a->blocks > 1) parallel(work, &job, threads, 0);
  else work(&job);
  return job.failed;
}

// Copy one row per (batch, head) of keys and of values to where they belong in the residual window.
struct Append {
  char *to[2];
  const char *from[2];
  int64_t to_batch[2], to_head[2], from_batch[2], from_head[2], bytes[2];  // strides and lengths in bytes
  int64_t batch, heads;
};
extern "C" void kvquant_append(const Append *a) {
  for (int side = 0; side < 2; side++)
    for (int64_t b = 0; b < a->batch; b++)
      for (int64_t h = 0; h < a->heads; h++)
        memcpy(a->to[side] + b * a->to_batch[side] + h * a->to_head[side],
               a->from[side] + b * a->from_batch[side] + h * a->from_head[side], a->bytes[side]);
}
