// SPDX-License-Identifier: Apache-2.0
// Functions of other libraries in the form of kernels, which Python creates once and keeps. Their
// calls don't pass through this file.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/python/gil.h"
#include "kernels/packed_kernel.h"
#include "kernels/tvm_ffi.h"

namespace callgate::bindings {
namespace {

template <typename T>
T as(std::uintptr_t address) noexcept {
  return reinterpret_cast<T>(address);
}

void make_tvm_function(tvm::Function* self, std::uintptr_t handle, std::uintptr_t move_from_raised,
                       std::uintptr_t dec_ref, std::uintptr_t from_dlpack,
                       std::uintptr_t set_stream, std::vector<std::int32_t> kinds) {
  tvm::Api api{as<decltype(tvm::Api::error_move_from_raised)>(move_from_raised),
               as<decltype(tvm::Api::object_dec_ref)>(dec_ref),
               as<decltype(tvm::Api::tensor_from_dlpack)>(from_dlpack),
               as<decltype(tvm::Api::env_set_stream)>(set_stream)};
  new (self) tvm::Function{as<void*>(handle), api, std::move(kinds)};
}

void make_packed_kernel(PackedKernel* self, std::uintptr_t function, std::size_t second,
                        std::size_t bytes,
                        const std::vector<std::tuple<std::size_t, bool, std::size_t>>& addresses,
                        std::vector<std::size_t> zeroed) {
  auto* made = new (self) PackedKernel{
      as<decltype(PackedKernel::function)>(function), second, bytes, {}, std::move(zeroed)};
  for (auto [offset, result, index] : addresses) made->addresses.push_back({offset, result, index});
}

// A kernel's function and user data, in the form of `Kernel`.
template <typename T>
void bind_form(nb::class_<T>& type) {
  type.def_prop_ro("address", [](const T&) { return reinterpret_cast<std::uintptr_t>(&T::run); })
      .def_prop_ro("user_data",
                   [](const T& made) { return reinterpret_cast<std::uintptr_t>(&made); });
}

}  // namespace

void bind_peers(nb::module_& module) {
  nb::class_<tvm::Function> function(
      module, "TvmFunction", "A function of tvm_ffi as a kernel; see src/kernels/tvm_ffi.h.");
  function.def("__init__", &make_tvm_function, nb::arg("handle"), nb::kw_only(),
               nb::arg("move_from_raised"), nb::arg("dec_ref"), nb::arg("from_dlpack"),
               nb::arg("set_stream"), nb::arg("kinds"));
  bind_form(function);
  nb::class_<PackedKernel> packed(
      module, "PackedKernel",
      "A function that takes two structs as a kernel; see src/kernels/packed_kernel.h.");
  packed.def("__init__", &make_packed_kernel, nb::arg("function"), nb::kw_only(), nb::arg("second"),
             nb::arg("bytes"), nb::arg("addresses"), nb::arg("zeroed"));
  bind_form(packed);
}

}  // namespace callgate::bindings
