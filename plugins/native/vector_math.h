// Functions of vectors, to within a few units in the last place: exp, log, and the activations made of them.
#pragma once
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

HT_INLINE vf vabs(vf x) { return (vf)((vu)x & 0x7fffffffu); }
HT_INLINE vf round_to_int(vf x) {  // |x| < 2^22, ties to even
  const vf magic = splat(12582912.f);
  return (x + magic) - magic;
}

// e^x: 2^n times a polynomial in the rest; 0 below -87 and infinity above 88.7. NaN stays NaN.
HT_INLINE vf vexp(vf x) {
  const vf magic = splat(12582912.f), low = splat(-87.f), high = splat(88.72283f);  // e^low is a normal number
  const vf clamped = vmin(high, vmax(low, x)), shifted = fma(clamped, splat(1.44269504088896341f), magic);
  const vf n = shifted - magic;
  vf r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.f);
  vf y = (vf)((vu)p + ((vu)shifted << 23));
  y = x < low ? splat(0.f) : y;
  y = x > high ? splat(__builtin_inff()) : y;
  return x == x ? y : x;
}

// 2^x for x <= 0: at least 2^-126. As exact near 0 as anywhere, so that a state that hardly fades does so at its rate.
HT_INLINE vf vexp2_fading(vf x) {
  const vf magic = splat(12582912.f), clamped = vmax(splat(-126.f), x), shifted = clamped + magic;
  const vf r = clamped - (shifted - magic), square = r * r;
  vf p = fma(r, splat(1.33988744e-3f), splat(9.61843736e-3f));  // not one long chain
  p = fma(square, splat(1.5353361e-4f), p);
  p = fma(square, p, fma(r, splat(5.55033247e-2f), splat(2.40226479e-1f)));
  p = fma(square, p, fma(r, splat(6.93147203e-1f), splat(1.f)));
  return (vf)((vu)p + ((vu)shifted << 23));
}

// e^x - 1 for x <= 0, to its own last places; NaN stays NaN.
HT_INLINE vf vexpm1_fading(vf x) {
  const vf clamped = vmax(splat(-80.f), x), n = round_to_int(clamped * 1.44269504088896341f);
  vf r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  const vf y = fma(p, r * r, r), power = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
  return fma(power, y, power - 1.f);
}

// log(1 + x) for x in [0, 1]: 2 artanh(x / (2 + x)), to its own last places.
HT_INLINE vf vlog1p(vf x) {
  const vf s = x / (x + 2.f), z = s * s;
  vf p = splat(0.280119844f);
  p = fma(p, z, splat(0.280018058f));
  p = fma(p, z, splat(0.400215272f));
  p = fma(p, z, splat(0.666664163f));
  return s * fma(p, z, splat(2.f));
}

HT_INLINE vf vsoftplus(vf x) { return vmax(x, splat(0.f)) + vlog1p(vexp(-vabs(x))); }
HT_INLINE vf vsigmoid(vf x) { return 1.f / (1.f + vexp(-x)); }
HT_INLINE vf vtanh(vf x) {
  const vf a = vabs(x), e = vexp(a * -2.f), s = a * a;
  // near 0 the quotient cancels: a polynomial there
  vf p = splat(-5.70498872745e-3f);
  p = fma(p, s, splat(2.06390887954e-2f));
  p = fma(p, s, splat(-5.37397155531e-2f));
  p = fma(p, s, splat(1.33314422036e-1f));
  p = fma(p, s, splat(-3.33332819422e-1f));
  const vf y = a < splat(0.625f) ? fma(p * s, a, a) : (1.f - e) / (1.f + e);
  const vf signed_y = (vf)((vu)y | ((vu)x & 0x80000000u));
  return x == x ? signed_y : x;
}
// What a product of two numbers lost when it was rounded to p.
HT_INLINE vf rest_of_product(vf a, vf b, vf p) {
#if defined(__FMA__)
  return fma(a, b, -p);
#else  // the products of their halves are exact
  const vf a_high = (vf)((vu)a & 0xfffff000u), a_low = a - a_high;
  const vf b_high = (vf)((vu)b & 0xfffff000u), b_low = b - b_high;
  return ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low;
#endif
}

// x Phi(x), Phi being the normal distribution: its tail is e^(-x^2 / 2) times a polynomial in 1 / (1 + 0.35 |x|) that was
// fitted to 4e-8. Small results are as exact as large ones.
HT_INLINE vf vgelu(vf x) {
  const vf a = vmin(splat(14.f), vabs(x)), h = a * a, t = 1.f / fma(a, splat(0.35f), splat(1.f));
  vf p = splat(-0.0295596953f);
  p = fma(p, t, splat(0.145926533f));
  p = fma(p, t, splat(-0.25961644f));
  p = fma(p, t, splat(0.163455832f));
  p = fma(p, t, splat(-0.0259220903f));
  p = fma(p, t, splat(0.106634999f));
  p = fma(p, t, splat(0.119565024f));
  p = fma(p, t, splat(0.139896234f));
  p = fma(p, t, splat(0.139619585f));
  const vf e = vexp(-0.5f * h), tail = p * t * fma(e * -0.5f, rest_of_product(a, a, h), e);
  return x * (x < splat(0.f) ? tail : 1.f - tail);
}

// x / (1 + e^-u) with u = 2 sqrt(2 / pi) (x + 0.044715 x^3) to twice the digits, as a large u would lose them.
HT_INLINE vf vgelu_tanh(vf x) {
  const vf one = splat(1.59576912f), cube = splat(0.0713548133f);  // and what these lack
  const float one_rest = -4.53406803e-8f, cube_rest = 2.39883240e-9f;
  const vf a = vmax(splat(-14.f), vmin(splat(14.f), x)), square = a * a, term = cube * square, sum = one + term;
  const vf part = sum - one;
  vf rest = (one - (sum - part)) + (term - part) + rest_of_product(cube, square, term);
  rest += cube * rest_of_product(a, a, square) + square * cube_rest + one_rest;
  const vf u = a * sum, e = vexp(-u);
  return x / (1.f + e * (1.f - (rest_of_product(a, sum, u) + a * rest)));
}

// In the order of pointwise.ACTIVATIONS; SWIGLU_OAI only where there is a gate.
enum Activation { GELU, GELU_TANH, RELU2, SIGMOID, SILU, TANH, SWIGLU_OAI };

HT_INLINE vf activate(vf x, int kind) {
  switch (kind) {
    case GELU: return vgelu(x);
    case GELU_TANH: return vgelu_tanh(x);
    case RELU2: {
      const vf y = x < splat(0.f) ? splat(0.f) : x;
      return y * y;
    }
    case SIGMOID: return vsigmoid(x);
    case SILU: return x * vsigmoid(x);
    default: return vtanh(x);
  }
}

// act(gate_scale * gate) * up; SWIGLU_OAI: (up + 1) * gate * sigmoid(1.702 * gate).
HT_INLINE vf gated(vf gate, vf up, int kind) {
  if (kind == SWIGLU_OAI) return (up + 1.f) * gate * vsigmoid(gate * 1.702f);
  return activate(gate, kind) * up;
}

// One number by way of the vectors, so that the end of a row is computed like its middle.
HT_INLINE float exp1(float x) { return vexp(splat(x))[0]; }
HT_INLINE float softplus1(float x) { return vsoftplus(splat(x))[0]; }
HT_INLINE float sigmoid1(float x) { return vsigmoid(splat(x))[0]; }

}  // namespace HT_ISA
}  // namespace hybridtrt
