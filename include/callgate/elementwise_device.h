// How the kernels of `callgate.elementwise` go through their elements on CUDA: C++20, for NVRTC.
//
// Each thread takes elements a grid's width apart. What is compiled in is how each operand lies:
// `full` along the result's elements, `one` for all of them, or `strided`, broadcast along some
// axes. Where all are full or one, a thread loads and stores several neighbours at once, up to 128
// bits. The structs that a launch passes are filled in by python/callgate/_elementwise_cuda.py.
#pragma once

#ifdef __CUDACC_RTC__
// As in CUDA's own headers for NVRTC, so that both may be there.
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
namespace std {
using ::abs, ::acos, ::acosh, ::asin, ::asinh, ::atan, ::atan2, ::atanh, ::cbrt, ::ceil, ::copysign;
using ::cos, ::cosh, ::erf, ::erfc, ::exp, ::exp2, ::expm1, ::fabs, ::fdim, ::floor, ::fma, ::fmax;
using ::fmin, ::fmod, ::hypot, ::ilogb, ::isfinite, ::isinf, ::isnan, ::ldexp, ::lgamma, ::log;
using ::int16_t, ::int32_t, ::int64_t, ::int8_t, ::size_t;
using ::log10, ::log1p, ::log2, ::logb, ::lrint, ::lround, ::nearbyint, ::nextafter, ::pow;
using ::remainder, ::rint, ::round, ::signbit, ::sin, ::sinh, ::sqrt, ::tan, ::tanh, ::tgamma,
    ::trunc;
using ::uint16_t, ::uint32_t, ::uint64_t, ::uint8_t;
using callgate::elementwise::arg, callgate::elementwise::imag, callgate::elementwise::polar;
using callgate::elementwise::complex, callgate::elementwise::conj, callgate::elementwise::norm;
using callgate::elementwise::real;
}  // namespace std
#endif

#include "callgate/elementwise_body.h"

// C++20, the names that users write.
// NOLINTBEGIN(modernize-*, readability-identifier-naming, *-avoid-c-arrays)

namespace callgate {
namespace small {

// The device's conversions of float16 are instructions.
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

// Several neighbours, loaded and stored at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

// How operands lie along the result's axes, innermost first, collapsed; strides in elements, 0
// where an operand is broadcast.
template <int kAxes, int kOperands>
struct Strides {
  int64_t extents[kAxes];
  int64_t steps[kAxes][kOperands];

  // The operands' positions of the element `i`. `Whole` is wide enough for the number of elements:
  // divisions of 64 bits are slow.
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

// A `raw` argument: the whole array, as numbers of the type that the code computes in.
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
