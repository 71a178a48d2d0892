// SPDX-License-Identifier: Apache-2.0
// The loops over elements of `callgate.elementwise` kernels on the CPU.
//
// Operands are dense, with a rank of at most the result's, and are broadcast as in NumPy. At
// compile time a kernel knows which operands vary along a row, the innermost axis after axes are
// collapsed. These have stride 1 there and the others stride 0, so each row is a plain loop that
// the compiler vectorizes. Extents and outer strides are computed at run time, as is the stride
// along a row if an exported program has symbolic shapes.
#pragma once

#include "callgate/elementwise_body.h"
#include "callgate/kernel.h"

#if defined(__clang__)
#define CALLGATE_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#else
#define CALLGATE_VECTORIZE _Pragma("GCC ivdep")
#endif

// glibc's vector mathematics (libmvec): the same functions for several elements at once, to within
// 4 units in the last place. With these declarations, the compiler calls them in vectorized loops;
// glibc's own headers only declare them under -ffast-math. CALLGATE_VECTOR_MATH=0 turns them off.
#ifndef CALLGATE_VECTOR_MATH
#define CALLGATE_VECTOR_MATH 1
#endif
#if CALLGATE_VECTOR_MATH && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && \
    !defined(__clang__)
#define CALLGATE_VECTOR_FUNCTION(name)                                              \
  extern "C" __attribute__((__simd__("notinbranch"))) double name(double) noexcept; \
  extern "C" __attribute__((__simd__("notinbranch"))) float name##f(float) noexcept;
#define CALLGATE_VECTOR_FUNCTION_OF_2(name)                                                 \
  extern "C" __attribute__((__simd__("notinbranch"))) double name(double, double) noexcept; \
  extern "C" __attribute__((__simd__("notinbranch"))) float name##f(float, float) noexcept;
// clang-format off
#define CALLGATE_OF_GLIBC_2_22(X) X(cos) X(sin) X(exp) X(log)
#define CALLGATE_OF_GLIBC_2_35(X)                                                            \
  X(acos) X(acosh) X(asin) X(asinh) X(atan) X(atanh) X(cbrt) X(cosh) X(erf) X(erfc) X(exp2)  \
  X(expm1) X(log10) X(log1p) X(log2) X(sinh) X(tan) X(tanh)
// clang-format on
#if __GLIBC_PREREQ(2, 22)
CALLGATE_OF_GLIBC_2_22(CALLGATE_VECTOR_FUNCTION)
CALLGATE_VECTOR_FUNCTION_OF_2(pow)
#endif
#if __GLIBC_PREREQ(2, 35)
CALLGATE_OF_GLIBC_2_35(CALLGATE_VECTOR_FUNCTION)
CALLGATE_VECTOR_FUNCTION_OF_2(atan2)
CALLGATE_VECTOR_FUNCTION_OF_2(hypot)
#endif
#undef CALLGATE_OF_GLIBC_2_22
#undef CALLGATE_OF_GLIBC_2_35
#undef CALLGATE_VECTOR_FUNCTION
#undef CALLGATE_VECTOR_FUNCTION_OF_2
#endif

namespace callgate::elementwise {

// A `raw` argument: the whole array, converted to the type in which the code computes.
template <class Stored, class T>
class Raw {
 public:
  explicit Raw(const In<Stored>& array) : array_(array) {}
  T operator[](int64_t index) const { return static_cast<T>(array_[index]); }
  template <class... Indices>
  T operator()(Indices... indices) const {
    return static_cast<T>(array_(indices...));
  }
  int64_t size() const { return array_.size(); }
  int rank() const { return array_.rank(); }
  int64_t extent(int axis) const { return array_.extent(axis); }

 private:
  In<Stored> array_;
};

struct Shape {
  const int64_t* extents;
  int rank;
};
template <class View>
Shape shape_of(const View& view) {
  return {view.extents(), view.rank()};
}

// The position of `kCount` operands for each element of a result. Neighboring axes are merged if
// every operand continues across them as the result does, and axes of extent 1 are dropped.
template <int kCount>
class Layout {
 public:
  Layout(Shape result, const Shape (&operands)[kCount + 1]) {
    int64_t steps[kCount + 1];  // each operand's stride at the current axis, without broadcasting
    for (int64_t& step : steps) step = 1;
    for (int axis = result.rank - 1; axis >= 0; --axis) {
      int64_t extent = result.extents[axis], strides[kCount + 1] = {};
      size_ *= extent;
      for (int k = 0; k < kCount; ++k) {
        int own = axis - (result.rank - operands[k].rank);
        if (own < 0 || operands[k].extents[own] == 1) continue;
        strides[k] = steps[k];
        steps[k] *= operands[k].extents[own];
      }
      if (extent != 1) add_axis(extent, strides);
    }
  }

