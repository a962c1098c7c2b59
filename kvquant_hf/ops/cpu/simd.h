// Sixteen lanes of float32: what decode.cpp needs of a processor.
//
// Everything is written with GNU vector types, which compile to whatever the processor has (AVX2, NEON, …). With
// AVX-512 the hot primitives are spelled out: unpacking goes through a table in a register (one shift and one permute
// give sixteen dequantized numbers), conversions and exponentials are single instructions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && !defined(PORTABLE)
#define AVX512 1
#include <immintrin.h>
#else
#define AVX512 0
#if defined(__F16C__)
#include <immintrin.h>
#endif
#endif

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint8_t v16u8 __attribute__((vector_size(16)));
typedef uint16_t v16u16 __attribute__((vector_size(32)));
typedef uint64_t v2u64 __attribute__((vector_size(16)));
typedef uint32_t v4u32 __attribute__((vector_size(16)));
typedef uint16_t v8u16 __attribute__((vector_size(16)));
typedef float vfu __attribute__((vector_size(64), aligned(4)));

#define NEG_INF (-__builtin_inff())
#define INLINED __attribute__((always_inline))
#define INLINE static inline __attribute__((always_inline))

// f(0), f(1), … f(N - 1) with constants: arrays indexed by them stay in registers, which loops do not guarantee.
template <class F, int... I> INLINE void each_of(std::integer_sequence<int, I...>, F f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F> INLINE void each(F f) { each_of(std::make_integer_sequence<int, N>{}, f); }

INLINE vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE void store(float *p, vf x) { *(vfu *)p = x; }
template <class V, class P> INLINE V raw(const P *p) { V v; memcpy(&v, p, sizeof v); return v; }
// Every second number of the 32 in `x` and `y`, from number `FIRST` on.
template <int FIRST> INLINE vf every_second(vf x, vf y) {
#define PICK(i) FIRST + 2 * (i)
#define EIGHT(i) PICK(i), PICK(i + 1), PICK(i + 2), PICK(i + 3), PICK(i + 4), PICK(i + 5), PICK(i + 6), PICK(i + 7)
#if defined(__clang__)
  return __builtin_shufflevector(x, y, EIGHT(0), EIGHT(8));
#else
  return __builtin_shuffle(x, y, vi{EIGHT(0), EIGHT(8)});
#endif
#undef EIGHT
#undef PICK
}
INLINE vf vmax(vf x, vf y) { return x > y ? x : y; }

// ---- element types of the model --------------------------------------------------------------------------------------

enum Kind { F32 = 0, BF16 = 1, F16 = 2 };
constexpr int size_of(int kind) { return kind == F32 ? 4 : 2; }

INLINE vf half16(const void *p) {
#if AVX512
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
  vf out;
  for (int i = 0; i < 2; i++) {
    __m256 part = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + i));
    memcpy((char *)&out + 32 * i, &part, 32);
  }
  return out;
#else
  vf out;
  for (int i = 0; i < 16; i++) { _Float16 h; memcpy(&h, (const char *)p + 2 * i, 2); out[i] = (float)h; }
  return out;
#endif
}

INLINE vf brain16(const void *p) {
  return (vf)(__builtin_convertvector(raw<v16u16>(p), vu) << 16);
}

// Sixteen numbers of a kind, from element `i` on.
template <int TYPE> INLINE vf fetch(const void *p, int64_t i) {
  if constexpr (TYPE == F32) return load((const float *)p + i);
  else if constexpr (TYPE == BF16) return brain16((const uint16_t *)p + i);
  else return half16((const uint16_t *)p + i);
}

INLINE float fetch1(int kind, const void *p, int64_t i) {
  if (kind == F32) return ((const float *)p)[i];
  uint16_t bits = ((const uint16_t *)p)[i];
  if (kind == BF16) { uint32_t wide = (uint32_t)bits << 16; float x; memcpy(&x, &wide, 4); return x; }
  _Float16 h;
  memcpy(&h, &bits, 2);
  return (float)h;
}

INLINE void put1(int kind, void *p, int64_t i, float x) {
  if (kind == F32) { ((float *)p)[i] = x; return; }
  uint16_t bits;
  if (kind == BF16) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    bits = x != x ? 0x7FC0 : (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;  // to nearest, ties to even
  } else {
    _Float16 h = (_Float16)x;
    memcpy(&bits, &h, 2);
  }
  ((uint16_t *)p)[i] = bits;
}

// ---- codes -----------------------------------------------------------------------------------------------------------

