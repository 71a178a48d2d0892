// SPDX-License-Identifier: Apache-2.0
// Kernels for the CPU and for CUDA, as Python creates them. Their calls don't pass through this
// file; only their failures do.
#include "kernels/kernel.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "bindings/python/handle.h"
#include "bindings/python/hooks.h"
#include "core/error.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/nvrtc.h"
#include "kernels/kernel_debug.h"

namespace callgate::bindings {
namespace {

// For compiled code that has set a Python error, under the GIL: stores and clears the exception,
// and fails the call with a text that refers to it.
void take_python_error(const callgate_call* call) {
  std::optional<nb::python_error> raised;
  if (PyErr_Occurred() != nullptr) raised.emplace();
  nb::object text = call_hook(hooks.kernel_raised, "O", raised ? raised->value().ptr() : Py_None);
  call->services->fail(call, text_or(text, "it raised").c_str());
}

std::vector<ArrayView> views(const nb::list& arrays) {
  std::vector<ArrayView> views;
  for (nb::handle object : arrays) views.push_back(view_of(object, "a kernel's array"));
  return views;
}

using KernelHandle = Handle<KernelCallee>;

// One call outside XLA, on this thread.
void call(const KernelHandle& kernel, const nb::list& operands, const nb::list& results,
          const std::vector<std::int64_t>& groups, const nb::dict& attributes) {
  std::unique_ptr<KernelSite> site = kernel.callee->bind(
      {signature(kernel.callee->info()), "", groups, {}, attributes_of(attributes)});
  std::vector<ArrayView> in = views(operands), out = views(results);
  without_gil([&] { site->run(Call{in, out, {}}, nullptr); });
}

// Converts a kernel's failure into a text for XLA through the hook, which makes and stores the
// exception. Without Python, which may be gone, it returns the message itself.
KernelCalleeBase::Describe failures_of(std::string kernel) {
  return [kernel = std::move(kernel)](const std::string& said, const std::string& site,
                                      const std::string& lane) {
    std::string message = valid_utf8(said);  // native code may use any encoding
    std::string plain = "callgate: kernel '" + kernel + "': " + message;
    ActiveGil gil;
    if (!gil) return plain;
    return text_or(call_hook(hooks.kernel_failed, "ssss", kernel.c_str(), message.c_str(),
                             site.c_str(), lane.c_str()),
                   plain);
  };
}

// Stores a failure that XLA can't report.
void defer_kernel_failure(const Error& error) {
  if (ActiveGil gil; gil) call_deferred(error);
}

void make_kernel(KernelHandle* self, const std::string& name, std::uintptr_t function,
                 const std::vector<std::tuple<int, int, int>>& parameters,
                 std::vector<std::string> names, std::uintptr_t user_data, bool thread_safe,
                 bool repeatable, bool on_stream, nb::object keep,
                 std::shared_ptr<KernelTurn> turn) {
  auto* code = reinterpret_cast<callgate_function>(function);
  auto* data = reinterpret_cast<void*>(user_data);
  KernelInfo info{name,       code,      data,           {}, std::move(names), thread_safe,
                  repeatable, on_stream, std::move(turn)};
  for (auto [kind, dtype, rank] : parameters) info.parameters.push_back({kind, dtype, rank});
  std::shared_ptr<void> held;
  if (!keep.is_none()) held = late(std::move(keep));
  auto callee = std::make_shared<KernelCallee>(std::move(info), failures_of(name), std::move(held));
  callee->set_defer(&defer_kernel_failure);
  callee->set_report([what = "kernel '" + name + "'"](const std::string& call) {
    ActiveGil gil;
    return gil ? stall_text(what, call, /*timed_out=*/false) : stalled_text(what, call);
  });
  new (self) KernelHandle(std::move(callee));
}

nb::list read_library(const std::string& path, std::uintptr_t table) {
  nb::list kernels;
  for (const KernelInfo& info :
       exported_kernels(path, reinterpret_cast<const callgate_kernel* (*)()>(table))) {
    nb::list parameters;
    for (const callgate_parameter& p : info.parameters)
      parameters.append(nb::make_tuple(p.kind, p.dtype, p.rank));
    kernels.append(nb::make_tuple(info.name, reinterpret_cast<std::uintptr_t>(info.function),
                                  parameters, info.parameter_names));
  }
  return kernels;
}

// --- For CUDA ------------------------------------------------------------------------------------

using cuda::LaunchCallee;
using cuda::Nvrtc;

using CudaKernelHandle = Handle<LaunchCallee>;

void make_cuda_kernel(CudaKernelHandle* self, std::string name,
                      const std::vector<std::pair<nb::bytes, int>>& images) {
  std::vector<cuda::Image> held;
  held.reserve(images.size());
  for (const auto& [code, capability] : images)
    held.push_back({std::string(code.c_str(), code.size()), capability});
  // Failures belong to the kernel, for all its variants.
  auto failures = failures_of(name.substr(0, name.find('[')));
  auto callee =
      std::make_shared<LaunchCallee>(std::move(name), std::move(held), std::move(failures));
  callee->set_defer(&defer_kernel_failure);
  new (self) CudaKernelHandle(std::move(callee));
}

// The capabilities of this process's devices; empty without a driver.
std::vector<int> capabilities() {
  try {
    std::vector<int> all(static_cast<std::size_t>(cuda::Device::count()));
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = cuda::Device::capability_of(static_cast<int>(i));
    return all;
  } catch (const Error&) {
    return {};  // no driver or device: a machine for compiling
  }
}

nb::tuple compile(const Nvrtc& nvrtc, const std::string& source, const std::string& name,
                  const std::vector<std::string>& options,
                  const std::vector<std::pair<std::string, std::string>>& headers,
                  const std::vector<std::string>& expressions) {
  Nvrtc::Compiled compiled =
      without_gil([&] { return nvrtc.compile({source, name, options, headers, expressions}); });
  return nb::make_tuple(compiled.ok, bytes_of(compiled.code), nb::cast(compiled.names),
                        bytes_of(compiled.log));
}

}  // namespace

void bind_kernel(nb::module_& module) {
  nb::class_<KernelTurn>(module, "KernelTurn", nb::is_weak_referenceable(),
                         "The turn of calls of kernels that aren't thread-safe, one at a time.")
      .def(nb::new_([] { return std::make_shared<KernelTurn>(); }))
      .def_static(
          "of_library",
          [](std::uintptr_t address) {
            return turn_of_library(reinterpret_cast<const void*>(address));
          },
          nb::arg("address"), nb::sig("def of_library(address: int) -> KernelTurn | None"),
          "The turn of all kernels with code in this address's library; None without a library.");
  bind_callee<KernelHandle>(module, "Kernel", "The runtime's handle on a native kernel, by name.")
      .def("__init__", &make_kernel, nb::arg("name"), nb::arg("function"), nb::arg("parameters"),
           nb::arg("names"), nb::kw_only(), nb::arg("user_data") = 0,
           nb::arg("thread_safe") = false, nb::arg("repeatable") = false,
           nb::arg("on_stream") = false, nb::arg("keep") = nb::none(), nb::arg("turn") = nb::none())
      .def_prop_ro("signature",
                   [](const KernelHandle& kernel) { return signature(kernel.callee->info()); })
      .def("call", &call, nb::arg("operands"), nb::arg("results"), nb::arg("groups"),
           nb::arg("attributes"));
  module.def("read_library", &read_library, nb::arg("path"), nb::arg("table"),
             "(name, function, parameters, names) of each kernel of a loaded library.");
  module.def("take_python_error_address",
             [] { return number_of(reinterpret_cast<void*>(&take_python_error)); });
  module.def("set_check_memory", [](bool on) { set_kernel_mode(KernelMode::kCheckMemory, on); });
  module.def("set_crash_report", &set_crash_report, nb::arg("on"));
  module.attr("KERNEL_ABI") = CALLGATE_ABI;
  bind_callee<CudaKernelHandle>(module, "CudaKernel",
                                "The runtime's handle on a kernel's images for CUDA, by name.")
      .def("__init__", &make_cuda_kernel, nb::arg("name"), nb::arg("images"));
  nb::class_<Nvrtc>(module, "Nvrtc", "CUDA's run-time compiler, from a library.")
      .def_static("open", &Nvrtc::open, nb::arg("path"), nb::rv_policy::reference)
      .def_static("usual_name", &Nvrtc::usual_name)
      .def_prop_ro("version", &Nvrtc::version)
      .def_prop_ro("architectures", &Nvrtc::architectures)
      .def("compile", &compile, nb::arg("source"), nb::arg("name"), nb::arg("options"),
           nb::arg("headers"), nb::arg("expressions"),
           "(True if it succeeded, code, the expressions' names in it, the log).");
  module.def("cuda_capabilities", &capabilities,
             "The compute capabilities of this process's devices; empty without a driver.");
}

}  // namespace callgate::bindings
