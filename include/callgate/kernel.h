// Kernels: C++ functions that compiled JAX programs call, with no Python at run time. C++17.
//
//   #include "callgate/kernel.h"
//
//   void saxpy(float a, cg::In<float, 1> x, cg::In<float, 1> y, cg::Out<float, 1> z) {
//     for (int64_t i = 0; i < x.size(); ++i) z[i] = a * x[i] + y[i];
//   }
//   CALLGATE_KERNEL(saxpy, a, x, y, z)   // the parameters' names are for messages; they may be
//   left out
//
// A kernel is a function whose parameters are, in any order,
//
//   cg::In<T, Rank>     an operand, read-only          T: any element type below
//   cg::Out<T, Rank>    a result, to be written        Rank: a number, or cg::dynamic (the default)
//   cg::InOut<T, Rank>  an operand and a result in one memory
//   T                   an operand of rank 0, by value
//   cg::Ins<T, Rank>    any number of operands          cg::Outs<T, Rank>   any number of results
//   cg::Attr<T>         a number fixed when the program was traced
//   cg::String, cg::Numbers<T>, cg::Dict   such a string, array of numbers, dictionary
//   cg::Context&        the thread pool, scratch memory, the device
//
// and that returns void. An exception that leaves it fails the program with the exception's text.
// In code that is compiled without exceptions an error of this header's ends the process.
//
// Views are dense and row-major. `x[i]` is the i-th element in memory order, `x(i, j)` the one at
// an index. Both are checked where CALLGATE_BOUNDS_CHECK is 1, which is the default without NDEBUG.
//
// CUDA's compilers get the views of kernel_device.h instead.
//
// This header, kernel_abi.h and small_floats.h stand alone: no XLA, no Python, nothing else of
// callgate.
#pragma once

#ifdef __CUDACC__
#include "callgate/kernel_device.h"
#else

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
// By CALLGATE_ABI, so that code of two versions, or of callgate itself, shares no symbols in a
// process.
inline namespace kernel_v1 {
static_assert(CALLGATE_ABI == 1);

inline constexpr int dynamic = -1;

namespace detail {

// XLA's code of an element type; 0 for a type that no array has.
template <class T, class = void>
struct DTypeOf : std::integral_constant<int, 0> {};
template <>
struct DTypeOf<bool> : std::integral_constant<int, 1> {};
template <class T>
struct DTypeOf<
    T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool> && sizeof(T) <= 8>>
    : std::integral_constant<int, (std::is_signed_v<T> ? 2 : 6) + (sizeof(T) == 8   ? 3
                                                                   : sizeof(T) == 4 ? 2
                                                                   : sizeof(T) == 2 ? 1
                                                                                    : 0)> {};
template <>
struct DTypeOf<float16> : std::integral_constant<int, 10> {};
template <>
struct DTypeOf<float> : std::integral_constant<int, 11> {};
template <>
struct DTypeOf<double> : std::integral_constant<int, 12> {};
template <>
struct DTypeOf<bfloat16> : std::integral_constant<int, 16> {};
template <>
struct DTypeOf<float8_e5m2> : std::integral_constant<int, 19> {};
template <>
struct DTypeOf<float8_e4m3fn> : std::integral_constant<int, 20> {};
template <>
struct DTypeOf<float8_e4m3b11fnuz> : std::integral_constant<int, 23> {};
template <>
struct DTypeOf<float8_e5m2fnuz> : std::integral_constant<int, 24> {};
template <>
struct DTypeOf<float8_e4m3fnuz> : std::integral_constant<int, 25> {};
template <>
struct DTypeOf<float8_e4m3> : std::integral_constant<int, 28> {};
template <>
struct DTypeOf<float8_e3m4> : std::integral_constant<int, 29> {};
template <>
struct DTypeOf<float8_e8m0fnu> : std::integral_constant<int, 33> {};
// std::complex<float> and <double>, or any pair of the same form, without including <complex>.
template <template <class> class Complex>
struct DTypeOf<Complex<float>, std::enable_if_t<sizeof(Complex<float>) == 8>>
    : std::integral_constant<int, 15> {};
template <template <class> class Complex>
struct DTypeOf<Complex<double>, std::enable_if_t<sizeof(Complex<double>) == 16>>
    : std::integral_constant<int, 18> {};

template <class T>
inline constexpr int kDType = DTypeOf<std::remove_cv_t<T>>::value;

}  // namespace detail

// --- Errors --------------------------------------------------------------------------------------

// An error with a message, which becomes the program's. Any std::exception does as well.
class Error : public std::exception {
 public:
  // As printf. Longer texts are cut.
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

// Ends the kernel with an error; in code without exceptions the process, with the error's text.
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

}  // namespace detail

// --- Views ---------------------------------------------------------------------------------------

namespace detail {

// What In, Out and InOut share. `T` is const in an In.
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
  // In elements, from one index of the axis to the next.
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

// Any number of operands: `xs.size()`, `xs[i]` an In.
template <class T, int Rank = dynamic>
struct Ins : detail::Sequence<In<T, Rank>> {
  using detail::Sequence<In<T, Rank>>::Sequence;
};
// Any number of results: `zs[i]` an Out.
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

// Bytes of UTF-8, not terminated by zero. Converts to std::string_view and the like.
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
    check(index);
    return data_[index];
  }

 private:
  void check(int64_t index) const { detail::check_index(index, -1, size_); }
  const T* data_;
  int64_t size_;
};

