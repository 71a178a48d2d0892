// See the header. The GIL is held by whoever comes from Python, and taken by what XLA calls.
#include "bindings/gate/gate.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/arrays/device.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "bindings/python/references.h"
#include "core/call.h"

namespace callgate::bindings {

Settings& Settings::instance() {
  static constinit Settings settings;
  return settings;
}

PyCallee::PyCallee(std::string name, nb::object function, nb::object bind, GateOptions options)
    : name_(std::move(name)),
      function_(function.release().ptr()),
      bind_(bind.is_none() ? nullptr : bind.release().ptr()),
      options_(options),
      private_(options.owned_inputs ? +kPrivateInputs : 0u) {}

PyCallee::~PyCallee() {
  release_later(function_);
  if (bind_ != nullptr) release_later(bind_);
}

std::shared_ptr<Site> PyCallee::specialise(SiteSpec spec) {
  GilScope gil;
  if (bind_ == nullptr) {
    Py_INCREF(function_);
    bool tuple = options_.flat_results || spec.spec == "*";
    return make_gate_site(shared_from_this(), function_, tuple, std::move(spec));
  }
  // bind(spec) -> (callable, whether results come and go as a tuple)
  nb::object bound = nb::steal(call_python(bind_, "s", spec.spec.c_str()));
  if (!bound.is_valid()) {
    throw Error(ErrorCode::kInvalidArgument, take_exception(name_, spec.site));
  }
  nb::object target = bound[0];
  bool tuple = nb::cast<bool>(bound[1]);
  return make_gate_site(shared_from_this(), target.release().ptr(), tuple, std::move(spec));
}

int PyCallee::traverse(visitproc visit, void* arg) {
  if (weak_from_this().use_count() != 1) return 0;
  Py_VISIT(function_);
  Py_VISIT(bind_);
  return 0;
}

void PyCallee::clear() {
  if (weak_from_this().use_count() != 1) return;
  Py_INCREF(Py_None);
  Py_DECREF(std::exchange(function_, Py_None));
  Py_XDECREF(std::exchange(bind_, nullptr));
}

void PyCallee::defer(const Error& error) {
  GilScope gil;
  call_deferred(error);
}

void PyCallee::enter_worker(bool of_device) {
  thread_local bool device_worker = false;
  if (std::exchange(device_worker, of_device) == of_device) return;
  ActiveGil gil;
  if (!gil) return;
  nb::object done =
      nb::steal(call_python(Hooks::instance().device_worker, "O", of_device ? Py_True : Py_False));
  if (!done.is_valid()) PyErr_WriteUnraisable(nullptr);
}

std::string PyCallee::self_wait(unsigned long thread) {
  ActiveGil gil;
  if (!gil) return {};
  nb::object text =
      nb::steal(call_python(Hooks::instance().self_wait, "sk", name_.c_str(), thread));
  if (text.is_valid()) return nb::cast<std::string>(text);
  PyErr_WriteUnraisable(nullptr);
  return {};
}

std::string PyCallee::stall_report(const std::string& call, bool timed_out) {
  GilScope gil;
  return stall_text("gate '" + name_ + "'", call, timed_out);
}

namespace {

using CalleeHandle = Handle<PyCallee>;
using CheckHandle = Handle<CheckCallee>;

Style style_of(const std::string& text) {
  return text == "inplace" ? Style::kInplace : text == "context" ? Style::kContext : Style::kReturn;
}

nb::dict stats_of(const CalleeHandle& handle) {
  const Counters& counters = handle.callee().counters();
  auto read = [](const std::atomic<std::int64_t>& counter) {
    return counter.load(std::memory_order_relaxed);  // see Counters
  };
  nb::dict stats;
  stats["calls"] = read(counters.calls);
  stats["errors"] = read(counters.errors);
  stats["bytes"] = read(counters.bytes);
  stats["python_ns"] = read(counters.python_ns);
  stats["gil_wait_ns"] = read(counters.gil_wait_ns);
  return stats;
}

// Python's cycle collector sees through the handle: a callable may refer to its own gate. Only
// while no executable shares the callee, since that one's reference is not Python's to follow.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  return nb::inst_ptr<CalleeHandle>(self)->callee().traverse(visit, arg);
}

int clear(PyObject* self) {
  nb::inst_ptr<CalleeHandle>(self)->callee().clear();
  return 0;
}

PyType_Slot handle_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                              {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                              {0, nullptr}};

int ordinal_of(const Context& context) {
  return context.call.stream == nullptr ? -1 : DeviceCall::of(context.call).device->ordinal();
}

enum class Stage { kInstantiate, kPrepare, kInitialize, kExecute };

void bind_context(nb::module_& module) {
  nb::enum_<Stage>(module, "ExecutionStage", "XLA's stages of a call; callables run in EXECUTE.")
      .value("INSTANTIATE", Stage::kInstantiate)
      .value("PREPARE", Stage::kPrepare)
      .value("INITIALIZE", Stage::kInitialize)
      .value("EXECUTE", Stage::kExecute);
  nb::class_<Context>(module, "Context", "Where and when a style=\"context\" gate runs.")
      .def_prop_ro("stage", [](const Context&) { return Stage::kExecute; })
      .def_prop_ro(
          "stream",
          [](const Context& c) { return reinterpret_cast<std::uintptr_t>(c.call.stream); },
          "XLA's CUDA stream as an integer (a CUstream); 0 on the CPU.")
      .def(
          "stream_as",
          [](const Context& c, const std::string& library) {
            return nb::handle(Hooks::instance().stream_as)(
                library, reinterpret_cast<std::uintptr_t>(c.call.stream), ordinal_of(c));
          },
          nb::arg("library"),
          "XLA's stream as an object of \"cupy\", \"torch\", \"numba\" or \"cuda\" "
          "(cuda.bindings'\nCUstream). An error on the CPU, and where the library is missing.")
      .def_prop_ro("ordinal", &ordinal_of,
                   "The GPU's number for CUDA in this process; -1 on the CPU.")
      .def_prop_ro(
          "device", [](const Context& c) { return c.call.device; },
          "The device's global id (jax.Device.id).")
      .def_prop_ro(
          "run", [](const Context& c) { return c.call.run; },
          "XLA's id of this run, the same on all its devices.")
      .def_prop_ro(
          "rank", [](const Context& c) { return std::max(c.call.shard, 0); },
          "The device's position among those that run the program: 0 to size - 1.")
      .def_prop_ro(
          "size", [](const Context& c) { return c.mesh->devices; },
          "How many devices run the program; 1 for a program of one device.")
      .def_prop_ro(
          "coordinates",
          [](const Context& c) {
            nb::dict coordinates;
            std::int64_t inner = c.mesh->devices;
            for (const auto& [name, extent] : c.mesh->axes) {
              inner /= extent;
              coordinates[name.c_str()] = std::max(c.call.shard, 0) / inner % extent;
            }
            return coordinates;
          },
          "The device's index along each axis of the program's mesh, by the axis's name; empty "
          "where the mesh is not known.");
}

}  // namespace

