// SPDX-License-Identifier: Apache-2.0
// Complex numbers for the kernels of `callgate.elementwise` on CUDA, whose run-time compiler has no
// standard library. They have the layout and meaning of std::complex on the CPU.
//
// Products and quotients use the plain formulas, as XLA and the CPU's kernels do.
#pragma once

// C++20, the names that users write.
// NOLINTBEGIN(modernize-*, readability-identifier-naming)

#ifndef CALLGATE_COMPLEX_FUNCTION
#define CALLGATE_COMPLEX_FUNCTION __host__ __device__ __forceinline__
#endif

namespace callgate::elementwise {

template <class T>
struct IsReal {
  static constexpr bool value = false;
};
#define CALLGATE_REAL(type)             \
  template <>                           \
  struct IsReal<type> {                 \
    static constexpr bool value = true; \
  };
CALLGATE_REAL(bool)
CALLGATE_REAL(signed char)
CALLGATE_REAL(unsigned char)
CALLGATE_REAL(char)
CALLGATE_REAL(short)
CALLGATE_REAL(unsigned short)
CALLGATE_REAL(int)
CALLGATE_REAL(unsigned)
CALLGATE_REAL(long)
CALLGATE_REAL(unsigned long)
CALLGATE_REAL(long long)
CALLGATE_REAL(unsigned long long)
CALLGATE_REAL(float)
CALLGATE_REAL(double)
#undef CALLGATE_REAL

template <class T>
class alignas(2 * sizeof(T)) complex {
 public:
  using value_type = T;

  complex() = default;
  CALLGATE_COMPLEX_FUNCTION constexpr complex(T real, T imag = T())  // NOLINT: as numbers convert
      : real_(real), imag_(imag) {}
  template <class U>
    requires(IsReal<U>::value)
  CALLGATE_COMPLEX_FUNCTION constexpr complex(U real)  // NOLINT
      : real_(static_cast<T>(real)), imag_(T()) {}
  template <class U>
  CALLGATE_COMPLEX_FUNCTION constexpr complex(const complex<U>& other)  // NOLINT
      : real_(static_cast<T>(other.real())), imag_(static_cast<T>(other.imag())) {}

  CALLGATE_COMPLEX_FUNCTION constexpr T real() const { return real_; }
  CALLGATE_COMPLEX_FUNCTION constexpr T imag() const { return imag_; }
  CALLGATE_COMPLEX_FUNCTION void real(T value) { real_ = value; }
  CALLGATE_COMPLEX_FUNCTION void imag(T value) { imag_ = value; }

  template <class U>
  CALLGATE_COMPLEX_FUNCTION complex& operator+=(const U& other) {
    return *this = *this + other;
  }
  template <class U>
  CALLGATE_COMPLEX_FUNCTION complex& operator-=(const U& other) {
    return *this = *this - other;
  }
  template <class U>
  CALLGATE_COMPLEX_FUNCTION complex& operator*=(const U& other) {
    return *this = *this * other;
  }
  template <class U>
  CALLGATE_COMPLEX_FUNCTION complex& operator/=(const U& other) {
    return *this = *this / other;
  }

