// See the header. The GIL is held by whoever comes from Python, and taken by what XLA calls.
#include "bindings/gate/gate.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/arrays/device_call.h"
#include "bindings/gate/gate_site.h"
#include "bindings/python/deferred.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/check.h"
#include "core/lifecycle.h"
#include "core/registry.h"

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

void PyCallee::defer(const Failure& failure) {
  GilScope gil;
  call_deferred(failure);
}

void PyCallee::enter_device_worker() {
  thread_local bool entered = false;
  if (std::exchange(entered, true)) return;
  ActiveCall active;
  if (!active.entered()) return;
  GilScope gil;
  nb::object done = nb::steal(call_python(Hooks::instance().device_worker, ""));
  if (!done.is_valid()) PyErr_WriteUnraisable(nullptr);
}

std::string PyCallee::self_wait(unsigned long thread) {
  ActiveCall active;
  if (!active.entered()) return {};
  GilScope gil;
  nb::object text =
      nb::steal(call_python(Hooks::instance().self_wait, "sk", name_.c_str(), thread));
  if (text.is_valid()) return nb::cast<std::string>(text);
  PyErr_WriteUnraisable(nullptr);
  return {};
}

std::string PyCallee::stall_report(const std::string& call, bool timed_out) {
  GilScope gil;
  nb::object text =
      nb::steal(call_hook(Hooks::instance().stalled, "ssO", ("gate '" + name_ + "'").c_str(),
                          call.c_str(), timed_out ? Py_True : Py_False));
  if (text.is_valid()) return text_of(text);
  PyErr_Clear();
  return "callgate: gate '" + name_ + "' called with " + call + " is stalled";
}

namespace {

// The Python object `Callee`: keeps the callee, and its name, alive.
class CalleeHandle {
 public:
  explicit CalleeHandle(std::shared_ptr<PyCallee> callee) : callee_(std::move(callee)) {
    Registry::instance().add(callee_);
  }
  CalleeHandle(CalleeHandle&&) = default;
  ~CalleeHandle() {
    if (callee_ == nullptr) return;
    Registry::instance().remove(*callee_);
    callee_.reset();
    drain_released();  // the GIL is held: the callable may die at once
  }

  PyCallee& callee() const { return *callee_; }
  const std::shared_ptr<PyCallee>& shared() const { return callee_; }

 private:
  std::shared_ptr<PyCallee> callee_;
};

// The Python object `Check`: keeps the check, and its name, alive.
class CheckHandle {
 public:
  CheckHandle(std::string name, const CalleeHandle& failed)
      : callee_(std::make_shared<CheckCallee>(std::move(name), failed.shared())) {
    Registry::instance().add(callee_);
  }
  CheckHandle(CheckHandle&&) = default;
  ~CheckHandle() {
    if (callee_ != nullptr) Registry::instance().remove(*callee_);
  }

  const std::string& name() const { return callee_->name(); }

 private:
  std::shared_ptr<CheckCallee> callee_;
};

GateOptions parse_options(const std::string& style, const std::string& arrays, double timeout) {
  GateOptions options;
  options.style = style == "inplace"   ? Style::kInplace
                  : style == "context" ? Style::kContext
                                       : Style::kReturn;
  options.arrays = arrays == "buffer" ? Arrays::kBuffer : Arrays::kNumpy;
  options.timeout = std::chrono::nanoseconds(static_cast<std::int64_t>(timeout * 1e9));
  return options;
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

// The mesh as programs hold it (SiteSpec::mesh).
struct Mesh {
  std::int64_t size = 1;
  std::vector<std::pair<std::string, std::int64_t>> axes;  // outermost first

  explicit Mesh(std::string_view text) {
    if (text.empty()) return;
    std::size_t bar = text.find('|');
    size = number(text.substr(0, bar));
    std::string_view rest =
        bar == std::string_view::npos ? std::string_view() : text.substr(bar + 1);
    while (!rest.empty()) {
      std::string_view axis = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(axis.size() + 1, rest.size()));
      std::size_t equals = axis.rfind('=');
      axes.emplace_back(axis.substr(0, equals), number(axis.substr(equals + 1)));
    }
  }

 private:
  static std::int64_t number(std::string_view text) {
    std::int64_t value = 1;
    std::from_chars(text.data(), text.data() + text.size(), value);  // our own text
    return std::max<std::int64_t>(value, 1);
  }
};

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
            int ordinal = c.call.stream == nullptr ? -1 : DeviceCall::of(c.call).device->ordinal();
            return nb::handle(Hooks::instance().stream_as)(
                library, reinterpret_cast<std::uintptr_t>(c.call.stream), ordinal);
          },
          nb::arg("library"),
          "XLA's stream as an object of \"cupy\", \"torch\", \"numba\" or \"cuda\" "
          "(cuda.bindings'\nCUstream). An error on the CPU, and where the library is missing.")
      .def_prop_ro(
          "ordinal",
          [](const Context& c) {
            return c.call.stream == nullptr ? -1 : DeviceCall::of(c.call).device->ordinal();
          },
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
          "size", [](const Context& c) { return Mesh(c.mesh).size; },
          "How many devices run the program; 1 for a program of one device.")
      .def_prop_ro(
          "coordinates",
          [](const Context& c) {
            nb::dict coordinates;
            Mesh mesh(c.mesh);
            std::int64_t inner = mesh.size;
            for (const auto& [name, extent] : mesh.axes) {
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
            drain_released();
            GateOptions options = parse_options(style, arrays, timeout);
            options.cast = cast;
            options.owned_inputs = owned_inputs;
            options.flat_results = flat_results;
            options.own_thread = own_thread || timeout > 0;
            options.native = native;
            options.default_stream = default_stream;
            options.command_buffer = command_buffer;
            new (self) CalleeHandle(std::make_shared<PyCallee>(std::move(name), std::move(function),
                                                               std::move(bind), options));
          },
          nb::arg("name"), nb::arg("function"), nb::kw_only(), nb::arg("bind") = nb::none(),
          nb::arg("style") = "return", nb::arg("arrays") = "numpy", nb::arg("cast") = false,
          nb::arg("owned_inputs") = false, nb::arg("flat_results") = false,
          nb::arg("own_thread") = false, nb::arg("timeout") = 0.0, nb::arg("native") = false,
          nb::arg("default_stream") = false, nb::arg("command_buffer") = false)
      .def_prop_ro("name", [](const CalleeHandle& handle) { return handle.callee().name(); })
      .def("stats", &stats_of);
  nb::class_<CheckHandle>(module, "Check", nb::is_weak_referenceable(),
                          "A callee that calls another one when its first operand is False.")
      .def(nb::init<std::string, const CalleeHandle&>(), nb::arg("name"), nb::arg("failed"))
      .def_prop_ro("name", &CheckHandle::name);
}

}  // namespace callgate::bindings
