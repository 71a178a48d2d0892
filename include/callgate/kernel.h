// SPDX-License-Identifier: Apache-2.0
// Kernels: C++ functions that compiled JAX programs call, with no Python at run time. C++17.
//
//   #include "callgate/kernel.h"
//
//   void saxpy(float a, cg::In<float, 1> x, cg::In<float, 1> y, cg::Out<float, 1> z) {
//     for (int64_t i = 0; i < x.size(); ++i) z[i] = a * x[i] + y[i];
//   }
//   CALLGATE_KERNEL(saxpy, a, x, y, z)   // the parameters' names, for messages; may be left out
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
// This header, kernel_abi.h, kernel_views.h and small_floats.h stand alone: no XLA, no Python,
// nothing else of callgate.
#pragma once

#ifdef __CUDACC__
#include "callgate/kernel_device.h"
#else

#include <cstddef>
#include <cstdint>
#include <exception>
#include <type_traits>

#include "callgate/kernel_abi.h"
#include "callgate/kernel_views.h"

// C++17, the names that users write, and T(x) for conversions of numbers.
// NOLINTBEGIN(modernize-*, readability-identifier-naming)

namespace callgate {
inline namespace kernel_v1 {

// --- The call ------------------------------------------------------------------------------------

namespace detail {

// The exception that `body` throws; null for nothing, and in code without exceptions.
template <class Body>
std::exception_ptr caught(const Body& body) {
#if defined(__cpp_exceptions)
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
#else
  body();
#endif
  return nullptr;
}

}  // namespace detail

class Context {
 public:
  explicit Context(const callgate_call& call) : call_(&call) {}

  // Calls body(i) for each i of [begin, end), on XLA's threads and this one, in parts of at least
  // `grain`. An exception that leaves the body ends the kernel with this exception, after all parts
  // have finished.
  template <class Body>
  void parallel_for(int64_t begin, int64_t end, int64_t grain, Body&& body) const {
    parallel_ranges(begin, end, grain, [&body](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) body(i);
    });
  }
  // The same with body(first, last).
  template <class Body>
  void parallel_ranges(int64_t begin, int64_t end, int64_t grain, Body&& body) const {
    struct Shared {
      std::remove_reference_t<Body>* body;
      std::exception_ptr error;
      bool failed;
    } shared{&body, nullptr, false};
    call_->services->parallel_for(
        call_, begin, end, grain,
        [](void* data, int64_t first, int64_t last) {
          auto& state = *static_cast<Shared*>(data);
          std::exception_ptr error = detail::caught([&] { (*state.body)(first, last); });
          if (error != nullptr && !__atomic_exchange_n(&state.failed, true, __ATOMIC_ACQ_REL))
            state.error = error;
        },
        &shared);
    if (shared.error != nullptr) std::rethrow_exception(shared.error);
  }

  // Uninitialized memory for `count` elements, until the kernel returns.
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

  // The number of threads that parallel_for may use, this one included.
  int threads() const { return call_->services->threads(call_); }
  // The device's number, as jax.Device.id; -1 if it has none.
  int64_t device() const { return call_->services->device(call_); }
  // The pointer from the kernel's definition; null by default.
  void* user_data() const { return call_->user_data; }

 private:
  const callgate_call* call_;
};

namespace detail {

// Describes a parameter type and makes its value from the call. Other types don't compile.
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
// Arrays, made from the i-th parameter's callgate_arrays on its side of the call.
template <class P, int kKind, int kType, int kRank, const callgate_array* callgate_call::* kSide>
struct ArrayParameter {
  static_assert(kType != 0, "a cg::In, Out, InOut, Ins or Outs of a type that arrays can't have");
  static constexpr callgate_parameter kDescription = {kKind, kType, kRank};
  static P get(const callgate_call& call, int i) {
    const callgate_array* first = call.*kSide + call.starts[i];
    if constexpr (kKind == CALLGATE_INS || kKind == CALLGATE_OUTS)
      return P(first, call.counts[i]);
    else
      return P(*first);
  }
};
#define CALLGATE_ARRAY_PARAMETER(type, kind, side) \
  template <class T, int R>                        \
  struct Parameter<type<T, R>>                     \
      : ArrayParameter<type<T, R>, kind, kDType<T>, R, &callgate_call::side> {};
CALLGATE_ARRAY_PARAMETER(In, CALLGATE_IN, operands)
CALLGATE_ARRAY_PARAMETER(Out, CALLGATE_OUT, results)
CALLGATE_ARRAY_PARAMETER(InOut, CALLGATE_INOUT, results)
CALLGATE_ARRAY_PARAMETER(Ins, CALLGATE_INS, operands)
CALLGATE_ARRAY_PARAMETER(Outs, CALLGATE_OUTS, results)
#undef CALLGATE_ARRAY_PARAMETER
// Attributes, made from the i-th parameter's callgate_attribute.
template <class P, int kKind, int kType>
struct AttributeParameter {
  static constexpr callgate_parameter kDescription = {kKind, kType, 0};
  static P get(const callgate_call& call, int i) { return P(call.attributes[call.starts[i]]); }
};
template <class T>
struct Parameter<Attr<T>> : AttributeParameter<Attr<T>, CALLGATE_ATTR_NUMBER, kDType<T>> {
  static_assert(kDType<T> != 0, "cg::Attr needs a number type");
};
template <>
struct Parameter<String> : AttributeParameter<String, CALLGATE_ATTR_STRING, 0> {};
template <class T>
struct Parameter<Numbers<T>> : AttributeParameter<Numbers<T>, CALLGATE_ATTR_NUMBERS, kDType<T>> {
  static_assert(kDType<T> != 0, "cg::Numbers needs a number type");
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
  static_assert(sizeof(Type) == 0, "a kernel function must return void");
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
  // Makes an lvalue from an argument, for parameters by reference; it lives as long as the call.
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
      call.services->fail(&call, "an exception that is not a std::exception");
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

// This library's kernels. Hidden, because two libraries in one process must not share the list.
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

// The library's kernels, for callgate.
extern "C" __attribute__((visibility("default"), used)) inline const callgate_kernel*
callgate_kernels() {
  return callgate::detail::kernels;
}

// CALLGATE_KERNEL(function, names...) exports a function under its own name. The names of its
// parameters appear in messages and as keyword arguments. Without names, parameters have numbers.
#define CALLGATE_KERNEL(...) \
  CALLGATE_KERNEL_EXPAND_(CALLGATE_KERNEL_FIRST_(__VA_ARGS__, ), #__VA_ARGS__)
// The same under another name, which must be an identifier: for functions in namespaces and
// instances of templates. `function` contains no comma.
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
