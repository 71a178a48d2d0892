// One call site of a gate: how a call of a compiled program becomes a call of the user's function.
//
// Takes the GIL once a call, makes one view per array and lane, vectorcalls, copies results (style
// return), and looks at the views' reference counts for escapes. On the fast path nothing is
// allocated but the views, and no lock is taken but the GIL. Everything below
// `PyGateSite::run_timed` holds the GIL.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/buffer.h"
#include "bindings/arrays/device.h"
#include "bindings/arrays/views.h"
#include "bindings/gate/gate.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "bindings/python/references.h"
#include "core/threads.h"

namespace callgate::bindings {
namespace {

// New references to the arrays of one lane, as arguments; small calls stay on the stack.
class Arguments : Immovable {
 public:
  explicit Arguments(std::size_t capacity) {
    if (capacity > inline_.size()) overflow_.resize(capacity);
  }
  ~Arguments() {
    for (PyObject* object : all()) Py_XDECREF(object);
  }

  // Takes a new reference; false when it is null.
  bool push(PyObject* object) {
    if (object == nullptr) return false;
    data()[count_++] = object;
    return true;
  }
  std::span<PyObject*> all() { return {data(), count_}; }
  PyObject** data() { return overflow_.empty() ? inline_.data() : overflow_.data(); }
  std::size_t size() const { return count_; }

 private:
  std::array<PyObject*, 24> inline_;
  std::vector<PyObject*> overflow_;
  std::size_t count_ = 0;
};

// A call on a GPU while it runs.
struct OnGpu : DeviceCall {
  unsigned default_streams = 0;  // as Buffer's, of all its buffers
};

constexpr std::int64_t kLegacyStream = 1, kThreadStream = 2;

class PyGateSite final : public Site {
 public:
  PyGateSite(std::shared_ptr<PyCallee> callee, PyObject* target, bool tuple_results, SiteSpec spec)
      : callee_(std::move(callee)),
        options_(callee_->options()),
        target_(target),
        tuple_results_(tuple_results),
        spec_(std::move(spec)),
        mesh_(std::make_shared<const Mesh>(std::move(spec_.mesh))) {}
  ~PyGateSite() override { release_later(target_); }

  void run(const Call& call) override {
    auto stall = Settings::instance().stall_ns.load(std::memory_order_relaxed);  // late is fine
    if (stall == 0) return run_timed(call);
    StallWatch watch(std::chrono::nanoseconds(stall), callee_,
                     [text = to_string(call.operands)] { return text; });
    run_timed(call);
  }

