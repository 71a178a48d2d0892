// SPDX-License-Identifier: Apache-2.0
// The language of `callgate.elementwise`: the names that an element's code can use beyond C++.
//
// This header doesn't depend on the loop, its order or the device. The same text is compiled for
// the CPU (callgate/elementwise.h) and for CUDA.
#pragma once

#ifndef __CUDACC_RTC__  // NVRTC has these built in, and no standard library
#include <math.h>       // the C++ library's: overloads for each floating type, also globally
#include <stdlib.h>     // abs, as above

#include <cstdint>
#endif

#if defined(__CUDACC__)
#define CALLGATE_FUNCTION __device__ __forceinline__
#define CALLGATE_INLINE
#else
#define CALLGATE_FUNCTION inline
#define CALLGATE_INLINE __attribute__((always_inline))
#endif

namespace callgate::elementwise {

// `_ind` in the code of an element.
class Index {
 public:
  CALLGATE_FUNCTION explicit Index(std::int64_t size) : size_(size) {}
  CALLGATE_FUNCTION std::int64_t size() const { return size_; }

 private:
  std::int64_t size_;
};

// The greater of two numbers, also of different types; NaN if one is NaN, as in NumPy and JAX.
template <class A, class B>
CALLGATE_FUNCTION constexpr auto max(A a, B b) -> decltype(true ? A() : B()) {
  const decltype(true ? A() : B()) x = a, y = b;
  return x > y || x != x ? x : y;
}
template <class A, class B>
CALLGATE_FUNCTION constexpr auto min(A a, B b) -> decltype(true ? A() : B()) {
  const decltype(true ? A() : B()) x = a, y = b;
  return x < y || x != x ? x : y;
}

#if defined(CALLGATE_ELEMENTWISE_COMPLEX) && !defined(__CUDACC__)
// Operators of complex numbers with numbers of any type; the library has them only for equal types.
#define CALLGATE_COMPLEX_OPERATOR(op)                                 \
  template <class T, class U>                                         \
    requires(std::is_arithmetic_v<U> && !std::is_same_v<T, U>)        \
  CALLGATE_FUNCTION auto operator op(const std::complex<T>& a, U b) { \
    return a op static_cast<T>(b);                                    \
  }                                                                   \
  template <class T, class U>                                         \
    requires(std::is_arithmetic_v<U> && !std::is_same_v<T, U>)        \
  CALLGATE_FUNCTION auto operator op(U a, const std::complex<T>& b) { \
    return static_cast<T>(a) op b;                                    \
  }
CALLGATE_COMPLEX_OPERATOR(+)
CALLGATE_COMPLEX_OPERATOR(-)
CALLGATE_COMPLEX_OPERATOR(*)
CALLGATE_COMPLEX_OPERATOR(/)
CALLGATE_COMPLEX_OPERATOR(==)
CALLGATE_COMPLEX_OPERATOR(!=)
#undef CALLGATE_COMPLEX_OPERATOR
#endif

// Stands for `dx` in the code of a derivative: a multiple of the one tangent under consideration.
// Only expressions that are linear in tangents compile. A zero tangent stays zero for any factor,
// so an infinite factor of one argument doesn't spoil another argument's derivative.
template <class T>
class Tangent {
 public:
  Tangent() = default;
  CALLGATE_FUNCTION Tangent(decltype(nullptr)) {}  // NOLINT: the literal 0
  CALLGATE_FUNCTION explicit Tangent(T factor) : factor_(factor), zero_(false) {}
  template <class U>
  CALLGATE_FUNCTION Tangent(const Tangent<U>& other)  // NOLINT: as numbers convert
      : factor_(static_cast<T>(other.factor())), zero_(other.zero()) {}

  CALLGATE_FUNCTION T factor() const { return zero_ ? T() : factor_; }
  CALLGATE_FUNCTION bool zero() const { return zero_; }

  template <class U>
  CALLGATE_FUNCTION Tangent& operator+=(const Tangent<U>& other) {
    return *this = *this + other;
  }
  template <class U>
  CALLGATE_FUNCTION Tangent& operator-=(const Tangent<U>& other) {
    return *this = *this - other;
  }
  template <class A>
  CALLGATE_FUNCTION Tangent& operator*=(const A& factor) {
    return *this = *this * factor;
  }
  template <class A>
  CALLGATE_FUNCTION Tangent& operator/=(const A& divisor) {
    return *this = *this / divisor;
  }

 private:
  T factor_ = T();
  bool zero_ = true;
};

template <class T>
CALLGATE_FUNCTION Tangent<T> operator+(const Tangent<T>& a) {
  return a;
}
template <class T>
CALLGATE_FUNCTION Tangent<T> operator-(const Tangent<T>& a) {
  return a.zero() ? a : Tangent<T>(static_cast<T>(-a.factor()));
}
template <class T, class U>
CALLGATE_FUNCTION auto operator+(const Tangent<T>& a, const Tangent<U>& b)
    -> Tangent<decltype(T() + U())> {
  using Sum = Tangent<decltype(T() + U())>;
  return a.zero() ? Sum(b) : b.zero() ? Sum(a) : Sum(a.factor() + b.factor());
}
template <class T, class U>
CALLGATE_FUNCTION auto operator-(const Tangent<T>& a, const Tangent<U>& b)
    -> Tangent<decltype(T() + U())> {
  return a + -b;
}
template <class T, class A>
CALLGATE_FUNCTION auto operator*(const Tangent<T>& a, const A& b) -> Tangent<decltype(T() * b)> {
  using Product = Tangent<decltype(T() * b)>;
  return a.zero() ? Product() : Product(a.factor() * b);
}
template <class T, class A>
CALLGATE_FUNCTION auto operator*(const A& a, const Tangent<T>& b) -> Tangent<decltype(a * T())> {
  using Product = Tangent<decltype(a * T())>;
  return b.zero() ? Product() : Product(a * b.factor());
}
template <class T, class A>
CALLGATE_FUNCTION auto operator/(const Tangent<T>& a, const A& b) -> Tangent<decltype(T() / b)> {
  using Quotient = Tangent<decltype(T() / b)>;
  return a.zero() ? Quotient() : Quotient(a.factor() / b);
}
// Not linear.
template <class T, class U>
void operator*(const Tangent<T>& a, const Tangent<U>& b) = delete;
template <class T, class U>
void operator/(const Tangent<T>& a, const Tangent<U>& b) = delete;
template <class T, class A>
void operator/(const A& a, const Tangent<T>& b) = delete;

}  // namespace callgate::elementwise