// Named values. Python's ints are int64_t, floats double, bools bool; NumPy's numbers keep their
// type. An entry that is missing or of another type is an Error that names it.
class Dict {
 public:
  explicit Dict(const callgate_attribute& attribute)
      : entries_(static_cast<const callgate_attribute*>(attribute.data)),
        size_(size_t(attribute.count)) {}
  size_t size() const { return size_; }
  bool contains(const char* name) const { return find(name) != nullptr; }
  template <class T>
  T get(const char* name) const {
    return *static_cast<const T*>(
        entry(name, CALLGATE_NUMBER, detail::kDType<T>, "a number of the type asked for").data);
  }
  template <class T>
  Numbers<T> numbers(const char* name) const {
    return Numbers<T>(
        entry(name, CALLGATE_NUMBERS, detail::kDType<T>, "numbers of the type asked for"));
  }
  String string(const char* name) const {
    return String(entry(name, CALLGATE_STRING, 0, "a string"));
  }
  Dict dict(const char* name) const {
    return Dict(entry(name, CALLGATE_DICTIONARY, 0, "a dictionary"));
  }

 private:
  const callgate_attribute* find(const char* name) const {
    for (size_t i = 0; i < size_; ++i)
      if (std::strcmp(entries_[i].name, name) == 0) return &entries_[i];
    return nullptr;
  }
  const callgate_attribute& entry(const char* name, int kind, int dtype,
                                  const char* expected) const {
    const callgate_attribute* found = find(name);
    if (found == nullptr) detail::raise(Error("attribute '%s' is missing", name));
    bool empty = kind == CALLGATE_NUMBERS && found->count == 0;  // of no numbers, any type does
    if (found->kind != kind || (dtype != 0 && found->dtype != dtype && !empty))
      detail::raise(Error("attribute '%s': expected %s, got kind %d of dtype %d", name, expected,
                          int(found->kind), int(found->dtype)));
    return *found;
  }
  const callgate_attribute* entries_;
  size_t size_;
};

// --- The call ------------------------------------------------------------------------------------

class Context {
 public:
  explicit Context(const callgate_call& call) : call_(&call) {}

  // Calls body(i) for each i of [begin, end), on XLA's threads and this one, in parts of at least
  // `grain`. An exception that leaves body ends the kernel with it, when all parts are done.
  template <class Body>
  void parallel_for(int64_t begin, int64_t end, int64_t grain, Body&& body) const {
    parallel_ranges(begin, end, grain, [&body](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) body(i);
    });
  }
  // The same with body(first, last).
  template <class Body>
  void parallel_ranges(int64_t begin, int64_t end, int64_t grain, Body&& body) const {
#if defined(__cpp_exceptions)
    struct Shared {
      std::remove_reference_t<Body>* body;
      std::exception_ptr error;
      bool failed;
    } shared{&body, nullptr, false};
    call_->services->parallel_for(
        call_, begin, end, grain,
        [](void* data, int64_t first, int64_t last) {
          auto& state = *static_cast<Shared*>(data);
          try {
            (*state.body)(first, last);
          } catch (...) {
            if (!__atomic_exchange_n(&state.failed, true, __ATOMIC_ACQ_REL))
              state.error = std::current_exception();
          }
        },
        &shared);
    if (shared.error != nullptr) std::rethrow_exception(shared.error);
#else
    struct Shared {
      std::remove_reference_t<Body>* body;
    } shared{&body};
    call_->services->parallel_for(
        call_, begin, end, grain,
        [](void* data, int64_t first, int64_t last) {
          (*static_cast<Shared*>(data)->body)(first, last);
        },
        &shared);
#endif
  }

  // Uninitialised memory for `count` elements, until the kernel returns.
  template <class T>
  T* scratch(int64_t count) const {
    size_t alignment = alignof(T) < 64 ? 64 : alignof(T);
    bool fits = count >= 0 && uint64_t(count) <= SIZE_MAX / sizeof(T);
    void* memory =
        fits ? call_->services->scratch(call_, size_t(count) * sizeof(T), alignment) : nullptr;
    if (memory == nullptr)
      detail::raise(
          Error("no memory for %lld elements of %d bytes", (long long)count, int(sizeof(T))));
    return static_cast<T*>(memory);
  }

  // Threads that parallel_for may use, this one included.
  int threads() const { return call_->services->threads(call_); }
  // The device's number, as jax.Device.id; -1 where it has none.
  int64_t device() const { return call_->services->device(call_); }
  // What was given when the kernel was defined; null by default.
  void* user_data() const { return call_->user_data; }

 private:
  const callgate_call* call_;
};

