// See the header. Everything below `PyGateSite::run_timed` holds the GIL.
#include "bindings/gate/gate_site.h"

#include <nanobind/stl/string.h>

#include <utility>
#include <vector>

#include "bindings/arrays/buffer.h"
#include "bindings/arrays/device_call.h"
#include "bindings/arrays/escapes.h"
#include "bindings/arrays/views.h"
#include "bindings/gate/gate_results.h"
#include "bindings/python/arguments.h"
#include "bindings/python/deferred.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/stall.h"

namespace callgate::bindings {
namespace {

// A call on a GPU while it runs.
struct OnGpu {
  DeviceCall call;
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
        mesh_(std::make_shared<const Mesh>(std::move(spec_.mesh))),
        results_(*callee_, spec_.spec, tuple_results) {}
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
    counters.calls.fetch_add(spec_.lanes.count(), std::memory_order_relaxed);  // see Counters
    count_bytes(call, counters);
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

  static void count_bytes(const Call& call, Counters& counters) {
    std::size_t bytes = 0;
    for (const ArrayView& view : call.operands) bytes += view.nbytes();
    for (const ArrayView& view : call.results) bytes += view.nbytes();
    counters.bytes.fetch_add(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  }

  // False with a Python error, as all below.
  bool run_where_it_is(const Call& call) {
    bool native = options_.native && call.context.stream != nullptr;
    if (!native) {
      DeviceCallScope on_host(nullptr);
      return run_all(call, nullptr);
    }
    try {
      drain_released();  // the results of earlier calls hold a GPU's memory
      OnGpu gpu{DeviceCall::of(call.context)};
      DeviceCallScope on_device(&gpu.call);
      return run_on_device(call, gpu);
    } catch (const Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return false;
    }
  }

  bool run_on_device(const Call& call, OnGpu& gpu) {
    bool recorded = options_.command_buffer && cuda::capturing(gpu.call.stream);
    // Default streams take no part in recordings.
    bool joins = options_.default_stream && !recorded;
    if (joins) gpu.call.hold_back(kLegacyStream);
    if (joins) gpu.default_streams = 1u << kLegacyStream;
    bool ok = run_all(call, &gpu);
    if (recorded) return ok && was_recorded(gpu.call);
    for (std::int64_t stream : {kLegacyStream, kThreadStream}) {
      if ((gpu.default_streams & (1u << stream)) != 0) gpu.call.wait_for(stream);
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
    return spec_.lanes.empty() ? run_lane(call.operands, call.results, call.context, gpu)
                               : loop_lanes(call, gpu);
  }

  bool loop_lanes(const Call& call, OnGpu* gpu) {
    try {
      spec_.lanes.check(call.operands, call.results);
    } catch (const Error& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
      return false;
    }
    std::vector<ArrayView> operands(call.operands.size()), results(call.results.size());
    for (std::int64_t lane = 0; lane < spec_.lanes.count(); ++lane) {
      spec_.lanes.select_operands(lane, call.operands, operands);
      spec_.lanes.select_results(lane, call.results, results);
      if (!run_lane(operands, results, call.context, gpu)) return false;
    }
    return true;
  }

  // One call of the callable.
  bool run_lane(std::span<const ArrayView> operands, std::span<ArrayView> results,
                const CallContext& context, OnGpu* gpu) {
    const DeviceCall* on_gpu = gpu == nullptr ? nullptr : &gpu->call;
    // Once: another thread's call may change it. A GPU's memory is never copied here.
    unsigned privately = on_gpu == nullptr ? callee_->private_views() : 0;
    Arguments inputs(operands.size());
    Arguments outputs(results.size());
    for (const ArrayView& view : operands) {
      bool own = (privately & kPrivateInputs) != 0;
      if (!inputs.push(make_argument(view, /*writable=*/false, context.device, on_gpu, own)))
        return false;
    }
    if (options_.style != Style::kReturn) {
      for (const ArrayView& view : results) {
        bool own = (privately & kPrivateResults) != 0;
        if (!outputs.push(make_argument(view, /*writable=*/true, context.device, on_gpu, own)))
          return false;
      }
    }
    // On a GPU it is slow: it waits for the stream. For debugging.
    bool check = Settings::instance().check_writes.load(std::memory_order_relaxed);
    check = check && !(options_.command_buffer && gpu != nullptr);
    std::vector<std::size_t> sums;
    if (check) sums = checksums(operands, on_gpu);
    nb::object result = invoke(inputs, outputs, context);
    if (gpu != nullptr) gpu->call.make_current();
    bool ok = result.is_valid() &&
              (options_.style == Style::kReturn ? results_.take(results, result, on_gpu)
                                                : results_.returned_none(result));
    result.reset();
    if (gpu != nullptr) note_default_streams(inputs, outputs, *gpu);
    if (!settle_views(inputs, outputs, operands, results, ok, privately)) return false;
    if ((privately & kPrivateResults) != 0 && !results_.write_back(results, outputs)) return false;
    if (check && ok) ok = unwritten(sums, checksums(operands, on_gpu));
    return ok;
  }

  static std::vector<std::size_t> checksums(std::span<const ArrayView> views,
                                            const DeviceCall* gpu) {
    if (gpu != nullptr) return device_checksums(*gpu, views);
    std::vector<std::size_t> sums;
    for (const ArrayView& view : views) sums.push_back(checksum(view));
    return sums;
  }

  static void note_default_streams(Arguments& inputs, Arguments& outputs, OnGpu& gpu) {
    for (Arguments* views : {&inputs, &outputs}) {
      for (PyObject* view : views->all())
        gpu.default_streams |= nb::cast<const Buffer&>(nb::handle(view)).default_streams;
    }
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

  // Looks for views that outlived the call, as private ones may, and leaves XLA's memory behind
  // where one did. `ok` is false while the call's own exception is set.
  bool settle_views(Arguments& inputs, Arguments& outputs, std::span<const ArrayView> operands,
                    std::span<ArrayView> results, bool ok, unsigned privately) {
    bool escaped = false;
    if ((privately & kPrivateInputs) == 0) {
      for (PyObject* view : inputs.all()) escaped |= Py_REFCNT(view) != 1;
    }
    if ((privately & kPrivateResults) == 0) {
      for (PyObject* view : outputs.all()) escaped |= Py_REFCNT(view) != 1;
    }
    if (!escaped) return ok;
    std::vector<Views> views;
    if ((privately & kPrivateInputs) == 0) views.push_back({"argument", inputs, operands});
    if ((privately & kPrivateResults) == 0) views.push_back({"result", outputs, results});
    return settle_escapes(callee_, spec_.spec, views, ok);
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
  GateResults results_;
};

}  // namespace

std::shared_ptr<Site> make_gate_site(std::shared_ptr<PyCallee> callee, PyObject* target,
                                     bool tuple_results, SiteSpec spec) {
  return std::make_shared<PyGateSite>(std::move(callee), target, tuple_results, std::move(spec));
}

}  // namespace callgate::bindings
