// Vectors of float or double for the attention kernel: loads that convert from the stored type, sums, exp, tanh.
//
// Written with the compiler's vector extension, so that every architecture works; the x86 conversions, which the
// extension cannot express well, are intrinsics with a portable sibling.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define INLINE inline __attribute__((always_inline))

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

// A is the type that is computed in: float, or double where K and V are double.
template <class A> struct Lanes {
    typedef A V __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int N = VECTOR_BYTES / sizeof(A);
};
template <class A> using Vec = typename Lanes<A>::V;
template <class A> constexpr int lanes = Lanes<A>::N;

template <class A> INLINE Vec<A> splat(A x) { return Vec<A>{} + x; }
template <class A> INLINE Vec<A> load_own(const A* p) { Vec<A> v; std::memcpy(&v, p, sizeof v); return v; }
template <class A> INLINE void store(A* p, Vec<A> v) { std::memcpy(p, &v, sizeof v); }

// ---- one element at a time ----

INLINE float to_float(bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }

INLINE float to_float(fp16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    // Shift exponent and fraction into place, then scale by 2^112: right for subnormals as well.
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
    float f;
    std::memcpy(&f, &rest, 4);
    f *= 0x1p112f;
    if ((x.bits & 0x7c00) == 0x7c00) { rest |= 0x7f800000; std::memcpy(&f, &rest, 4); }
    uint32_t u;
    std::memcpy(&u, &f, 4);
    u |= sign;
    std::memcpy(&f, &u, 4);
    return f;
#endif
}
INLINE float to_float(float x) { return x; }
INLINE double to_float(double x) { return x; }

INLINE void from_float(float x, float& y) { y = x; }
INLINE void from_float(double x, float& y) { y = float(x); }
INLINE void from_float(float x, double& y) { y = x; }
INLINE void from_float(double x, double& y) { y = x; }

INLINE void from_float(float x, bf16& y) {  // round to nearest, ties to even
    uint32_t u;
    std::memcpy(&u, &x, 4);
    y.bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE void from_float(float x, fp16& y) {
#if defined(__F16C__)
    y.bits = _cvtss_sh(x, 0);
#else
    uint32_t u;
    std::memcpy(&u, &x, 4);
    uint16_t sign = uint16_t(u >> 16 & 0x8000);
    u &= 0x7fffffff;
    if (u > 0x7f800000) { y.bits = sign | 0x7e00; return; }
    if (u >= 0x477ff000) { y.bits = sign | 0x7c00; return; }
    if (u < 0x38800000) {  // below the smallest normal: let the adder do the rounding, at an ulp of 2^-24
        float f, half = 0.5f;
        std::memcpy(&f, &u, 4);
        f += half;
        std::memcpy(&u, &f, 4);
        y.bits = sign | uint16_t(u - 0x3f000000);
        return;
    }
    u += 0xfff + ((u >> 13) & 1);
    y.bits = sign | uint16_t((u - 0x38000000) >> 13);
#endif
}
INLINE void from_float(double x, bf16& y) { from_float(float(x), y); }
INLINE void from_float(double x, fp16& y) { from_float(float(x), y); }

// ---- a vector at a time ----

template <class A, class T> INLINE Vec<A> load(const T* p) {
    if constexpr (std::is_same_v<A, T>) return load_own(p);
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, bf16> && std::is_same_v<A, float>) {
        __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return (Vec<A>)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    if constexpr (std::is_same_v<T, fp16> && std::is_same_v<A, float>)
        return (Vec<A>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
    if constexpr (std::is_same_v<T, bf16> && std::is_same_v<A, float>) {
        __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return (Vec<A>)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    if constexpr (std::is_same_v<T, fp16> && std::is_same_v<A, float>)
        return (Vec<A>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
    A out[lanes<A>];
    for (int i = 0; i < lanes<A>; i++) out[i] = A(to_float(p[i]));
    return load_own(out);
}

// The last `count` elements of a row; the other lanes are 0.
template <class A, class T> INLINE Vec<A> load_tail(const T* p, int count) {
    A out[lanes<A>] = {};
    for (int i = 0; i < count; i++) out[i] = A(to_float(p[i]));
    return load_own(out);
}

INLINE float sum(Vec<float> v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < lanes<float>; i++) s += v[i];
    return s;
#endif
}
INLINE double sum(Vec<double> v) {
    double s = 0;
    for (int i = 0; i < lanes<double>; i++) s += v[i];
    return s;
}

template <class A> INLINE Vec<A> larger(Vec<A> a, Vec<A> b) { return a > b ? a : b; }

template <class A> constexpr A minus_infinity = -std::numeric_limits<A>::infinity();

// exp of x <= 0 (or at most a little above), 0 below -87; relative error below 2e-7 (Cephes' polynomial).
INLINE Vec<float> exp_v(Vec<float> x) {
    typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
    Vec<float> low = splat(-87.0f);
    Vec<float> y = x > low ? x : low;
    y = y < splat(88.0f) ? y : splat(88.0f);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    Vec<float> n = (y * 1.44269504088896341f + magic) - magic;
    Vec<float> r = y - n * 0.693359375f + n * 2.12194440e-4f;
    Vec<float> p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    I bits = __builtin_convertvector(n, I);
    bits = (bits + 127) << 23;
    return x > low ? p * (Vec<float>)bits : splat(0.0f);
}
INLINE Vec<double> exp_v(Vec<double> x) {
    Vec<double> y;
    for (int i = 0; i < lanes<double>; i++) y[i] = std::exp(x[i]);
    return y;
}

// tanh by exp; near 0, where 1 - 2 / (e^2x + 1) cancels, by its series. Absolute error below 2e-7.
INLINE Vec<float> tanh_v(Vec<float> x) {
    Vec<float> a = x < splat(0.0f) ? -x : x;
    Vec<float> e = exp_v(a * -2.0f);
    Vec<float> big = (1.0f - e) / (1.0f + e), s = x * x;
    big = x < splat(0.0f) ? -big : big;
    Vec<float> small = x + x * s * (s * (s * (s * 2.18694885e-2f - 5.39682540e-2f) + 1.33333333e-1f) - 3.33333333e-1f);
    return a < splat(0.3f) ? small : big;
}
INLINE Vec<double> tanh_v(Vec<double> x) {
    Vec<double> y;
    for (int i = 0; i < lanes<double>; i++) y[i] = std::tanh(x[i]);
    return y;
}