namespace detail {

// How a parameter type is described and made from the call. Other types don't compile.
template <class P, class = void>
struct Parameter {
  static_assert(
      kDType<P> != 0,
      "a kernel's parameters are cg::In, cg::Out, cg::InOut, cg::Ins, cg::Outs, cg::Attr, "
      "cg::String, cg::Numbers, cg::Dict, cg::Context or numbers (see callgate/kernel.h)");
  static constexpr callgate_parameter kDescription = {CALLGATE_SCALAR, kDType<P>, 0};
  static P get(const callgate_call& call, int i) {
    return *static_cast<const P*>(call.operands[call.starts[i]].data);
  }
};
template <class T, int R>
struct Parameter<In<T, R>> {
  static_assert(kDType<T> != 0, "cg::In of a type that arrays can't have");
  static constexpr callgate_parameter kDescription = {CALLGATE_IN, kDType<T>, R};
  static In<T, R> get(const callgate_call& call, int i) {
    return In<T, R>(call.operands[call.starts[i]]);
  }
};
template <class T, int R>
struct Parameter<Out<T, R>> {
  static_assert(kDType<T> != 0, "cg::Out of a type that arrays can't have");
  static constexpr callgate_parameter kDescription = {CALLGATE_OUT, kDType<T>, R};
  static Out<T, R> get(const callgate_call& call, int i) {
    return Out<T, R>(call.results[call.starts[i]]);
  }
};
template <class T, int R>
struct Parameter<InOut<T, R>> {
  static_assert(kDType<T> != 0, "cg::InOut of a type that arrays can't have");
  static constexpr callgate_parameter kDescription = {CALLGATE_INOUT, kDType<T>, R};
  static InOut<T, R> get(const callgate_call& call, int i) {
    return InOut<T, R>(call.results[call.starts[i]]);
  }
};
template <class T, int R>
struct Parameter<Ins<T, R>> {
  static_assert(kDType<T> != 0, "cg::Ins of a type that arrays can't have");
  static constexpr callgate_parameter kDescription = {CALLGATE_INS, kDType<T>, R};
  static Ins<T, R> get(const callgate_call& call, int i) {
    return Ins<T, R>(call.operands + call.starts[i], call.counts[i]);
  }
};
template <class T, int R>
struct Parameter<Outs<T, R>> {
  static_assert(kDType<T> != 0, "cg::Outs of a type that arrays can't have");
  static constexpr callgate_parameter kDescription = {CALLGATE_OUTS, kDType<T>, R};
  static Outs<T, R> get(const callgate_call& call, int i) {
    return Outs<T, R>(call.results + call.starts[i], call.counts[i]);
  }
};
// Attributes: made from the i-th parameter's callgate_attribute.
template <class P, int kKind, int kType>
struct AttributeParameter {
  static constexpr callgate_parameter kDescription = {kKind, kType, 0};
  static P get(const callgate_call& call, int i) { return P(call.attributes[call.starts[i]]); }
};
template <class T>
struct Parameter<Attr<T>> : AttributeParameter<Attr<T>, CALLGATE_ATTR_NUMBER, kDType<T>> {
  static_assert(kDType<T> != 0, "cg::Attr of a type that is no number");
};
template <>
struct Parameter<String> : AttributeParameter<String, CALLGATE_ATTR_STRING, 0> {};
template <class T>
struct Parameter<Numbers<T>> : AttributeParameter<Numbers<T>, CALLGATE_ATTR_NUMBERS, kDType<T>> {
  static_assert(kDType<T> != 0, "cg::Numbers of a type that is no number");
};
template <>
struct Parameter<Dict> : AttributeParameter<Dict, CALLGATE_ATTR_DICTIONARY, 0> {};
template <>
struct Parameter<Context> {
  static constexpr callgate_parameter kDescription = {CALLGATE_CONTEXT, 0, 0};
  static Context get(const callgate_call& call, int /*i*/) { return Context(call); }
};

template <int... I>
struct Indices {};
template <int kCount, int... I>
struct MakeIndices : MakeIndices<kCount - 1, kCount - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};

