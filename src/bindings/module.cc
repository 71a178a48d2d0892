// The extension module `callgate._callgate`: the FFI targets, and what Python sets up and reads.
#define CALLGATE_IMPORT_NUMPY
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <thread>

#include "bindings/arrays/views.h"
#include "bindings/channel/channel.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/call.h"
#include "core/lifecycle.h"
#include "core/threads.h"
#include "cuda/completions.h"
#include "cuda/device.h"
#include "xla/handlers.h"

namespace callgate::bindings {
namespace {

// Hooks and dtypes are held for the life of the process.
PyObject* keep(nb::handle object) { return nb::borrow(object).release().ptr(); }

// All of them, by name.
void set_hooks(const nb::kwargs& given) {
  std::size_t known = 0;
#define X(name) hooks.name = keep(given[#name]), ++known;
  CALLGATE_HOOKS(X)
#undef X
  if (given.size() != known) throw nb::type_error("set_hooks: got a hook that is none");
  Registry::instance().set_resolver([](const std::string& name) {
    ActiveGil gil;
    if (!gil) return false;
    nb::object found = call_python(hooks.undefined, "s", name.c_str());
    if (found.is_valid()) return nb::cast<bool>(found);
    throw Error(ErrorCode::kInvalidArgument, take_exception(name, ""));
  });
}

nb::list dtype_codes() {
  nb::list codes;
#define X(identifier, code, name, bits) codes.append(nb::make_tuple(code, name));
  CALLGATE_DTYPES(X)
#undef X
  return codes;
}

// The handlers of each FFI target, by platform and target.
nb::dict targets() {
  using namespace xla_ffi;
  const struct {
    const char* platform;
    std::string_view target;
    XLA_FFI_Handler *instantiate, *execute;
  } all[] = {{"cpu", kGateTarget, gate_instantiate, gate_execute},
             {"cpu", kTapTarget, gate_instantiate, gate_execute},
             {"cpu", kKernelTarget, kernel_instantiate, kernel_execute},
             {"CUDA", kGateTarget, cuda_gate_instantiate, cuda_gate_execute},
             {"CUDA", kGraphTarget, cuda_gate_instantiate, cuda_graph_execute},
             {"CUDA", kTapTarget, cuda_gate_instantiate, cuda_graph_execute},
             {"CUDA", kKernelTarget, cuda_kernel_instantiate, cuda_kernel_execute},
             {"CUDA", kKernelScratchTarget, cuda_kernel_instantiate, cuda_kernel_scratch_execute}};
  nb::dict platforms;
  for (const auto& [platform, target, instantiate, execute] : all) {
    if (!platforms.contains(platform)) platforms[platform] = nb::dict();
    platforms[platform][nb::str(target.data(), target.size())] =
        dict_of("instantiate", nb::capsule(reinterpret_cast<void*>(instantiate)), "execute",
                nb::capsule(reinterpret_cast<void*>(execute)));
  }
  return platforms;
}

// Refuses further calls, waits for those inside, and joins callgate's threads. False when calls
// were still running after `seconds`; their threads then stop at their next step in Python.
bool shut_down(double seconds) {
  constexpr std::chrono::seconds kSecond(1);  // for what needs no Python any more
  bool quiet = without_gil([&] {              // calls inside need it to finish
    bool busy = Lifecycle::instance().active() != 0;
    bool left = Lifecycle::instance().close(seconds_of(seconds));
    if (left) WorkerPool::instance().stop();
    if (left) left = cuda::Completions::stop_all(kSecond);
    if (left) Watchdog::instance().stop();
    // A daemon thread that was inside has to get through XLA and JAX, back into Python's own code:
    // ended in between, for asking a finalizing interpreter for its GIL, it would end the process.
    if (busy && left) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return left;
  });
  stop_releasing();
  return quiet;
}

}  // namespace
}  // namespace callgate::bindings

NB_MODULE(_callgate, module) {
  using namespace callgate;
  using namespace callgate::bindings;
  if (_import_array() < 0) nb::raise_python_error();
  nb::set_leak_warnings(false);  // programs may outlive the module, and with them their gates
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const cuda::DriverError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (const Error& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });
  for (auto* bind : {bind_buffer, bind_process, bind_channel, bind_sinks, bind_gate, bind_kernel,
                     bind_stream, bind_progress, bind_upload})
    bind(module);
  module.def("targets", &targets, "By platform and target, for jax.ffi.");
  module.def("set_hooks", &set_hooks);
  module.def("dtype_codes", &dtype_codes);
  module.def("set_dtype", [](int code, nb::handle dtype) {
    descriptors()[static_cast<std::size_t>(code)] = reinterpret_cast<PyArray_Descr*>(keep(dtype));
  });
  module.def("registered_names", [] { return Registry::instance().names(); });
  module.def(
      "drain_devices",
      [](double seconds) {
        // What waits to be done may need it.
        return without_gil([&] { return cuda::Completions::drain_all(seconds_of(seconds)); });
      },
      nb::arg("seconds"), "Waits for what GPUs' programs have sent; False when time ran out.");
  module.def(
      "device_memory_in_use",
      [] {
        cuda::MemoryInUse in_use = cuda::memory_in_use();
        return nb::make_tuple(in_use.pinned, in_use.device);
      },
      "Bytes that copies between hosts and GPUs hold: (pinned memory, memory of GPUs).");
  module.def("abandon_devices", &cuda::Completions::abandon_all);
  module.def(
      "set_device_id", [](int ordinal, std::int64_t id) { cuda::Device::at(ordinal).set_id(id); },
      nb::arg("ordinal"), nb::arg("id"), "jax.Device.id of a GPU, by its number for CUDA.");
  module.def("active_calls", [] { return Lifecycle::instance().active(); });
  module.def("drain", &drain_released);
  module.def("shut_down", &shut_down, nb::arg("seconds"));
}