#if AVX512
INLINE __m512i lanes(int a, int b, int c, int d, int e, int f, int g, int h) {
  return _mm512_setr_epi32(a, a, b, b, c, c, d, d, e, e, f, f, g, g, h, h);
}

// Sixteen codes of a unit of U, its half `i`, each in the low bits of a lane. Bits above the code may hold anything
// below B = 8: the table of `Values` repeats itself accordingly.
template <int B, int U> INLINE __m512i code_lanes(const uint8_t *p, int i) {
  static_assert(U == 32 || U == 16, "units of 32 or 16 codes");
  if constexpr (B == 8) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p + 16 * i)));
  } else if constexpr (B == 4 && U == 32) {
    __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return i ? _mm512_srli_epi32(x, 4) : x;
  } else if constexpr (B == 4) {
    __m512i x = _mm512_cvtepu8_epi32(_mm_set1_epi64x(raw<int64_t>(p)));
    return _mm512_srlv_epi32(x, lanes(0, 0, 0, 0, 4, 4, 4, 4));
  } else {
    __m512i low;
    if constexpr (U == 32) {
      low = _mm512_cvtepu8_epi32(_mm_set1_epi64x(raw<int64_t>(p)));
      low = _mm512_srlv_epi32(low, i ? lanes(4, 4, 4, 4, 6, 6, 6, 6) : lanes(0, 0, 0, 0, 2, 2, 2, 2));
    } else {
      const __m512i by = _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30);
      low = _mm512_srlv_epi32(_mm512_set1_epi32(raw<int32_t>(p)), by);
    }
    if constexpr (B == 2) return low;
    // The third bit is rotated onto its place.
    __m512i high, by;
    if constexpr (U == 32) {
      by = _mm512_setr_epi32(30, 6, 14, 22, 31, 7, 15, 23, 0, 8, 16, 24, 1, 9, 17, 25);
      if (i) by = _mm512_add_epi32(by, _mm512_set1_epi32(4));
      high = _mm512_set1_epi32(raw<int32_t>(p + 8));
    } else {
      by = _mm512_setr_epi32(30, 6, 31, 7, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13);
      high = _mm512_set1_epi32(raw<uint16_t>(p + 4));
    }
    high = _mm512_rorv_epi32(high, by);
    return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi32(3), 0xE4);  // bits 0 and 1 of low, the rest of high
  }
}

// Codes to numbers `scale · code + zero`, through a table of sixteen.
template <int B> struct Values {
  __m512 table, scale;
  INLINE __m512 codes() {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cvtepi32_ps(_mm512_and_si512(lane, _mm512_set1_epi32((1 << B) - 1)));
  }
  Values() : table(B < 8 ? codes() : _mm512_setzero_ps()), scale(_mm512_set1_ps(1.f)) {}
  Values(float step, float zero) {
    if constexpr (B < 8) table = _mm512_fmadd_ps(codes(), _mm512_set1_ps(step), _mm512_set1_ps(zero));
    else { scale = _mm512_set1_ps(step); table = _mm512_set1_ps(zero); }
  }
  template <int U> __attribute__((always_inline)) vf of(const uint8_t *p, int i) const {
    __m512i code = code_lanes<B, U>(p, i);
    if constexpr (B < 8) return (vf)_mm512_permutexvar_ps(code, table);
    else return (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps(code), scale, table);
  }
};
#else
// Sixteen codes of a unit of U, its half `i`.
template <int B, int U> INLINE v16u8 code_bytes(const uint8_t *p, int i) {
  if constexpr (B == 8) return raw<v16u8>(p + 16 * i);
  if constexpr (B == 4) {
    if constexpr (U == 32) return i ? raw<v16u8>(p) >> 4 : raw<v16u8>(p) & 15;
    uint64_t w = raw<uint64_t>(p);
    return (v16u8)(v2u64{w, w >> 4}) & 15;
  }
  v16u8 code;
  if constexpr (U == 32) {
    uint64_t w = raw<uint64_t>(p) >> 4 * i;
    code = (v16u8)(v2u64{w, w >> 2}) & 3;
  } else {
    uint32_t w = raw<uint32_t>(p);
    code = (v16u8)(v4u32{w, w >> 2, w >> 4, w >> 6}) & 3;
  }
  if constexpr (B == 3) {
    if constexpr (U == 32) {
      uint32_t h = raw<uint32_t>(p + 8) >> 4 * i;
      code |= ((v16u8)(v4u32{h, h >> 1, h >> 2, h >> 3}) & 1) << 2;
    } else {
      uint16_t h = raw<uint16_t>(p + 4);
      v8u16 x = {h, uint16_t(h >> 1), uint16_t(h >> 2), uint16_t(h >> 3),
                 uint16_t(h >> 4), uint16_t(h >> 5), uint16_t(h >> 6), uint16_t(h >> 7)};
      code |= ((v16u8)x & 1) << 2;
    }
  }
  return code;
}

