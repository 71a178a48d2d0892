// SPDX-License-Identifier: Apache-2.0
// The extension module `callgate._callgate`: the FFI targets, the functions for Python, and events
// from outside the process's programs: Ctrl-C, in Python's terms, and the process's end.
//
// Python runs exit handlers in the reverse order of their registration. Handlers registered before
// callgate's run after it, and may still run programs. Records of such programs can't be delivered
// any more. They are counted, and the loss is reported when the C library ends the process. That
// happens after Python's end, so all of it is C++.
#define CALLGATE_IMPORT_NUMPY
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>

#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "channel/tap.h"
#include "core/call.h"
#include "core/lifecycle.h"
#include "core/lifetime.h"
#include "core/system.h"
#include "core/threads.h"
#include "cuda/completions.h"
#include "cuda/device.h"
#include "xla/handlers.h"

namespace callgate::bindings {
namespace {

// Holds hooks and dtypes for the process's life.
PyObject* keep(nb::handle object) { return nb::borrow(object).release().ptr(); }

// Sets all hooks, by name.
void set_hooks(const nb::kwargs& given) {
  std::size_t known = 0;
#define X(name) hooks.name = keep(given[#name]), ++known;
  CALLGATE_HOOKS(X)
#undef X
  if (given.size() != known) throw nb::type_error("set_hooks: got a hook that is none");
}

void let_go(PyObject* owner) {
  if (ActiveGil gil; gil) Py_DECREF(owner);
}

// Sets `define(name)`, which is called for a name in a program that the registry lacks. It returns
// the object that then has the name, or a list of the defined names. It is not one of the hooks,
// because a program may run before these are set.
void set_resolver(nb::handle define) {
  Registry::instance().set_resolver(
      [define = keep(define)](const std::string& name, std::vector<std::string>& defined) {
        ActiveGil gil;
        if (!gil) return std::shared_ptr<PyObject>();
        nb::object found = call_python(define, "s", name.c_str());
        if (found.is_valid() && nb::isinstance<nb::list>(found)) {
          defined = nb::cast<std::vector<std::string>>(found);
          return std::shared_ptr<PyObject>();
        }
        if (found.is_valid()) return std::shared_ptr<PyObject>(found.release().ptr(), &let_go);
        nb::python_error raised;
        std::string text = hooks.failed == nullptr ? raised.what() : failure_text(raised, name, "");
        throw Error(ErrorCode::kInvalidArgument, text);
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

// Refuses further calls, waits for active ones, and joins callgate's threads. False if calls were
// still running after `seconds`; their threads then stop at their next step in Python.
bool shut_down(double seconds) {
  constexpr std::chrono::seconds kSecond(1);  // for steps without Python
  bool quiet = without_gil([&] {              // active calls need it to finish
    bool busy = Lifecycle::instance().active() != 0;
    bool left = Lifecycle::instance().close(seconds_of(seconds));
    if (left) WorkerPool::instance().stop();
    if (left) WorkerPool::of_copies().stop();
    if (left) left = cuda::Completions::stop_all(kSecond);
    if (left) Watchdog::instance().stop();
    // A daemon thread that was inside must get through XLA and JAX, back into Python's own code. If
    // it ended in between, when it requests the GIL of a finalizing interpreter, it would end the
    // process.
    if (busy && left) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return left;
  });
  stop_releasing();
  return quiet;
}

// --- The process's end ---------------------------------------------------------------------------

struct ExitWatch {
  pid_t process = 0;
  std::map<std::string, std::uint64_t> sent_before;  // by channel
  std::atomic<bool> failed{false};                   // relaxed: used by one thread
};

std::map<std::string, std::uint64_t> sent_by_channel() {
  std::map<std::string, std::uint64_t> all;
  for (const auto& channel : Channels::instance().all())
    all[channel->options().name] = channel->stats().sent;
  return all;
}

void report_lost(const std::string& what, std::uint64_t count) {
  std::fprintf(stderr,
               "callgate: not delivered at the end of the program: %s: %llu record(s) that came "
               "after callgate's end, from a thread that still ran or an atexit handler registered "
               "before callgate was imported\n",
               what.c_str(), static_cast<unsigned long long>(count));
}

void report_late() noexcept try {
  for (const auto& [name, count] : sent_by_channel()) {
    std::uint64_t known = immortal<ExitWatch>().sent_before[name];
    if (count > known) report_lost("channel '" + name + "'", count - known);
  }
  for (const auto& [name, count] : LateCalls::instance().all()) {
    std::string callee = "'" + name + "'";  // "tap 'name'" for "tap:name"
    if (auto colon = name.find(':'); colon != std::string::npos)
      callee = name.substr(0, colon) + " '" + name.substr(colon + 1) + "'";
    report_lost(callee, count);
  }
} catch (...) {  // NOLINT(bugprone-empty-catch): no receiver is left
}

// Runs when the C library ends the process.
void at_process_end(int status, void*) {
  if (getpid() != immortal<ExitWatch>().process)
    return;  // a fork's child, which inherits the handlers
  report_late();
  // The remaining handlers run within this call, as in glibc.
  if (status == 0 && immortal<ExitWatch>().failed.load(std::memory_order_relaxed))
    std::exit(EXIT_FAILURE);
}

void bind_process(nb::module_& module) {
  // Held for the process's life.
  static PyObject *getsignal, *python_handler;
  nb::module_ signals = nb::module_::import_("_signal");
  getsignal = nb::object(signals.attr("getsignal")).release().ptr();
  python_handler = nb::object(signals.attr("default_int_handler")).release().ptr();
  // True if Python's own handler is installed, which raises KeyboardInterrupt as soon as the main
  // thread is back in Python. Only in C, because Python code would receive the interrupt here.
  Interrupts::set_judge([] {
    GilScope gil;
    nb::object handler = call_python(getsignal, "i", SIGINT);
    if (!handler.is_valid()) PyErr_Clear();
    return handler.ptr() == python_handler;
  });
  // For a waiting sender, which asks many times a second. Earlier interrupts have been handled.
  Channel::set_interrupted([] {
    Interrupts::watch();
    return Interrupts::recent();
  });
  module.def("interrupted_recently", &Interrupts::recent,
             "True if there was a Ctrl-C within the last second.");
  module.def("interrupts", &Interrupts::count, "The number of Ctrl-C so far.");
  module.def(
      "interrupted_since", &Interrupts::end_since, nb::arg("count"),
      "True if there was a Ctrl-C after this number of them that must end the running code.");
  module.def("end_programs", &Interrupts::end_all, nb::arg("on"),
             "Makes every call end its program, until called with False.");
  module.def(
      "watch_exit",
      [] {  // once
        immortal<ExitWatch>().process = getpid();
        immortal<ExitWatch>().sent_before = sent_by_channel();
        call_at_end(&at_process_end);
      },
      "From now on, tapped values are reported as too late.");
  module.def("fail_exit",
             [] { immortal<ExitWatch>().failed.store(true, std::memory_order_relaxed); });
}

// Raises in a process that already has a callgate. Two would share nanobind's types, XLA's targets
// and the parts of JAX that the first one has changed, and would end the process. It happens if
// Python drops its modules, for example in tests.
void refuse_second_copy() {
  constexpr const char* kMark = "_callgate_module";  // an attribute of `sys`, which is shared
  if (PySys_GetObject(kMark) != nullptr)
    throw nb::import_error(
        "callgate is loaded in this process already: it can be imported only once (a second "
        "installation is on sys.path, or the modules were removed from sys.modules); start a new "
        "process, or restart the notebook's kernel");
  PySys_SetObject(kMark, Py_True);
}

}  // namespace
}  // namespace callgate::bindings

NB_MODULE(_callgate, module) {
  using namespace callgate;
  using namespace callgate::bindings;
  refuse_second_copy();
  if (_import_array() < 0) nb::raise_python_error();
  nb::set_leak_warnings(false);  // programs, and so gates, may outlive the module
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const cuda::DriverError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (const Error& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });
  for (auto* bind : {bind_buffer,  bind_process,  bind_channel, bind_py_consumer, bind_sinks,
                     bind_threads, bind_gate,     bind_tape,    bind_kernel,      bind_peers,
                     bind_stream,  bind_progress, bind_jitted,  bind_signs,       bind_live_objects,
                     bind_upload,  bind_workers,  bind_serve,   bind_executors,   bind_steer})
    bind(module);
  module.def("targets", &targets, "The FFI handlers by platform and target, for jax.ffi.");
  module.def("set_hooks", &set_hooks);
  module.def("set_resolver", &set_resolver, nb::arg("define"));
  module.def("dtype_codes", &dtype_codes);
  module.def("set_dtype", [](int code, nb::handle dtype) {
    descriptors[static_cast<std::size_t>(code)] = reinterpret_cast<PyArray_Descr*>(keep(dtype));
  });
  module.def("registered_names", [] { return Registry::instance().names(); });
  module.def(
      "is_registered", [](const std::string& name) { return Registry::instance().has(name); },
      nb::arg("name"));
  module.def(
      "drain_devices",
      [](double seconds) {
        // Waiting tasks may need it.
        return without_gil([&] { return cuda::Completions::drain_all(seconds_of(seconds)); });
      },
      nb::arg("seconds"),
      "Waits for the values sent by programs on GPUs; False if the time ran out.");
  module.def(
      "device_memory_in_use",
      [] {
        cuda::MemoryInUse in_use = cuda::memory_in_use();
        return nb::make_tuple(in_use.pinned, in_use.device);
      },
      "The bytes held by copies between host and GPUs: (pinned memory, GPU memory).");
  module.def("abandon_devices", [] {
    cuda::Completions::abandon_all();
    cuda::Pool::abandon_all();
  });
  module.def(
      "set_device_id", [](int ordinal, std::int64_t id) { cuda::Device::at(ordinal).set_id(id); },
      nb::arg("ordinal"), nb::arg("id"), "Sets the jax.Device.id of a GPU, by its number in CUDA.");
  module.def("active_calls", [] { return Lifecycle::instance().active(); });
  module.def("drain", &drain_released);
  module.def("shut_down", &shut_down, nb::arg("seconds"));
}
