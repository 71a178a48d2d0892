// SPDX-License-Identifier: Apache-2.0
// Kernels for CUDA see this of callgate: views of arrays, by value. CUDA C++17; nvcc and NVRTC.
//
//   #include "callgate/kernel.h"   // which is this header where it is compiled for a device
//
//   __global__ void saxpy(float a, cg::In<float, 1> x, cg::In<float, 1> y, cg::Out<float, 1> z) {
//     int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
//     if (i < z.size()) z[i] = a * x[i] + y[i];
//   }
//
// A view is a pointer and the array's extents, dense and row-major, of a rank that is a number:
// `x[i]` is the i-th element in memory order, `x(i, j)` the one at an index. Both are checked where
// CALLGATE_BOUNDS_CHECK is 1, and an index outside then ends the kernel. The layout is part of
// callgate's interface: python/callgate/_kernel/cuda/part.py fills it in.
//
// This header stands alone: no standard library, which NVRTC does not have.
#pragma once

#ifndef __CUDACC__
#error \
    "callgate/kernel_device.h is for CUDA's compilers; kernels for the CPU take callgate/kernel.h"
#endif

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
#else
#include <stdint.h>
#include <stdio.h>
#endif

#ifndef CALLGATE_BOUNDS_CHECK
#define CALLGATE_BOUNDS_CHECK 0
#endif

#define CALLGATE_DEVICE __host__ __device__ __forceinline__

// NOLINTBEGIN(modernize-*, readability-identifier-naming, *-avoid-c-arrays)
namespace callgate {
inline namespace device_v1 {

// The floating-point types that C++ lacks, if CUDA's header of them is included before this one.
#ifdef __CUDA_FP16_TYPES_EXIST__
using float16 = __half;
#endif
#ifdef __CUDA_BF16_TYPES_EXIST__
using bfloat16 = __nv_bfloat16;
#endif
#ifdef __CUDA_FP8_TYPES_EXIST__
using float8_e4m3fn = __nv_fp8_e4m3;
using float8_e5m2 = __nv_fp8_e5m2;
#endif

namespace detail {

CALLGATE_DEVICE void check_index(int64_t index, int axis, int64_t extent) {
#if CALLGATE_BOUNDS_CHECK
  if (index >= 0 && index < extent) return;
  printf("callgate: index %lld of axis %d is outside [0, %lld)\n", (long long)index, axis,
         (long long)extent);
#ifdef __CUDA_ARCH__
  __trap();
#endif
#else
  (void)index, (void)axis, (void)extent;
#endif
}

template <int kRank>
struct Extents {
  int64_t values[kRank];
  CALLGATE_DEVICE int64_t operator[](int axis) const { return values[axis]; }
};
// C++ has no arrays of length 0, and an empty base takes no space.
template <>
struct Extents<0> {
  CALLGATE_DEVICE int64_t operator[](int) const { return 1; }
};

template <class T>
struct WithoutConst {
  using type = T;
};
template <class T>
struct WithoutConst<const T> {
  using type = T;
};

// The pointer comes first, as a base, and then the extents: the layout that callgate fills in.
template <class T>
struct Pointer {
  T* pointer;
};

template <class T, int kRank>
struct View : Pointer<T>, Extents<kRank> {
  static_assert(kRank >= 0, "views in device code have a rank that is a number: cg::In<float, 2>");
  using value_type = typename WithoutConst<T>::type;

  CALLGATE_DEVICE T* data() const { return this->pointer; }
  CALLGATE_DEVICE static constexpr int rank() { return kRank; }
  CALLGATE_DEVICE int64_t extent(int axis) const {
    check_index(axis, -1, kRank);
    return dims()[axis];
  }
  // The distance from one index of the axis to the next, in elements.
  CALLGATE_DEVICE int64_t stride(int axis) const {
    int64_t stride = 1;
    for (int i = kRank - 1; i > axis; --i) stride *= dims()[i];
    return stride;
  }
  CALLGATE_DEVICE int64_t size() const {
    int64_t size = 1;
    for (int i = 0; i < kRank; ++i) size *= dims()[i];
    return size;
  }
  CALLGATE_DEVICE bool empty() const { return size() == 0; }
  CALLGATE_DEVICE T* begin() const { return data(); }
  CALLGATE_DEVICE T* end() const { return data() + size(); }

  CALLGATE_DEVICE T& operator[](int64_t index) const {
#if CALLGATE_BOUNDS_CHECK
    check_index(index, -1, size());
#endif
    return data()[index];
  }
  template <class... Index>
  CALLGATE_DEVICE T& operator()(Index... index) const {
    static_assert(sizeof...(Index) == kRank, "an index for each axis");
    int64_t position = 0;
    int axis = 0;
    ((check_index(int64_t(index), axis, dims()[axis]),
      position = position * dims()[axis] + int64_t(index), ++axis),
     ...);
    return data()[position];
  }

 private:
  CALLGATE_DEVICE const Extents<kRank>& dims() const { return *this; }
};
static_assert(sizeof(View<float, 0>) == 8 && sizeof(View<float, 3>) == 32, "the layout");

}  // namespace detail

// In: an operand, read-only. Out: a result to write. InOut: an operand and a result in one memory.
template <class T, int Rank>
struct In : detail::View<const T, Rank> {};
template <class T, int Rank>
struct Out : detail::View<T, Rank> {};
template <class T, int Rank>
struct InOut : detail::View<T, Rank> {};

}  // namespace device_v1
}  // namespace callgate

#ifndef CALLGATE_NO_CG  // for sources that use the name `cg` themselves
namespace cg = callgate;
#endif
// NOLINTEND(modernize-*, readability-identifier-naming, *-avoid-c-arrays)