template <int B> struct Values {
  float scale = 1, zero = 0;
  Values() {}
  Values(float step, float offset) : scale(step), zero(offset) {}
  template <int U> __attribute__((always_inline)) vf of(const uint8_t *p, int i) const {
    vf code = __builtin_convertvector(__builtin_convertvector(code_bytes<B, U>(p, i), vi), vf);
    return code * scale + zero;
  }
};
#endif

#if AVX512 && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define AVX512_DOT8 1
// acc += four products of unsigned bytes of `x` with signed ones of `y`, in each lane. (GCC 12 copies the accumulator of
// the intrinsic from register to register, and runs out of them.)
INLINE void dot8(__m512i &acc, __m512i x, __m512i y) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(y)); }

INLINE __m512i rows_of_16(const uint8_t *p, int64_t step) {
  __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
  x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + step)), 1);
  x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 2 * step)), 2);
  return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 3 * step)), 3);
}

// Byte 4c + t is byte `c % WIDTH` of row `t`, rows being WIDTH bytes apart in a register.
template <int WIDTH> INLINE __m512i interleaving() {
  alignas(64) uint8_t index[64];
  for (int c = 0; c < 16; c++)
    for (int t = 0; t < 4; t++) index[4 * c + t] = WIDTH * t + c % WIDTH;
  return _mm512_load_si512(index);
}

// Codes of a unit of 32 channels of four tokens, whose rows are `step` bytes apart: out[i] holds in byte 4c + t the
// code of channel 16 i + c of token t, as an unsigned number; minus 128, signed, for B = 8.
template <int B, int U> INLINE void four_tokens(const uint8_t *p, int64_t step, __m512i *out) {
  static_assert(U == 32, "units of 32 codes");
  if constexpr (B == 8) {
    for (int i = 0; i < 2; i++) {
      __m512i x = _mm512_permutexvar_epi8(interleaving<16>(), rows_of_16(p + 16 * i, step));
      out[i] = _mm512_xor_si512(x, _mm512_set1_epi8(-128));
    }
  } else if constexpr (B == 4) {
    __m512i x = _mm512_permutexvar_epi8(interleaving<16>(), rows_of_16(p, step));
    out[0] = _mm512_and_si512(x, _mm512_set1_epi8(15));
    out[1] = _mm512_and_si512(_mm512_srli_epi32(x, 4), _mm512_set1_epi8(15));
  } else {
    __m128i a = _mm_set_epi64x(raw<int64_t>(p + step), raw<int64_t>(p));
    __m128i b = _mm_set_epi64x(raw<int64_t>(p + 3 * step), raw<int64_t>(p + 2 * step));
    __m512i low = _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1));
    low = _mm512_permutexvar_epi8(interleaving<8>(), low);
    __m512i high = low;
    if constexpr (B == 3) {
      __m128i bits = _mm_setr_epi32(raw<int32_t>(p + 8), raw<int32_t>(p + step + 8), raw<int32_t>(p + 2 * step + 8),
                                    raw<int32_t>(p + 3 * step + 8));
      high = _mm512_permutexvar_epi8(interleaving<4>(), _mm512_castsi128_si512(bits));
    }
    for (int i = 0; i < 2; i++) {
      int k = 4 * i;  // bit of the first channels
      const __m512i by = _mm512_setr_epi32(k, k, k, k, k, k, k, k, k + 2, k + 2, k + 2, k + 2, k + 2, k + 2, k + 2, k + 2);
      out[i] = _mm512_and_si512(_mm512_srlv_epi32(low, by), _mm512_set1_epi8(3));
      if constexpr (B == 3) {  // the third bit is rotated onto its place
        const __m512i turn = _mm512_setr_epi32(k + 30, k + 30, k + 30, k + 30, k + 31, k + 31, k + 31, k + 31, k, k, k, k,
                                               k + 1, k + 1, k + 1, k + 1);
        __m512i third = _mm512_rorv_epi32(high, turn);
        out[i] = _mm512_ternarylogic_epi32(out[i], third, _mm512_set1_epi8(4), 0xF8);  // out | third & 4
      }
    }
  }
}
#else
#define AVX512_DOT8 0
#endif

