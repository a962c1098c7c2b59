// What codes stand for before scale and zero point: evenly spaced numbers, or those of a table of 2^B, which is data.
#pragma once
#include "simd.h"

// EVEN: the code itself. TABLE: entry `code` of the table. E4M3, E5M2: the bits of that format, times 2^-8 and 2^-15; the
// table says the same, but bits are a quarter of the work of looking up one of 256 numbers. SIGNED: the code itself, where
// symmetric codes are a sign and a magnitude (InnerQ), so that zero is one of the numbers.
enum Spacing { EVEN = 0, TABLE = 1, E4M3 = 2, E5M2 = 3, SIGNED = 4 };
constexpr bool is_even(int spacing) { return spacing == EVEN || spacing == SIGNED; }

// Zero point of symmetric codes, in scales.
constexpr float middle_of(int bits, int spacing) {
  return spacing == EVEN ? ((1 << bits) - 1) / -2.f : spacing == SIGNED ? 1.f - (1 << (bits - 1)) : 0.f;
}

// Levels with a scale and a zero point of their own.
template <class Levels> struct Linear {
  Levels levels;
  float scale, zero;
  template <int U> __attribute__((always_inline)) vf of(const uint8_t *p, int i) const {
    return levels.template of<U>(p, i) * scale + zero;
  }
};

// `of<U>(p, i)` are the numbers of sixteen codes of a unit of U, its half `i`; `scaled` gives the same of
// `scale · level + zero`.
template <int B, int S, bool = is_even(S)> struct Levels {
#if AVX512
  __m512 few;         // the table of up to four bits, repeated to sixteen entries
  const float *many;  // that of eight
  explicit Levels(const float *table) : few(_mm512_setzero_ps()), many(table) {
    if constexpr (B < 8) {
      const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      __m512 once = _mm512_maskz_loadu_ps((1 << (1 << B)) - 1, table);
      few = _mm512_permutexvar_ps(_mm512_and_si512(lane, _mm512_set1_epi32((1 << B) - 1)), once);
    }
  }
  template <int U> __attribute__((always_inline)) vf of(const uint8_t *p, int i) const {
    if constexpr (S == E4M3) {  // four bits of exponent and three of mantissa: those of a float16 from bit 7 on
      __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(raw<__m128i>(p + 16 * i)), 7);
      return (vf)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xBFFF)));
    } else if constexpr (S == E5M2) {
      __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(raw<__m128i>(p + 16 * i)), 8);
      return (vf)_mm512_mul_ps(_mm512_cvtph_ps(wide), _mm512_set1_ps(1.f / (1 << 15)));
    } else if constexpr (B == 8) {
      return (vf)_mm512_i32gather_ps(code_lanes<B, U>(p, i), many, 4);
    } else {
      return (vf)_mm512_permutexvar_ps(code_lanes<B, U>(p, i), few);
    }
  }
  INLINED auto scaled(float scale, float zero) const {
    if constexpr (B < 8) {
      Levels other = *this;
      other.few = _mm512_fmadd_ps(few, _mm512_set1_ps(scale), _mm512_set1_ps(zero));
      return other;
    } else {
      return Linear<Levels>{*this, scale, zero};
    }
  }
#else
  const float *table;
  explicit Levels(const float *numbers) : table(numbers) {}
  template <int U> __attribute__((always_inline)) vf of(const uint8_t *p, int i) const {
    v16u8 code = code_bytes<B, U>(p, i);
    vf out;
    for (int j = 0; j < 16; j++) out[j] = table[code[j]];
    return out;
  }
  INLINED auto scaled(float scale, float zero) const { return Linear<Levels>{*this, scale, zero}; }
#endif
};

template <int B, int S> struct Levels<B, S, true> : Values<B> {
  explicit Levels(const float *) {}
  INLINED Values<B> scaled(float scale, float zero) const { return Values<B>(scale, zero); }
};