template <auto kFunction, class Type = decltype(kFunction)>
struct Kernel {
  static_assert(sizeof(Type) == 0, "a kernel is a function that returns void");
};
template <auto kFunction, class... P>
struct Kernel<kFunction, void (*)(P...)> {
  static constexpr int kCount = int(sizeof...(P));
  static constexpr callgate_parameter kParameters[sizeof...(P) + 1] = {
      Parameter<std::remove_cv_t<std::remove_reference_t<P>>>::kDescription..., {}};

  static int32_t call(const callgate_call* call) {
    return run(*call, typename MakeIndices<kCount>::type());
  }

 private:
  // Makes an lvalue of an argument, for parameters by reference; it lives as long as the call.
  template <class Value>
  struct Held {
    Value value;
    Held(const callgate_call& call, int i) : value(Parameter<Value>::get(call, i)) {}
    Value& get() { return value; }
  };
  template <class Reference>
  using HeldFor = Held<std::remove_cv_t<std::remove_reference_t<Reference>>>;
  template <int... I>
  static int32_t run(const callgate_call& call, Indices<I...>) {
#if defined(__cpp_exceptions)
    try {
      kFunction(HeldFor<P>(call, I).get()...);
      return 0;
    } catch (const std::exception& error) {
      call.services->fail(&call, error.what());
    } catch (...) {
      call.services->fail(&call, "an exception that is no std::exception");
    }
    return 1;
#else
    kFunction(HeldFor<P>(call, I).get()...);
    return 0;
#endif
  }
};
template <auto kFunction, class... P>
struct Kernel<kFunction, void (*)(P...) noexcept> : Kernel<kFunction, void (*)(P...)> {};

// This library's kernels. Hidden: two libraries in one process must not share it.
__attribute__((visibility("hidden"))) inline const callgate_kernel* kernels = nullptr;

template <auto kFunction>
callgate_kernel describe(const char* names) {
  using Described = Kernel<kFunction>;
  return {CALLGATE_ABI,           Described::kCount, names,
          Described::kParameters, &Described::call,  nullptr};
}

struct Registration {
  explicit Registration(callgate_kernel& kernel) {
    kernel.next = kernels;
    kernels = &kernel;
  }
};

}  // namespace detail
}  // namespace kernel_v1
}  // namespace callgate

namespace cg = callgate;  // NOLINT: the short name that users write

// The library's kernels, as callgate finds them.
extern "C" __attribute__((visibility("default"), used)) inline const callgate_kernel*
callgate_kernels() {
  return callgate::detail::kernels;
}

// CALLGATE_KERNEL(function, names...) exports a function under its own name. The names of its
// parameters are for messages and keyword arguments; leave them out and parameters have numbers.
#define CALLGATE_KERNEL(...) \
  CALLGATE_KERNEL_EXPAND_(CALLGATE_KERNEL_FIRST_(__VA_ARGS__, ), #__VA_ARGS__)
// The same under another name, which is an identifier: for functions in namespaces and instances of
// templates. `function` holds no comma.
#define CALLGATE_KERNEL_AS(name, function, ...) \
  CALLGATE_KERNEL_DEFINE_(name, function, #name "," #__VA_ARGS__)

#define CALLGATE_KERNEL_FIRST_(first, ...) first
#define CALLGATE_KERNEL_EXPAND_(function, names) CALLGATE_KERNEL_DEFINE_(function, function, names)
#define CALLGATE_KERNEL_DEFINE_(name, function, names)                                         \
  namespace {                                                                                  \
  callgate_kernel callgate_kernel_##name = ::callgate::detail::describe<&function>(names);     \
  const ::callgate::detail::Registration callgate_registration_##name(callgate_kernel_##name); \
  }
// NOLINTEND(modernize-*, readability-identifier-naming)
#endif  // __CUDACC__