// ---- reductions and exponentials -------------------------------------------------------------------------------------

#if AVX512
INLINE float hsum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float hmax(vf v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE bool any_above(vf v, float x) { return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_GT_OQ) != 0; }
#else
INLINE float hsum(vf v) { float s = 0; for (int i = 0; i < 16; i++) s += v[i]; return s; }
INLINE float hmax(vf v) { float s = v[0]; for (int i = 1; i < 16; i++) s = v[i] > s ? v[i] : s; return s; }
INLINE bool any_above(vf v, float x) { return hmax(v) > x; }
#endif

// Multiply a row by the (block) Hadamard matrix of rotation.py: additions in the same order, then one division.
static inline void hadamard(float *x, int64_t n) {
  int64_t width = n & -n;
  for (int64_t h = 1; h < width; h *= 2)
    for (int64_t i = 0; i < n; i += 2 * h)
      for (int64_t j = i; j < i + h; j++) {
        float a = x[j], b = x[j + h];
        x[j] = a + b;
        x[j + h] = a - b;
      }
  float norm = (float)std::sqrt((double)width);
  for (int64_t i = 0; i < n; i++) x[i] /= norm;
}

// Rows of N numbers, T of them, to N columns of T numbers, in place.
template <int T, int N> static inline void by_column(float *p) {
  if constexpr (N == 1) return;
  alignas(64) float even[T * N / 2], odd[T * N / 2];
  if constexpr (N % 2 == 0 && T * N % 32 == 0) {
    for (int i = 0; i < T * N / 2; i += 16) {
      vf a = load(p + 2 * i), b = load(p + 2 * i + 16);
      store(even + i, every_second<0>(a, b));
      store(odd + i, every_second<1>(a, b));
    }
    by_column<T, N / 2>(even);  // columns 0, 2, 4, …
    by_column<T, N / 2>(odd);
    for (int n = 0; n < N; n++) memcpy(p + n * T, (n % 2 ? odd : even) + n / 2 * T, T * sizeof(float));
  } else {
    float copy[T * N];
    memcpy(copy, p, sizeof copy);
    for (int n = 0; n < N; n++)
      for (int t = 0; t < T; t++) p[n * T + t] = copy[t * N + n];
  }
}

// Lane `i` of the result is the sum of the lanes of `v[i]`.
INLINE vf sums_of_lanes(const vf *v) {
#if AVX512
  __m512 a[8], b[4];
  for (int i = 0; i < 8; i++) {  // pairs (2i, 2i + 1) side by side
    __m512 x = (__m512)v[2 * i], y = (__m512)v[2 * i + 1];
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  }
  for (int i = 0; i < 4; i++) {
    __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }  // each 128-bit part of b[i]: a part of the sums 4i … 4i + 3
  __m512 lo = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xDD));
  __m512 hi = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xDD));
  return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(lo, hi, 0x88), _mm512_shuffle_f32x4(lo, hi, 0xDD));
#else
  vf out;
  for (int i = 0; i < 16; i++) out[i] = hsum(v[i]);
  return out;
#endif
}

// 2^x for x <= 0, relative error about 2e-7; 0 far below.
INLINE vf exp2v(vf x) {
#if AVX512
  __m512 c = _mm512_max_ps((__m512)x, _mm512_set1_ps(-127.f));
  vf f = (vf)_mm512_reduce_ps(c, 0);  // x minus the nearest integer
#else
  vf c = x < -126.f ? splat(-126.f) : x;
  vf shifted = c + 12582912.f;
  vi n = (vi)shifted - 0x4B400000;
  vf f = c - (shifted - 12582912.f);
#endif
  vf y = f * 1.53513695e-4f + 1.33988744e-3f;
  y = y * f + 9.61843735e-3f;
  y = y * f + 5.55033080e-2f;
  y = y * f + 2.40226479e-1f;
  y = y * f + 6.93147182e-1f;
  y = y * f + 1.0f;
#if AVX512
  // Results below the smallest normal number would each cost a detour through microcode.
  __mmask16 normal = _mm512_cmp_ps_mask(c, _mm512_set1_ps(-126.f), _CMP_GE_OQ);
  return (vf)_mm512_maskz_scalef_ps(normal, (__m512)y, _mm512_roundscale_ps(c, 0));
#else
  vf r = (vf)((vi)y + (n << 23));
  return x <= -126.f ? vf{} : r;
#endif
}