 private:
  void run_timed(const Call& call) {
    Counters& counters = callee_->counters();
    std::size_t bytes = 0;
    for (const ArrayView& view : call.operands) bytes += view.nbytes();
    for (const ArrayView& view : call.results) bytes += view.nbytes();
    counters.calls.fetch_add(spec_.lanes.count(), std::memory_order_relaxed);  // see Counters
    counters.bytes.fetch_add(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
    if (!Recorder::instance().timing()) {
      GilScope gil;
      if (!run_where_it_is(call)) fail(call);
      return;
    }
    std::int64_t start = Recorder::now_ns();
    GilScope gil;
    std::int64_t locked = Recorder::now_ns();
    bool ok = run_where_it_is(call);
    Recorder::instance().record(callee_->name(), counters, start, locked, Recorder::now_ns());
    if (!ok) fail(call);
  }

  // With a Python error set.
  [[noreturn]] void fail(const Call& call) {
    callee_->counters().errors.fetch_add(1, std::memory_order_relaxed);
    throw Error::verbatim(ErrorCode::kInternal,
                          take_exception(callee_->name(), spec_.site, spec_.layout, call.context));
  }

  // False with a Python error, as all below.
  bool run_where_it_is(const Call& call) {
    if (!options_.native || call.context.stream == nullptr) {
      DeviceCallScope on_host(nullptr);
      return run_all(call, nullptr);
    }
    try {
      bool ok = false;
      cuda::named(callee_->name(), [&] {
        drain_released();  // the results of earlier calls hold a GPU's memory
        OnGpu gpu{DeviceCall::of(call.context)};
        DeviceCallScope on_device(&gpu);
        ok = run_on_device(call, gpu);
      });
      return ok;
    } catch (const Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return false;
    }
  }

  bool run_on_device(const Call& call, OnGpu& gpu) {
    bool recorded = options_.command_buffer && cuda::capturing(gpu.stream);
    // Default streams take no part in recordings.
    bool joins = options_.default_stream && !recorded;
    if (joins) gpu.hold_back(kLegacyStream);
    if (joins) gpu.default_streams = 1u << kLegacyStream;
    bool ok = run_all(call, &gpu);
    if (recorded) return ok && was_recorded(gpu);
    for (std::int64_t stream : {kLegacyStream, kThreadStream}) {
      if ((gpu.default_streams & (1u << stream)) != 0) gpu.wait_for(stream);
    }
    return ok;
  }

  bool was_recorded(const DeviceCall& call) {
    if (!capture_failed(call)) return true;
    std::string text =
        "gate '" + callee_->name() +
        "': command_buffer=True: what it did can't be recorded. Expected: launches "
        "and asynchronous copies on XLA's stream, with no waiting, no allocation by "
        "the driver and no other stream that does not come back to it; got a capture "
        "that CUDA has given up";
    PyErr_SetString(Hooks::instance().capture_error, text.c_str());
    return false;
  }

  bool run_all(const Call& call, OnGpu* gpu) {
    const Lanes& lanes = spec_.lanes;
    if (lanes.empty()) return run_lane(call.operands, call.results, call.context, gpu);
    try {
      lanes.check(call.operands, call.results);
    } catch (const Error& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
      return false;
    }
    std::vector<ArrayView> operands(call.operands.size()), results(call.results.size());
    for (std::int64_t lane = 0; lane < lanes.count(); ++lane) {
      lanes.select_operands(lane, call.operands, operands);
      lanes.select_results(lane, call.results, results);
      if (!run_lane(operands, results, call.context, gpu)) return false;
    }
    return true;
  }

  // One call of the callable.
  bool run_lane(std::span<const ArrayView> operands, std::span<ArrayView> results,
                const CallContext& context, OnGpu* gpu) {
    // Once: another thread's call may change it. A GPU's memory is never copied here.
    unsigned privately = gpu == nullptr ? callee_->private_views() : 0;
    bool own_inputs = (privately & kPrivateInputs) != 0;
    bool own_results = (privately & kPrivateResults) != 0;
    Arguments inputs(operands.size()), outputs(results.size());
    for (const ArrayView& view : operands) {
      if (!inputs.push(make_argument(view, /*writable=*/false, context.device, gpu, own_inputs)))
        return false;
    }
    if (options_.style != Style::kReturn) {
      for (const ArrayView& view : results) {
        if (!outputs.push(make_argument(view, /*writable=*/true, context.device, gpu, own_results)))
          return false;
      }
    }
    // On a GPU it is slow: it waits for the stream. For debugging.
    bool check = Settings::instance().check_writes.load(std::memory_order_relaxed) &&
                 !(options_.command_buffer && gpu != nullptr);
    std::vector<std::size_t> sums;
    if (check) sums = checksums(operands, gpu);
    nb::object result = invoke(inputs, outputs, context);
    if (gpu != nullptr) gpu->make_current();
    bool ok = result.is_valid() && take(results, result, gpu);
    result.reset();
    if (gpu != nullptr) {
      for (Arguments* views : {&inputs, &outputs}) {
        for (PyObject* view : views->all())
          gpu->default_streams |= nb::cast<const Buffer&>(nb::handle(view)).default_streams;
      }
    }
    Views in{"argument", inputs, operands}, out{"result", outputs, results};
    if (!settle_views(own_inputs ? nullptr : &in, own_results ? nullptr : &out, ok)) return false;
    if (own_results && !write_back(results, outputs)) return false;
    return ok && (!check || unwritten(sums, checksums(operands, gpu)));
  }

  static std::vector<std::size_t> checksums(std::span<const ArrayView> views,
                                            const DeviceCall* gpu) {
    if (gpu != nullptr) return device_checksums(*gpu, views);
    std::vector<std::size_t> sums;
    for (const ArrayView& view : views) sums.push_back(checksum(view));
    return sums;
  }

  // What the callable gets for an array of the call; `own` for a copy that it may keep.
  PyObject* make_argument(const ArrayView& view, bool writable, std::int64_t device,
                          const DeviceCall* gpu, bool own) const {
    if (options_.arrays == Arrays::kBuffer || gpu != nullptr) {
      PyObject* buffer = make_buffer(view, writable, device, gpu);
      if (own && buffer != nullptr) nb::cast<Buffer&>(nb::handle(buffer)).detach();
      return buffer;
    }
    return own ? make_copy(view) : make_view(view, writable);
  }

  // Calls target(*inputs), target(out, *inputs) or target(context, out, *inputs).
  nb::object invoke(Arguments& inputs, Arguments& outputs, const CallContext& context) {
    if (options_.style == Style::kReturn) return vectorcall(inputs);
    Arguments arguments(inputs.size() + 2);
    if (options_.style == Style::kContext) {
      arguments.push(nb::cast(Context{context, mesh_}).release().ptr());
    }
    if (!arguments.push(out_argument(outputs))) return {};
    for (PyObject* input : inputs.all()) {
      Py_INCREF(input);
      arguments.push(input);
    }
    return vectorcall(arguments);
  }

  nb::object vectorcall(Arguments& arguments) const {
    return nb::steal(running_python(
        [&] { return PyObject_Vectorcall(target_, arguments.data(), arguments.size(), nullptr); }));
  }

  PyObject* out_argument(Arguments& outputs) const {
    if (!tuple_results_) {
      Py_INCREF(outputs.data()[0]);
      return outputs.data()[0];
    }
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(outputs.size()));
    if (tuple == nullptr) return nullptr;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      Py_INCREF(outputs.data()[i]);
      PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), outputs.data()[i]);
    }
    return tuple;
  }

  // The views of one kind of a call, and the memory that they show.
  struct Views {
    const char* kind;
    Arguments& objects;
    std::span<const ArrayView> memory;

    bool escaped() const {
      return std::ranges::any_of(objects.all(),
                                 [](PyObject* view) { return Py_REFCNT(view) != 1; });
    }
    void add_to(nb::list& suspects) const {
      for (std::size_t i = 0; i < objects.size(); ++i) {
        suspects.append(nb::make_tuple(kind, i, nb::borrow(objects.data()[i]),
                                       reinterpret_cast<std::uintptr_t>(memory[i].data),
                                       memory[i].nbytes()));
      }
    }
  };

  // Looks for views that outlived the call, as private ones may, for which a kind is null. Where
  // one did, Python's `escaped` hook finds who holds them, and has what still refers to the views
  // made safe; what can't be makes the callee's later views private. `ok` is false while the call's
  // own exception is set: its frames may hold views, which is no error of the user's. False with a
  // Python error: the call's own, or that of an escape.
  bool settle_views(const Views* inputs, const Views* outputs, bool ok) {
    bool escaped = inputs != nullptr && inputs->escaped();
    escaped = (outputs != nullptr && outputs->escaped()) || escaped;
    if (!escaped) return ok;
    nb::object raised = ok ? nb::none() : take_raised();  // set aside while the hook runs
    nb::list suspects;
    if (inputs != nullptr) inputs->add_to(suspects);
    if (outputs != nullptr) outputs->add_to(suspects);
    nb::object make_private = nb::cpp_function([callee = callee_](const std::string& kind) {
      callee->make_private(kind == "argument" ? kPrivateInputs : kPrivateResults);
    });
    nb::object done = nb::steal(call_python(Hooks::instance().escaped, "ssOOO",
                                            callee_->name().c_str(), spec_.spec.c_str(),
                                            suspects.ptr(), raised.ptr(), make_private.ptr()));
    if (ok) return done.is_valid();
    if (!done.is_valid()) PyErr_Clear();  // the call's own exception matters more
    restore_raised(std::move(raised));
    return false;
  }

  // What the callable gave back, into XLA's memory; with another style it is to be None.
  bool take(std::span<ArrayView> results, const nb::object& value, const DeviceCall* gpu) const {
    if (options_.style != Style::kReturn) {
      if (value.is_none()) return true;
      return mismatch(-1, "None (results are written into `out`)",
                      std::string("a value of type ") + nb::type_name(value.type()).c_str());
    }
    std::optional<CopySources> held;
    CopySources* sources = gpu == nullptr ? nullptr : &held.emplace(*gpu);
    if (!tuple_results_) return take_one(results[0], value.ptr(), 0, sources);
    if (results.empty() && value.is_none()) return true;
    bool sequence =
        PyTuple_Check(value.ptr()) || (options_.flat_results && PyList_Check(value.ptr()));
    if (!sequence || nb::len(value) != results.size()) {
      std::string got = nb::type_name(value.type()).c_str();
      if (sequence) got += " of " + std::to_string(nb::len(value));
      return mismatch(-1, "a tuple of " + std::to_string(results.size()) + " arrays", got);
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      nb::object item = value[i];
      if (!take_one(results[i], item.ptr(), i, sources)) return false;
    }
    return true;
  }

  // What the callable wrote into private results.
  bool write_back(std::span<ArrayView> results, Arguments& outputs) const {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      PyObject* value = outputs.data()[i];
      if (options_.arrays == Arrays::kBuffer) {
        copy_to(results[i], nb::cast<const Buffer&>(nb::handle(value)).view.data);
      } else if (!take_one(results[i], value, i, /*sources=*/nullptr)) {
        return false;
      }
    }
    return true;
  }

  // `sources` are null on the host.
  bool take_one(const ArrayView& target, PyObject* value, std::size_t index,
                CopySources* sources) const {
    auto number = static_cast<int>(index);
    if (value == Py_None) return mismatch(number, to_string(target), "None");
    std::string got;
    Stored stored = sources == nullptr
                        ? store(target, value, options_.cast)
                        : store_on_device(target, value, options_.cast, *sources, got);
    if (stored != Stored::kMismatch) return stored == Stored::kYes;
    if (sources == nullptr && !describe(value, got)) return false;
    return mismatch(number, to_string(target), got);
  }

  bool mismatch(int index, const std::string& expected, const std::string& got) const {
    nb::object made =
        nb::steal(call_python(Hooks::instance().result_error, "ssiss", callee_->name().c_str(),
                              spec_.spec.c_str(), index, expected.c_str(), got.c_str()));
    return false;  // the hook raises
  }

  bool unwritten(const std::vector<std::size_t>& before, const std::vector<std::size_t>& after) {
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (before[i] == after[i]) continue;
      nb::object made =
          nb::steal(call_python(Hooks::instance().input_written, "ssi", callee_->name().c_str(),
                                spec_.spec.c_str(), static_cast<int>(i)));
      return false;  // the hook raises
    }
    return true;
  }

  std::shared_ptr<PyCallee> callee_;
  const GateOptions& options_;
  PyObject* target_;
  bool tuple_results_;
  SiteSpec spec_;
  std::shared_ptr<const Mesh> mesh_;
};

}  // namespace

std::shared_ptr<Site> make_gate_site(std::shared_ptr<PyCallee> callee, PyObject* target,
                                     bool tuple_results, SiteSpec spec) {
  return std::make_shared<PyGateSite>(std::move(callee), target, tuple_results, std::move(spec));
}

}  // namespace callgate::bindings