void bind_gate(nb::module_& module) {
  bind_context(module);
  module.def(
      "device_call",
      [] {
        const DeviceCall* call = DeviceCallScope::current();
        return call == nullptr
                   ? nb::object(nb::none())
                   : nb::object(nb::make_tuple(reinterpret_cast<std::uintptr_t>(call->stream),
                                               call->device->ordinal()));
      },
      nb::sig("def device_call() -> tuple[int, int] | None"),
      "(stream, GPU's number) of the call on a GPU that runs on this thread; None on the CPU.");
  nb::class_<CalleeHandle>(module, "Callee", nb::type_slots(handle_slots),
                           nb::is_weak_referenceable(),
                           "The runtime's handle on a Python callable, by name.")
      .def(
          "__init__",
          [](CalleeHandle* self, std::string name, nb::object function, nb::object bind,
             const std::string& style, const std::string& arrays, bool cast, bool owned_inputs,
             bool flat_results, bool own_thread, double timeout, bool native, bool default_stream,
             bool command_buffer) {
            GateOptions options{
                .style = style_of(style),
                .arrays = arrays == "buffer" ? Arrays::kBuffer : Arrays::kNumpy,
                .cast = cast,
                .owned_inputs = owned_inputs,
                .flat_results = flat_results,
                .own_thread = own_thread || timeout > 0,
                .native = native,
                .default_stream = default_stream,
                .command_buffer = command_buffer,
                .timeout = std::chrono::nanoseconds(static_cast<std::int64_t>(timeout * 1e9))};
            new (self) CalleeHandle(std::make_shared<PyCallee>(std::move(name), std::move(function),
                                                               std::move(bind), options));
          },
          nb::arg("name"), nb::arg("function"), nb::kw_only(), nb::arg("bind") = nb::none(),
          nb::arg("style") = "return", nb::arg("arrays") = "numpy", nb::arg("cast") = false,
          nb::arg("owned_inputs") = false, nb::arg("flat_results") = false,
          nb::arg("own_thread") = false, nb::arg("timeout") = 0.0, nb::arg("native") = false,
          nb::arg("default_stream") = false, nb::arg("command_buffer") = false)
      .def_prop_ro("name", &CalleeHandle::name)
      .def("stats", &stats_of);
  nb::class_<CheckHandle>(module, "Check", nb::is_weak_referenceable(),
                          "A callee that calls another one when its first operand is False.")
      .def(
          "__init__",
          [](CheckHandle* self, std::string name, const CalleeHandle& failed) {
            new (self) CheckHandle(std::make_shared<CheckCallee>(std::move(name), failed.shared()));
          },
          nb::arg("name"), nb::arg("failed"))
      .def_prop_ro("name", &CheckHandle::name);
}

}  // namespace callgate::bindings
