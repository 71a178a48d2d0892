// SPDX-License-Identifier: Apache-2.0
// The loops over elements of `callgate.elementwise` kernels on CUDA: C++20, for NVRTC.
//
// Each thread processes elements that are a grid's width apart. Each operand's access is fixed at
// compile time: `full` along the result's elements, `one` for all elements, or `strided` if it is
// broadcast along some axes. If all operands are full or one, a thread loads and stores several
// neighbors at once, up to 128 bits. python/callgate/_kernel/elementwise/cuda.py fills in the
// structs that a launch passes.
#pragma once

#ifdef __CUDACC_RTC__
// As in CUDA's own headers for NVRTC, so both headers can be included.
typedef signed char int8_t;
typedef signed short int16_t;
typedef signed int int32_t;
typedef signed long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned long size_t;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#ifndef M_PI
#define M_PI 3.14159265358979323846
#define M_E 2.7182818284590452354
#define M_LN2 0.69314718055994530942
#define M_SQRT2 1.41421356237309504880
#endif
#endif

#include "callgate/complex_device.h"
#include "callgate/small_floats.h"

#ifdef __CUDACC_RTC__
// NVRTC's functions take float and double; those of C++ also take integers, as doubles.
namespace callgate::elementwise {
template <class T>
struct IsFloating {
  static constexpr bool value = false;
};
template <>
struct IsFloating<float> {
  static constexpr bool value = true;
};
template <>
struct IsFloating<double> {
  static constexpr bool value = true;
};
template <class A, class B>
struct IsSame {
  static constexpr bool value = false;
};
template <class A>
struct IsSame<A, A> {
  static constexpr bool value = true;
};
// clang-format off
#define CALLGATE_UNARY_FUNCTIONS(X)                                                             \
  X(acos) X(acosh) X(asin) X(asinh) X(atan) X(atanh) X(cbrt) X(ceil) X(cos) X(cosh) X(erf)      \
  X(erfc) X(exp) X(exp2) X(expm1) X(fabs) X(floor) X(lgamma) X(log) X(log10) X(log1p) X(log2)   \
  X(rint) X(round) X(sin) X(sinh) X(sqrt) X(tan) X(tanh) X(tgamma) X(trunc)
#define CALLGATE_BINARY_FUNCTIONS(X)                                                            \
  X(atan2) X(copysign) X(fdim) X(fmax) X(fmin) X(fmod) X(hypot) X(nextafter) X(pow) X(remainder)
// clang-format on
#define CALLGATE_OF_WHOLE(name)                         \
  template <class T>                                    \
    requires(IsReal<T>::value && !IsFloating<T>::value) \
  __device__ __forceinline__ double name(T value) {     \
    return ::name(static_cast<double>(value));          \
  }
#define CALLGATE_OF_MIXED(name)                                    \
  template <class A, class B>                                      \
    requires(IsReal<A>::value && IsReal<B>::value &&               \
             !(IsFloating<A>::value && IsSame<A, B>::value))       \
  __device__ __forceinline__ double name(A a, B b) {               \
    return ::name(static_cast<double>(a), static_cast<double>(b)); \
  }
CALLGATE_UNARY_FUNCTIONS(CALLGATE_OF_WHOLE)
CALLGATE_BINARY_FUNCTIONS(CALLGATE_OF_MIXED)
#undef CALLGATE_OF_WHOLE
#undef CALLGATE_OF_MIXED
}  // namespace callgate::elementwise

namespace std {
using ::abs, ::fma, ::ilogb, ::isfinite, ::isinf, ::isnan, ::ldexp, ::logb, ::lrint, ::lround;
using ::int16_t, ::int32_t, ::int64_t, ::int8_t, ::size_t;
using ::nearbyint, ::signbit, ::uint16_t, ::uint32_t, ::uint64_t, ::uint8_t;
using callgate::elementwise::abs, callgate::elementwise::arg, callgate::elementwise::complex;
using callgate::elementwise::conj, callgate::elementwise::imag, callgate::elementwise::norm;
using callgate::elementwise::polar, callgate::elementwise::real;
#define CALLGATE_IN_STD(name) using ::name, callgate::elementwise::name;
CALLGATE_UNARY_FUNCTIONS(CALLGATE_IN_STD)
CALLGATE_BINARY_FUNCTIONS(CALLGATE_IN_STD)
#undef CALLGATE_IN_STD
}  // namespace std
#undef CALLGATE_UNARY_FUNCTIONS
#undef CALLGATE_BINARY_FUNCTIONS
#endif

#include "callgate/elementwise_body.h"

// C++20, the names that users write.
// NOLINTBEGIN(modernize-*, readability-identifier-naming, *-avoid-c-arrays)

namespace callgate {
namespace small {

// The device has instructions for the conversions of float16.
#ifdef __CUDA_ARCH__
class float16 {
 public:
  float16() = default;
  __device__ __forceinline__ float16(float value) {  // NOLINT: implicit, as float itself
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits_) : "f"(value));
  }
  __device__ __forceinline__ operator float() const {  // NOLINT
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits_));
    return value;
  }

 private:
  uint16_t bits_;
};
#endif

}  // namespace small

namespace elementwise {

// Several neighboring elements, loaded and stored at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

// The operands' strides along the result's collapsed axes, innermost first, in elements; 0 where an
// operand is broadcast.
template <int kAxes, int kOperands>
struct Strides {
  int64_t extents[kAxes];
  int64_t steps[kAxes][kOperands];

  // The operands' positions for the element `i`. `Whole` is just wide enough for the number of
  // elements, because 64-bit divisions are slow.
  template <class Whole>
  __device__ __forceinline__ void place(int64_t i, int64_t (&offsets)[kOperands]) const {
    Whole rest = static_cast<Whole>(i);
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offsets[k] = 0;
#pragma unroll
    for (int axis = 0; axis < kAxes; ++axis) {
      const Whole extent = static_cast<Whole>(extents[axis]);
      const Whole next = axis + 1 < kAxes ? rest / extent : 0;
      const Whole index = axis + 1 < kAxes ? rest - next * extent : rest;
#pragma unroll
      for (int k = 0; k < kOperands; ++k)
        offsets[k] += static_cast<int64_t>(index) * steps[axis][k];
      rest = next;
    }
  }
};

// A `raw` argument: the whole array, converted to the type in which the code computes.
template <class Stored, class T, int kRank>
struct Raw {
  const Stored* data;
  int64_t extents[kRank == 0 ? 1 : kRank];

  __device__ __forceinline__ T operator[](int64_t index) const {
    return static_cast<T>(data[index]);
  }
  template <class... Index>
  __device__ __forceinline__ T operator()(Index... index) const {
    static_assert(sizeof...(Index) == kRank, "an index for each axis");
    int64_t position = 0;
    int axis = 0;
    ((position = position * extents[axis] + static_cast<int64_t>(index), ++axis), ...);
    return static_cast<T>(data[position]);
  }
  __device__ __forceinline__ int64_t size() const {
    int64_t size = 1;
    for (int axis = 0; axis < kRank; ++axis) size *= extents[axis];
    return size;
  }
  __device__ __forceinline__ static constexpr int rank() { return kRank; }
  __device__ __forceinline__ int64_t extent(int axis) const { return extents[axis]; }
};

__device__ __forceinline__ int64_t first_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t threads() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

}  // namespace elementwise
}  // namespace callgate

// NOLINTEND(modernize-*, readability-identifier-naming, *-avoid-c-arrays)
