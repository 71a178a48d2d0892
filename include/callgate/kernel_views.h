// SPDX-License-Identifier: Apache-2.0
// The parameter types of kernels for the CPU: views of arrays, and values fixed when the program is
// traced. C++17. A part of callgate/kernel.h, which documents them.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <type_traits>

#include "callgate/kernel_abi.h"
#include "callgate/small_floats.h"

#ifndef CALLGATE_BOUNDS_CHECK
#ifdef NDEBUG
#define CALLGATE_BOUNDS_CHECK 0
#else
#define CALLGATE_BOUNDS_CHECK 1
#endif
#endif

// C++17, the names that users write, and T(x) for conversions of numbers.
// NOLINTBEGIN(modernize-*, readability-identifier-naming)

// --- Element types: those that C++ lacks are in small_floats.h -----------------------------------

namespace callgate {
// Named by CALLGATE_ABI, so that code of two versions, or of callgate itself, shares no symbols in
// a process.
inline namespace kernel_v1 {
static_assert(CALLGATE_ABI == 1);

inline constexpr int dynamic = -1;

namespace detail {

// XLA's code of an element type; 0 for types that no array has.
template <class T, class = void>
struct DTypeOf : std::integral_constant<int, 0> {};
template <class T>
struct DTypeOf<
    T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool> && sizeof(T) <= 8>>
    : std::integral_constant<int, (std::is_signed_v<T> ? 2 : 6) + (sizeof(T) == 8   ? 3
                                                                   : sizeof(T) == 4 ? 2
                                                                   : sizeof(T) == 2 ? 1
                                                                                    : 0)> {};
#define CALLGATE_DTYPE_OF(type, code) \
  template <>                         \
  struct DTypeOf<type> : std::integral_constant<int, code> {};
CALLGATE_DTYPE_OF(bool, 1)
CALLGATE_DTYPE_OF(float16, 10)
CALLGATE_DTYPE_OF(float, 11)
CALLGATE_DTYPE_OF(double, 12)
CALLGATE_DTYPE_OF(bfloat16, 16)
CALLGATE_DTYPE_OF(float8_e5m2, 19)
CALLGATE_DTYPE_OF(float8_e4m3fn, 20)
CALLGATE_DTYPE_OF(float8_e4m3b11fnuz, 23)
CALLGATE_DTYPE_OF(float8_e5m2fnuz, 24)
CALLGATE_DTYPE_OF(float8_e4m3fnuz, 25)
CALLGATE_DTYPE_OF(float8_e4m3, 28)
CALLGATE_DTYPE_OF(float8_e3m4, 29)
CALLGATE_DTYPE_OF(float8_e8m0fnu, 33)
#undef CALLGATE_DTYPE_OF
// std::complex<float> and <double>, or any pair of the same form, without including <complex>.
template <template <class> class Complex>
struct DTypeOf<Complex<float>, std::enable_if_t<sizeof(Complex<float>) == 8>>
    : std::integral_constant<int, 15> {};
template <template <class> class Complex>
struct DTypeOf<Complex<double>, std::enable_if_t<sizeof(Complex<double>) == 16>>
    : std::integral_constant<int, 18> {};

template <class T>
inline constexpr int kDType = DTypeOf<std::remove_cv_t<T>>::value;

// The element types of Python's and NumPy's numbers as attributes.
inline const char* name_of_dtype(int code) {
  constexpr const char* kNames[] = {"another type", "bool",         "int8",         "int16",
                                    "int32",        "int64",        "uint8",        "uint16",
                                    "uint32",       "uint64",       "float16",      "float32",
                                    "float64",      "another type", "another type", "complex64",
                                    "bfloat16",     "another type", "complex128"};
  constexpr int kCount = int(sizeof kNames / sizeof *kNames);
  return kNames[code >= 0 && code < kCount ? code : 0];
}

}  // namespace detail

// --- Errors --------------------------------------------------------------------------------------

// An error with a message, which becomes the program's error. Any std::exception works, too.
class Error : public std::exception {
 public:
  // Takes arguments like printf. Long texts are cut.
  __attribute__((format(printf, 2, 3))) explicit Error(const char* format, ...) {
    va_list values;
    va_start(values, format);
    std::vsnprintf(message_, sizeof message_, format, values);
    va_end(values);
  }
  const char* what() const noexcept override { return message_; }

 private:
  char message_[512];
};

namespace detail {

// Ends the kernel with an error. Without exceptions it ends the process with the error's text.
[[noreturn]] inline void raise(const Error& error) {
#if defined(__cpp_exceptions)
  throw error;
#else
  std::fprintf(stderr, "callgate: %s\n", error.what());
  std::abort();
#endif
}

[[noreturn]] inline void out_of_bounds(int64_t index, int axis, int64_t extent) {
  if (axis < 0)
    raise(Error("index %lld is outside [0, %lld)", (long long)index, (long long)extent));
  raise(Error("index %lld of axis %d is outside [0, %lld)", (long long)index, axis,
              (long long)extent));
}

inline void check_index(int64_t index, int axis, int64_t extent) {
  if (CALLGATE_BOUNDS_CHECK && (index < 0 || index >= extent)) out_of_bounds(index, axis, extent);
}

// --- Views ---------------------------------------------------------------------------------------

// The base of In, Out and InOut. `T` is const in an In.
template <class T, int kRank>
class View {
 public:
  using value_type = std::remove_const_t<T>;

  explicit View(const callgate_array& array)
      : data_(static_cast<T*>(array.data)), dims_(array.dims), rank_(array.rank) {}

  T* data() const { return data_; }
  int rank() const { return kRank == dynamic ? rank_ : kRank; }
  int64_t extent(int axis) const {
    check_index(axis, -1, rank());
    return dims_[axis];
  }
  const int64_t* extents() const { return dims_; }
  // The distance from one index of the axis to the next, in elements.
  int64_t stride(int axis) const {
    int64_t stride = 1;
    for (int i = rank() - 1; i > axis; --i) stride *= dims_[i];
    return stride;
  }
  int64_t size() const {
    int64_t size = 1;
    for (int i = 0; i < rank(); ++i) size *= dims_[i];
    return size;
  }
  bool empty() const { return size() == 0; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size(); }

  T& operator[](int64_t index) const {
    if (CALLGATE_BOUNDS_CHECK) check_index(index, -1, size());
    return data_[index];
  }
  template <class... Index>
  T& operator()(Index... index) const {
    static_assert(kRank == dynamic || sizeof...(Index) == (kRank < 0 ? 0 : kRank),
                  "an index for each axis");
    if (CALLGATE_BOUNDS_CHECK && kRank == dynamic && int(sizeof...(Index)) != rank_)
      out_of_bounds(int64_t(sizeof...(Index)), -1, rank_ + 1);
    int64_t position = 0;
    int axis = 0;
    ((check_index(int64_t(index), axis, dims_[axis]),
      position = position * dims_[axis] + int64_t(index), ++axis),
     ...);
    return data_[position];
  }

 private:
  T* data_;
  const int64_t* dims_;
  int32_t rank_;
};

}  // namespace detail

// In: an operand, read-only. Out: a result to write. InOut: an operand and a result in one memory.
template <class T, int Rank = dynamic>
struct In : detail::View<const T, Rank> {
  using detail::View<const T, Rank>::View;
};
template <class T, int Rank = dynamic>
struct Out : detail::View<T, Rank> {
  using detail::View<T, Rank>::View;
};
template <class T, int Rank = dynamic>
struct InOut : detail::View<T, Rank> {
  using detail::View<T, Rank>::View;
};

namespace detail {

template <class Element>
class Sequence {
 public:
  Sequence(const callgate_array* arrays, int count) : arrays_(arrays), count_(count) {}
  int size() const { return count_; }
  Element operator[](int index) const {
    check_index(index, -1, count_);
    return Element(arrays_[index]);
  }

 private:
  const callgate_array* arrays_;
  int count_;
};

}  // namespace detail

// Any number of operands: `xs.size()`, and `xs[i]` is an In.
template <class T, int Rank = dynamic>
struct Ins : detail::Sequence<In<T, Rank>> {
  using detail::Sequence<In<T, Rank>>::Sequence;
};
// Any number of results: `zs[i]` is an Out.
template <class T, int Rank = dynamic>
struct Outs : detail::Sequence<Out<T, Rank>> {
  using detail::Sequence<Out<T, Rank>>::Sequence;
};

// --- Attributes ----------------------------------------------------------------------------------

// A number fixed when the program was traced; converts to T.
template <class T>
class Attr {
 public:
  explicit Attr(const callgate_attribute& attribute)
      : value_(*static_cast<const T*>(attribute.data)) {}
  operator T() const { return value_; }  // NOLINT: implicit on purpose
  T value() const { return value_; }

 private:
  T value_;
};

// UTF-8 bytes without a terminating zero. Converts to std::string_view and similar types.
class String {
 public:
  explicit String(const callgate_attribute& attribute)
      : data_(static_cast<const char*>(attribute.data)), size_(size_t(attribute.count)) {}
  const char* data() const { return data_; }
  size_t size() const { return size_; }
  const char* begin() const { return data_; }
  const char* end() const { return data_ + size_; }
  template <class Text, class = decltype(Text(static_cast<const char*>(nullptr), size_t(0)))>
  operator Text() const {  // NOLINT: implicit on purpose
    return Text(data_, size_);
  }
  friend bool operator==(const String& a, const char* b) {
    return a.size_ == std::strlen(b) && std::memcmp(a.data_, b, a.size_) == 0;
  }
  friend bool operator!=(const String& a, const char* b) { return !(a == b); }

 private:
  const char* data_;
  size_t size_;
};

// An array of numbers fixed when the program was traced.
template <class T>
class Numbers {
 public:
  explicit Numbers(const callgate_attribute& attribute)
      : data_(static_cast<const T*>(attribute.data)), size_(int64_t(attribute.count)) {}
  const T* data() const { return data_; }
  int64_t size() const { return size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  const T& operator[](int64_t index) const {
    detail::check_index(index, -1, size_);
    return data_[index];
  }

 private:
  const T* data_;
  int64_t size_;
};

// Named values. Python's ints are int64_t, floats double, bools bool; NumPy's numbers keep their
// type. A missing entry, or one of another type, raises an Error with its name.
class Dict {
 public:
  explicit Dict(const callgate_attribute& attribute)
      : entries_(static_cast<const callgate_attribute*>(attribute.data)),
        size_(size_t(attribute.count)) {}
  size_t size() const { return size_; }
  bool contains(const char* name) const { return find(name) != nullptr; }
  template <class T>
  T get(const char* name) const {
    return *static_cast<const T*>(entry(name, CALLGATE_NUMBER, detail::kDType<T>).data);
  }
  template <class T>
  Numbers<T> numbers(const char* name) const {
    return Numbers<T>(entry(name, CALLGATE_NUMBERS, detail::kDType<T>));
  }
  String string(const char* name) const { return String(entry(name, CALLGATE_STRING, 0)); }
  Dict dict(const char* name) const { return Dict(entry(name, CALLGATE_DICTIONARY, 0)); }

 private:
  const callgate_attribute* find(const char* name) const {
    for (size_t i = 0; i < size_; ++i)
      if (std::strcmp(entries_[i].name, name) == 0) return &entries_[i];
    return nullptr;
  }
  const callgate_attribute& entry(const char* name, int kind, int dtype) const {
    constexpr const char* kKinds[] = {"a number of ", "a string", "numbers of ", "a dictionary"};
    auto type_of = [](int form, int code) {
      return form == CALLGATE_NUMBER || form == CALLGATE_NUMBERS ? detail::name_of_dtype(code) : "";
    };
    const callgate_attribute* found = find(name);
    if (found == nullptr) detail::raise(Error("attribute '%s' is missing", name));
    bool empty = kind == CALLGATE_NUMBERS && found->count == 0;  // an empty array has any type
    if (found->kind != kind || (dtype != 0 && found->dtype != dtype && !empty))
      detail::raise(Error("attribute '%s': expected %s%s, got %s%s", name, kKinds[kind],
                          type_of(kind, dtype), kKinds[found->kind],
                          type_of(found->kind, found->dtype)));
    return *found;
  }
  const callgate_attribute* entries_;
  size_t size_;
};

}  // namespace kernel_v1
}  // namespace callgate
// NOLINTEND(modernize-*, readability-identifier-naming)
