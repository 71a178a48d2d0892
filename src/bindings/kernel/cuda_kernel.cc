// Kernels for CUDA as Python makes them. Their calls don't come by here; only their failures do.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/kernel/kernel.h"
#include "bindings/python/gil.h"
#include "bindings/python/handle.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/nvrtc.h"

namespace callgate::bindings {
namespace {

using cuda::LaunchCallee;
using cuda::Nvrtc;

std::string string_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

using CudaKernelHandle = Handle<LaunchCallee>;

std::shared_ptr<LaunchCallee> make_callee(std::string name,
                                          const std::vector<std::pair<nb::bytes, int>>& images) {
  std::vector<cuda::Image> held;
  held.reserve(images.size());
  for (const auto& [code, capability] : images) held.push_back({string_of(code), capability});
  // Failures are the kernel's, whatever its variant.
  std::string kernel = name.substr(0, name.find('['));
  auto callee = std::make_shared<LaunchCallee>(std::move(name), std::move(held),
                                               failures_of(std::move(kernel)));
  callee->set_defer(&defer_kernel_failure);
  return callee;
}

// The capabilities of the devices that this process sees; none where there is no driver.
std::vector<int> capabilities() {
  try {
    std::vector<int> all(static_cast<std::size_t>(cuda::Device::count()));
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = cuda::Device::capability_of(static_cast<int>(i));
    return all;
  } catch (const Error&) {
    return {};  // no driver, or no device: a machine to compile on
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

void bind_cuda_kernel(nb::module_& module) {
  nb::class_<CudaKernelHandle>(module, "CudaKernel", nb::is_weak_referenceable(),
                               "The runtime's handle on a kernel's images for CUDA, by name.")
      .def(
          "__init__",
          [](CudaKernelHandle* self, std::string name,
             const std::vector<std::pair<nb::bytes, int>>& images) {
            new (self) CudaKernelHandle(make_callee(std::move(name), images));
          },
          nb::arg("name"), nb::arg("images"))
      .def_prop_ro("name", &CudaKernelHandle::name);
  nb::class_<Nvrtc>(module, "Nvrtc", "CUDA's run-time compiler, from a library.")
      .def_static("open", &Nvrtc::open, nb::arg("path"), nb::rv_policy::reference)
      .def_static("usual_name", &Nvrtc::usual_name)
      .def_prop_ro("version", &Nvrtc::version)
      .def_prop_ro("architectures", &Nvrtc::architectures)
      .def("compile", &compile, nb::arg("source"), nb::arg("name"), nb::arg("options"),
           nb::arg("headers"), nb::arg("expressions"),
           "(whether it succeeded, code, the expressions' names in it, the log).");
  module.def("cuda_capabilities", &capabilities,
             "Compute capabilities of the devices that this process sees; none without a driver.");
}

}  // namespace callgate::bindings