  int64_t size() const { return size_; }

  // An operand's stride along rows.
  int64_t step(int k) const { return axes_ > 0 ? strides_[0][k] : 0; }

  // Throws unless each operand varies along rows as `varies` states: 1, 0, or ? for either.
  void check(const char (&varies)[kCount + 1]) const {
    for (int k = 0; k < kCount; ++k)
      if (axes_ > 0 && size_ > 1 && varies[k] != '?' && (strides_[0][k] != 0) != (varies[k] == '1'))
        throw Error("operand %d lies otherwise than this variant was compiled for", k);
  }

  // Calls body(first, last) for ranges of elements, on XLA's threads and this one. Ranges begin at
  // multiples of kBlock, so vectors begin at the same elements for any number of threads.
  template <class Body>
  void split(const Context& context, const Body& body) const {
    constexpr int64_t kBlock = 1024, kBlocksAtLeast = 16;
    context.parallel_ranges(0, (size_ + kBlock - 1) / kBlock, kBlocksAtLeast,
                            [&](int64_t first, int64_t last) {
                              int64_t end = last * kBlock;
                              body(first * kBlock, end < size_ ? end : size_);
                            });
  }

  // Calls row(start, count, offsets) for each row of the elements [first, last). `offsets` has the
  // operands' positions at `start`.
  template <class Row>
  CALLGATE_INLINE void rows(int64_t first, int64_t last, const Row& row) const {
    int64_t offsets[kCount + 1] = {};
    if (axes_ <= 1) {
      for (int k = 0; k < kCount; ++k) offsets[k] = first * strides_[0][k];
      row(first, last - first, offsets);
      return;
    }
    int64_t index[kMaxAxes], bases[kCount + 1] = {};  // of the row that contains `first`
    int64_t column = first % extents_[0], rest = first / extents_[0];
    for (int axis = 1; axis < axes_; ++axis) {
      index[axis] = rest % extents_[axis];
      rest /= extents_[axis];
      for (int k = 0; k < kCount; ++k) bases[k] += index[axis] * strides_[axis][k];
    }
    while (first < last) {
      int64_t count = extents_[0] - column;
      if (count > last - first) count = last - first;
      for (int k = 0; k < kCount; ++k) offsets[k] = bases[k] + column * strides_[0][k];
      row(first, count, offsets);
      first += count;
      column = 0;
      for (int axis = 1; axis < axes_; ++axis) {
        for (int k = 0; k < kCount; ++k) bases[k] += strides_[axis][k];
        if (++index[axis] < extents_[axis]) break;
        for (int k = 0; k < kCount; ++k) bases[k] -= extents_[axis] * strides_[axis][k];
        index[axis] = 0;
      }
    }
  }

 private:
  static constexpr int kMaxAxes = 64;  // NumPy's limit

  void add_axis(int64_t extent, const int64_t (&strides)[kCount + 1]) {
    bool goes_on = axes_ > 0;
    for (int k = 0; k < kCount && goes_on; ++k)
      goes_on = strides[k] == strides_[axes_ - 1][k] * extents_[axes_ - 1];
    if (goes_on) {
      extents_[axes_ - 1] *= extent;
      return;
    }
    if (axes_ == kMaxAxes) throw Error("expected at most %d axes", kMaxAxes);
    extents_[axes_] = extent;
    for (int k = 0; k < kCount; ++k) strides_[axes_][k] = strides[k];
    ++axes_;
  }

  int axes_ = 0;
  int64_t size_ = 1;
  int64_t extents_[kMaxAxes];              // innermost first
  int64_t strides_[kMaxAxes][kCount + 1];  // in elements; 0 where an operand is broadcast
};

}  // namespace callgate::elementwise