 private:
  T real_ = T();
  T imag_ = T();
};

template <class T>
CALLGATE_COMPLEX_FUNCTION complex<T> operator+(const complex<T>& a) {
  return a;
}
template <class T>
CALLGATE_COMPLEX_FUNCTION complex<T> operator-(const complex<T>& a) {
  return {-a.real(), -a.imag()};
}
template <class T>
CALLGATE_COMPLEX_FUNCTION complex<T> operator+(const complex<T>& a, const complex<T>& b) {
  return {a.real() + b.real(), a.imag() + b.imag()};
}
template <class T>
CALLGATE_COMPLEX_FUNCTION complex<T> operator-(const complex<T>& a, const complex<T>& b) {
  return {a.real() - b.real(), a.imag() - b.imag()};
}
template <class T>
CALLGATE_COMPLEX_FUNCTION complex<T> operator*(const complex<T>& a, const complex<T>& b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}
// Divides by the larger part of the divisor, so that its square doesn't overflow.
template <class T>
CALLGATE_COMPLEX_FUNCTION complex<T> operator/(const complex<T>& a, const complex<T>& b) {
  if (fabs(b.real()) >= fabs(b.imag())) {
    const T ratio = b.imag() / b.real(), scale = T(1) / (b.real() + b.imag() * ratio);
    return {(a.real() + a.imag() * ratio) * scale, (a.imag() - a.real() * ratio) * scale};
  }
  const T ratio = b.real() / b.imag(), scale = T(1) / (b.real() * ratio + b.imag());
  return {(a.real() * ratio + a.imag()) * scale, (a.imag() * ratio - a.real()) * scale};
}
template <class T>
CALLGATE_COMPLEX_FUNCTION bool operator==(const complex<T>& a, const complex<T>& b) {
  return a.real() == b.real() && a.imag() == b.imag();
}
template <class T>
CALLGATE_COMPLEX_FUNCTION bool operator!=(const complex<T>& a, const complex<T>& b) {
  return !(a == b);
}

// Operators with numbers of any type.
#define CALLGATE_WITH_REAL(op, real_right, real_left)                        \
  template <class T, class U>                                                \
    requires(IsReal<U>::value)                                               \
  CALLGATE_COMPLEX_FUNCTION auto operator op(const complex<T>& a, U given) { \
    const T b = static_cast<T>(given);                                       \
    return real_right;                                                       \
  }                                                                          \
  template <class T, class U>                                                \
    requires(IsReal<U>::value)                                               \
  CALLGATE_COMPLEX_FUNCTION auto operator op(U given, const complex<T>& b) { \
    const T a = static_cast<T>(given);                                       \
    return real_left;                                                        \
  }
CALLGATE_WITH_REAL(+, (complex<T>(a.real() + b, a.imag())), (complex<T>(a + b.real(), b.imag())))
CALLGATE_WITH_REAL(-, (complex<T>(a.real() - b, a.imag())), (complex<T>(a - b.real(), -b.imag())))
CALLGATE_WITH_REAL(*, (complex<T>(a.real() * b, a.imag() * b)),
                   (complex<T>(a * b.real(), a* b.imag())))
CALLGATE_WITH_REAL(/, (complex<T>(a.real() / b, a.imag() / b)), (complex<T>(a) / b))
CALLGATE_WITH_REAL(==, (a.real() == b && a.imag() == T()), (a == b.real() && b.imag() == T()))
CALLGATE_WITH_REAL(!=, !(a.real() == b && a.imag() == T()), !(a == b.real() && b.imag() == T()))
#undef CALLGATE_WITH_REAL

#define CALLGATE_OF_COMPLEX(result, name, ...)                 \
  template <class T>                                           \
  CALLGATE_COMPLEX_FUNCTION result name(const complex<T>& z) { \
    const T x = z.real(), y = z.imag();                        \
    (void)x, (void)y;                                          \
    __VA_ARGS__                                                \
  }
CALLGATE_OF_COMPLEX(T, real, return x;)
CALLGATE_OF_COMPLEX(T, imag, return y;)
CALLGATE_OF_COMPLEX(T, abs, return ::hypot(x, y);)
CALLGATE_OF_COMPLEX(T, arg, return ::atan2(y, x);)
CALLGATE_OF_COMPLEX(T, norm, return x * x + y * y;)
CALLGATE_OF_COMPLEX(complex<T>, conj, return complex<T>(x, -y);)
CALLGATE_OF_COMPLEX(complex<T>, exp, const T e = ::exp(x);
                    return complex<T>(e * ::cos(y), y == T() ? y : e * ::sin(y));)
CALLGATE_OF_COMPLEX(complex<T>, log, return complex<T>(::log(::hypot(x, y)), ::atan2(y, x));)
CALLGATE_OF_COMPLEX(complex<T>, log10, return log(z) * T(0.43429448190325182765);)
CALLGATE_OF_COMPLEX(complex<T>, sinh,
                    return complex<T>(::sinh(x) * ::cos(y), ::cosh(x) * ::sin(y));)
CALLGATE_OF_COMPLEX(complex<T>, cosh,
                    return complex<T>(::cosh(x) * ::cos(y), ::sinh(x) * ::sin(y));)
CALLGATE_OF_COMPLEX(complex<T>, sin, return complex<T>(::sin(x) * ::cosh(y), ::cos(x) * ::sinh(y));)
CALLGATE_OF_COMPLEX(complex<T>, cos,
                    return complex<T>(::cos(x) * ::cosh(y), -::sin(x) * ::sinh(y));)
// If the exponentials would overflow, the result is the sign.
CALLGATE_OF_COMPLEX(
    complex<T>, tanh,
    if (::fabs(x) > T(20)) {
      const T e = ::exp(-T(2) * ::fabs(x));
      return complex<T>(::copysign(T(1), x), T(4) * ::sin(y) * ::cos(y) * e);
    } const T t = ::tan(y),
    s = ::sinh(x), c = T(1) + t * t, b = s * s * c, r = ::sqrt(T(1) + s * s);
    return complex<T>(c * r * s / (T(1) + b), t / (T(1) + b));)
CALLGATE_OF_COMPLEX(complex<T>, tan, const complex<T> w = tanh(complex<T>(-y, x));
                    return complex<T>(w.imag(), -w.real());)
CALLGATE_OF_COMPLEX(complex<T>, sqrt, if (x == T() && y == T()) return complex<T>(T(), y);
                    const T t = ::sqrt((::fabs(x) + ::hypot(x, y)) * T(0.5));
                    return x >= T() ? complex<T>(t, y / (T(2) * t))
                                    : complex<T>(::fabs(y) / (T(2) * t), ::copysign(t, y));)
#undef CALLGATE_OF_COMPLEX

template <class T>
CALLGATE_COMPLEX_FUNCTION complex<T> polar(T radius, T angle = T()) {
  return {radius * ::cos(angle), radius * ::sin(angle)};
}
template <class T>
CALLGATE_COMPLEX_FUNCTION complex<T> pow(const complex<T>& a, const complex<T>& b) {
  return a == complex<T>() ? complex<T>(b == complex<T>() ? T(1) : T()) : exp(b * log(a));
}
template <class T, class U>
  requires(IsReal<U>::value)
CALLGATE_COMPLEX_FUNCTION complex<T> pow(const complex<T>& a, U b) {
  return pow(a, complex<T>(b));
}
template <class T, class U>
  requires(IsReal<U>::value)
CALLGATE_COMPLEX_FUNCTION complex<T> pow(U a, const complex<T>& b) {
  return pow(complex<T>(a), b);
}

}  // namespace callgate::elementwise

// NOLINTEND(modernize-*, readability-identifier-naming)
