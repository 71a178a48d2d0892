// SPDX-License-Identifier: Apache-2.0
// The pieces of callgate.cfunc's glue beside kernel.h: they stand at the head of each generated
// source (_kernel/c/glue.py). C++20.
//
// C's complex numbers are GNU's `double _Complex`, whose calling convention is C's; in arrays they
// are pairs.
#pragma once

#include "callgate/kernel.h"

namespace {

template <class T>
struct pair {
  T real, imag;
};

// --- Values --------------------------------------------------------------------------------------

// An element of an array as C's type: C's own conversion.
template <class To, class From>
To load(const From& value) {
  return static_cast<To>(value);
}
template <class To, class Part>
To load(const pair<Part>& value) {
  To result = 0;
  __real__ result = value.real;
  __imag__ result = value.imag;
  return result;
}

template <class To, class From>
void store(To& to, From value) {
  to = static_cast<To>(value);
}
template <class Part, class From>
void store(pair<Part>& to, From value) {
  to = {static_cast<Part>(__real__ value), static_cast<Part>(__imag__ value)};
}

// Integers as Python has them: the quotient is rounded down.
inline int64_t floor_divide(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
inline int64_t floor_modulo(int64_t a, int64_t b) { return a - b * floor_divide(a, b); }
inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }
inline int64_t smaller(int64_t a, int64_t b) { return b < a ? b : a; }

// Extent of an axis, which is counted from the end when it is negative.
template <class View>
int64_t extent(const View& view, int axis) {
  return view.extents()[axis < 0 ? axis + view.rank() : axis];
}

// A pointer of the type that C takes. The user's declaration tells if C writes there.
template <class To, class From>
To* pointer(From* from) {
  return reinterpret_cast<To*>(const_cast<std::remove_const_t<From>*>(from));
}

// --- Memory order --------------------------------------------------------------------------------

// Copies a dense array with its axes in reverse order: row-major to column-major, or back. `dims`
// are those of `from`, outermost first.
template <class T>
void reverse_axes(const T* from, T* to, const int64_t* dims, int rank) {
  if (rank == 2) {
    // In blocks, so that both sides stay in the cache.
    constexpr int64_t kBlock = 16;
    const int64_t rows = dims[0], columns = dims[1];
    for (int64_t i = 0; i < rows; i += kBlock)
      for (int64_t j = 0; j < columns; j += kBlock)
        for (int64_t k = i; k < smaller(i + kBlock, rows); ++k)
          for (int64_t l = j; l < smaller(j + kBlock, columns); ++l)
            to[l * rows + k] = from[k * columns + l];
    return;
  }
  int64_t outer = rank > 0 ? dims[0] : 1, inner = 1;
  for (int axis = 1; axis < rank; ++axis) inner *= dims[axis];
  if (rank < 2 || inner == 0) {
    for (int64_t i = 0; i < outer * inner; ++i) to[i] = from[i];
    return;
  }
  // Axis 0 becomes the innermost: each step along it moves by one element of `to`. The rest is
  // the same task with one axis less, whose elements lie `outer` apart.
  struct Step {
    static void go(const T* from, T* to, const int64_t* dims, int rank, int64_t stride) {
      if (rank == 0) {
        *to = *from;
        return;
      }
      int64_t inner = 1;
      for (int axis = 1; axis < rank; ++axis) inner *= dims[axis];
      for (int64_t i = 0; i < dims[0]; ++i)
        go(from + i * inner, to + i * stride, dims + 1, rank - 1, stride * dims[0]);
    }
  };
  Step::go(from, to, dims, rank, 1);
}

template <class View>
using Element = typename View::value_type;

// Scratch memory of an array's size.
template <class View>
Element<View>* like(const cg::Context& context, const View& view) {
  return context.scratch<Element<View>>(view.size());
}

// A copy that C may write into, in memory order or column-major.
template <class View>
Element<View>* copied(const cg::Context& context, const View& view, bool columns_first) {
  Element<View>* copy = like(context, view);
  if (columns_first)
    reverse_axes<Element<View>>(view.data(), copy, view.extents(), view.rank());
  else
    for (int64_t i = 0; i < view.size(); ++i) copy[i] = view.data()[i];
  return copy;
}

// Column-major results back into their array.
template <class View>
void put_back(const cg::Context& context, const Element<View>* from, const View& view) {
  int64_t* dims = context.scratch<int64_t>(view.rank());
  for (int i = 0; i < view.rank(); ++i) dims[i] = view.extents()[view.rank() - 1 - i];
  reverse_axes(from, view.data(), dims, view.rank());
}

// --- Loops ---------------------------------------------------------------------------------------

// The elements of an operand beside those of results that it is broadcast to.
struct Walk {
  int64_t* strides;  // of each axis of the results; 0 where the operand has one element there

  template <class View, class Result>
  Walk(const cg::Context& context, const View& view, const Result& result)
      : strides(context.scratch<int64_t>(result.rank())) {
    int64_t stride = 1;
    for (int axis = result.rank() - 1, own = view.rank() - 1; axis >= 0; --axis, --own) {
      const int64_t extent = own >= 0 ? view.extents()[own] : 1;
      strides[axis] = extent == 1 ? 0 : stride;
      stride *= extent;
    }
  }

  // Where the operand's element for the results' element `index` lies.
  int64_t at(const int64_t* dims, int rank, int64_t index) const {
    int64_t position = 0;
    for (int axis = rank - 1; axis >= 0; --axis) {
      position += index % dims[axis] * strides[axis];
      index /= dims[axis];
    }
    return position;
  }
};

// Calls row(first, count) for the parts of [begin, end) that lie in one row of the results each.
template <class Row>
void by_rows(const int64_t* dims, int rank, int64_t begin, int64_t end, Row&& row) {
  const int64_t width = rank > 0 ? dims[rank - 1] : 1;
  while (begin < end) {
    const int64_t count = smaller(width - begin % width, end - begin);
    row(begin, count);
    begin += count;
  }
}

}  // namespace
