// SPDX-License-Identifier: Apache-2.0
// One call site of a gate: turns a call of a compiled program into a call of the user's function.
//
// It takes the GIL once per call, makes each array of each lane a view, calls by vectorcall, copies
// results (style return), and checks the views' reference counts for escapes. The fast path
// allocates nothing, because it reuses the last call's views, and takes no lock but the GIL. All
// functions below `PyGateSite::run_where_it_is` hold the GIL.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/buffer.h"
#include "bindings/arrays/results.h"
#include "bindings/arrays/views.h"
#include "bindings/gate/call_views.h"
#include "bindings/gate/device_tape.h"
#include "bindings/gate/gate.h"
#include "bindings/gate/lanes_at_once.h"
#include "bindings/gate/scopes.h"
#include "bindings/gate/site.h"
#include "bindings/gate/tape.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/system.h"
#include "core/timeline.h"

namespace callgate::bindings {
namespace {

class PyGateSite final : public GateSite<PyGateSite, PyCallee> {
 public:
  PyGateSite(std::shared_ptr<PyCallee> callee, LateReference target, bool tuple_results,
             SiteSpec spec)
      : GateSite(std::move(callee), std::move(spec)),
        target_(std::move(target)),
        tuple_results_(tuple_results),
        mesh_(std::make_shared<const Mesh>(std::move(spec_.mesh))) {}

  void run(const Call& call) override {
    if (callee_->items != nullptr && call.context.stream == nullptr && !is_taping()) {
      TimelineSpan span("feed", name());
      if (callee_->items->take(call.results)) return;
    }
    GateSite::run(call);
  }

  // Lanes are counted once they are known.
  void run_watched(const Call& call) {
    run_counted(
        call, spec_.lanes.empty() ? 1 : 0, [&] { run_where_it_is(call); },
        [] { return std::exchange(t_lane_, {}); });
  }

 private:
  // The lane of this thread's last failed call; "" for a call without lanes.
  static inline thread_local std::string t_lane_;

  // Throws a Python exception, as all functions below.
  void run_where_it_is(const Call& call) {
    if (!options_.native || call.context.stream == nullptr) {
      DeviceCallScope on_host(nullptr);
      return run_all(call, nullptr);
    }
    try {
      cuda::named(name(), [&] {
        drain_released();  // earlier results hold GPU memory
        DeviceCall gpu = DeviceCall::of(call.context);
        DeviceCallScope on_device(&gpu);
        run_on_device(call, gpu);
      });
    } catch (const Error& error) {
      raise(PyExc_RuntimeError, error.what());
    }
  }

  void run_on_device(const Call& call, DeviceCall& gpu) {
    const bool recorded = options_.command_buffer && cuda::capturing(gpu.stream);
    // Default streams take no part in recordings.
    if (options_.default_stream && !recorded) {
      gpu.hold_back(kLegacyStream);
      gpu.default_streams = 1u << kLegacyStream;
    }
    auto raised = raised_by([&] { run_all(call, &gpu); });
    if (recorded && !raised) check_recorded(gpu);
    if (!recorded) gpu.join_default_streams();
    if (raised) throw *std::move(raised);
  }

  void check_recorded(const DeviceCall& call) {
    cuda::CaptureStatus status = cuda::CaptureStatus::kNone;
    cuda::Result result = cuda::driver().stream_is_capturing(call.stream, &status);
    if (result != cuda::Result::kStreamCaptureInvalidated) {
      cuda::check(result, "cuStreamIsCapturing");
      if (status != cuda::CaptureStatus::kInvalidated) return;
    }
    raise(hooks.capture_error,
          "gate '" + name() +
              "': command_buffer=True: CUDA can't record the call into a graph. Use only launches "
              "and asynchronous copies on XLA's stream, without waiting, driver allocations, or "
              "other streams that don't join it");
  }

  void run_all(const Call& call, DeviceCall* gpu) {
    if (spec_.lanes.empty()) {
      CallPlace place{{}, 0, &spec_.layout, &call.context};
      CallPlaceScope told(options_.located ? &place : nullptr);
      return run_lane(0, call.operands, call.results, call.context, gpu);
    }
    std::optional<LanesOfCall> lanes;
    try {
      lanes.emplace(spec_.lanes, call.operands, call.results, call.context.lane);
    } catch (const Error& error) {
      raise(PyExc_ValueError, error.what());
    }
    const std::int64_t count = (*lanes)->count();
    callee_->counters.calls += count;
    FirstRaised raised;
    if (options_.parallel && gpu == nullptr && !is_taping()) {
      run_at_once(count, [&](std::int64_t first, std::int64_t last) {
        DeviceCallScope on_host(nullptr);
        try {
          run_lanes(call, *lanes, first, last, /*gpu=*/nullptr, raised);
        } catch (const std::exception& error) {
          PyErr_SetString(PyExc_RuntimeError, error.what());
          raised.take(first, nb::python_error());
        }
      });
    } else {
      run_lanes(call, *lanes, 0, count, gpu, raised);
    }
    std::optional<nb::python_error>& error = raised.raised();
    if (!error) return;
    t_lane_ = (*lanes)->name(lanes->position(raised.lane()));
    throw *std::move(error);
  }

  // Runs lanes until one raises, or one before them has.
  void run_lanes(const Call& call, const LanesOfCall& lanes, std::int64_t first, std::int64_t last,
                 DeviceCall* gpu, FirstRaised& raised) {
    CallPlace place{lanes->sizes(), 0, &spec_.layout, &call.context};
    CallPlaceScope told(options_.located ? &place : nullptr);
    std::vector<ArrayView> operands(call.operands.size()), results(call.results.size());
    for (std::int64_t lane = first; lane < last && !raised.is_before(lane); ++lane) {
      place.lane = lanes.position(lane);
      lanes->select_operands(lane, call.operands, operands);
      lanes->select_results(lane, call.results, results);
      auto error = raised_by([&] { run_lane(place.lane, operands, results, call.context, gpu); });
      if (error) return raised.take(lane, *std::move(error));
    }
  }

  void run_lane(std::int64_t lane, std::span<const ArrayView> operands,
                std::span<ArrayView> results, const CallContext& context, DeviceCall* gpu) {
    if (!options_.taped || !is_taping()) return call_lane(operands, results, context, gpu);
    auto make = [&] { call_lane(operands, results, context, gpu); };
    if (gpu == nullptr) return on_tape(name(), spec_, lane, operands, results, context, make);
    if (options_.command_buffer) refuse_in_graphs(name());
    on_tape_of_device(name(), spec_, lane, operands, results, context, *gpu, make);
  }

  // One call of the callable.
  void call_lane(std::span<const ArrayView> operands, std::span<ArrayView> results,
                 const CallContext& context, DeviceCall* gpu) {
    // Read once, because another thread's call may change it. GPU memory is never copied here.
    unsigned privately =
        gpu == nullptr ? callee_->private_views.load(std::memory_order_relaxed) : 0;  // see there
    Views inputs("argument", operands, (privately & kPrivateInputs) != 0);
    Views outputs("result", results, (privately & kPrivateResults) != 0);
    const SpareViews::Claim spares(spares_, operands.size() + results.size());
    show(inputs, spares.at(0), /*writable=*/false, context.device, gpu);
    if (options_.style != Style::kReturn)
      show(outputs, spares.at(operands.size()), /*writable=*/true, context.device, gpu);
    // A debugging mode, slow on a GPU, because it waits for the stream.
    bool check = settings.check_writes.load(std::memory_order_relaxed) &&  // see Settings
                 !(options_.command_buffer && gpu != nullptr);
    const auto sums =
        check ? checksums(unshared(operands, results), gpu) : std::vector<std::size_t>();
    auto raised = raised_by([&] {
      nb::object result = invoke(inputs, outputs, context);
      if (gpu != nullptr) gpu->make_current();
      if (!result.is_valid()) nb::raise_python_error();
      if (options_.style == Style::kReturn)
        take(operands, results, result, gpu);
      else
        check_returned(result, outputs);
    });
    for (Arguments* views : {&inputs, &outputs})
      for (PyObject* view : views->all()) {
        if (gpu == nullptr) break;
        if (const auto& of = nb::cast<const Buffer&>(nb::handle(view)).gpu)
          gpu->default_streams |= of->default_streams;
      }
    settle_views(inputs, outputs, std::move(raised));
    if (outputs.own) write_back(results, outputs);
    keep_spares(inputs, spares.at(0));
    keep_spares(outputs, spares.at(operands.size()));
    if (check) check_unwritten(sums, checksums(unshared(operands, results), gpu));
  }

  // Makes the callable's arguments for the call's arrays, of spare views if there are any.
  void show(Views& views, SpareView* spare, bool writable, std::int64_t device,
            const DeviceCall* gpu) {
    views.reusable = spare != nullptr && !views.own && !options_.buffers && gpu == nullptr;
    for (const ArrayView& view : views.memory) {
      if (views.reusable) {
        views.push((spare++)->take(view, writable));
      } else if (options_.buffers || gpu != nullptr) {
        Buffer buffer(view, !writable, device, gpu);
        if (views.own) buffer.detach();
        views.push(nb::cast(std::move(buffer)));
      } else {
        views.push(views.own ? make_copy(view) : make_view(view, writable));
      }
    }
  }

  // After a call whose views have not escaped.
  static void keep_spares(Views& views, SpareView* spare) {
    for (PyObject* view : views.all())
      if (views.reusable) (spare++)->keep(nb::borrow(view));
  }

  // Calls target(*inputs), target(out, *inputs) or target(context, out, *inputs).
  nb::object invoke(Arguments& inputs, Arguments& outputs, const CallContext& context) {
    if (options_.style == Style::kReturn) return vectorcall(inputs);
    Arguments arguments(inputs.size() + 2);
    if (options_.style == Style::kContext) arguments.push(nb::cast(Context{context, mesh_}));
    arguments.push(out_argument(outputs));
    for (PyObject* input : inputs.all()) arguments.push(nb::borrow(input));
    return vectorcall(arguments);
  }

  nb::object vectorcall(Arguments& arguments) const {
    return nb::steal(running_python([&] {
      return PyObject_Vectorcall(target_.get(), arguments.data(), arguments.size(), nullptr);
    }));
  }

  nb::object out_argument(Arguments& outputs) const {
    if (!tuple_results_) return nb::borrow(outputs.data()[0]);
    nb::object tuple = taken(PyTuple_New(static_cast<Py_ssize_t>(outputs.size())));
    Py_ssize_t index = 0;
    for (PyObject* output : outputs.all())
      PyTuple_SetItem(tuple.ptr(), index++, nb::borrow(output).release().ptr());  // steals it
    return tuple;
  }

  // Checks for views that outlived the call. If there are any, Python's `escaped` hook finds their
  // holders and makes the remaining references safe; if that is impossible, the callee's later
  // views are private. Throws the call's own exception, `raised`, if there is one, because its
  // frames may hold views without a user's error; otherwise the escape's error.
  void settle_views(Views& inputs, Views& outputs, std::optional<nb::python_error> raised) {
    if (inputs.escaped() || outputs.escaped()) {
      nb::list suspects;
      inputs.add_to(suspects);
      outputs.add_to(suspects);
      nb::object make_private = nb::cpp_function([callee = callee_](const std::string& kind) {
        callee->private_views.fetch_or(kind == "argument" ? kPrivateInputs : kPrivateResults,
                                       std::memory_order_relaxed);  // see there
      });
      nb::object done =
          call_python(hooks.escaped, "ssOOO", name().c_str(), spec_.spec.c_str(), suspects.ptr(),
                      raised ? raised->value().ptr() : Py_None, make_private.ptr());
      if (!done.is_valid() && !raised) nb::raise_python_error();
      clear_error();  // the call's own exception takes precedence
    }
    if (raised) throw *std::move(raised);
  }

  // A callable that writes into `out` returns None, or `out`, as NumPy's functions do.
  void check_returned(const nb::object& value, Arguments& outputs) const {
    if (value.is_none() || (!tuple_results_ && value.ptr() == outputs.data()[0])) return;
    if (tuple_results_ && PyTuple_Check(value.ptr()) && nb::len(value) == outputs.size()) {
      bool same = true;
      for (std::size_t i = 0; i < outputs.size(); ++i)
        same = same && nb::object(value[i]).ptr() == outputs.data()[i];
      if (same) return;
    }
    mismatch(-1, "None or `out` (results are written into `out`)",
             std::string("a value of type ") + nb::type_name(value.type()).c_str());
  }

  // Copies the callable's results into XLA's memory.
  void take(std::span<const ArrayView> operands, std::span<ArrayView> results,
            const nb::object& value, const DeviceCall* gpu) const {
    std::optional<CopySources> held;
    CopySources* sources = gpu == nullptr ? nullptr : &held.emplace(*gpu, operands);
    if (!tuple_results_) return take_one(results[0], value.ptr(), 0, sources);
    if (results.empty() && value.is_none()) return;
    bool sequence =
        PyTuple_Check(value.ptr()) || (options_.flat_results && PyList_Check(value.ptr()));
    if (!sequence || nb::len(value) != results.size()) {
      std::string got = nb::type_name(value.type()).c_str();
      if (sequence) got += " of " + std::to_string(nb::len(value));
      mismatch(-1,
               results.empty() ? "None, as `out` declares no results"
                               : "a tuple of " + std::to_string(results.size()) + " arrays",
               got);
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      nb::object item = value[i];
      take_one(results[i], item.ptr(), i, sources);
    }
  }

  // Copies private results, which the callable has written, into XLA's memory.
  void write_back(std::span<ArrayView> results, Arguments& outputs) const {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      PyObject* value = outputs.data()[i];
      if (options_.buffers) {
        copy_to(results[i], nb::cast<const Buffer&>(nb::handle(value)).view.data);
      } else {
        take_one(results[i], value, i, /*sources=*/nullptr);
      }
    }
  }

  // `sources` are null on the host.
  void take_one(const ArrayView& target, PyObject* value, std::size_t index,
                CopySources* sources) const {
    auto number = static_cast<int>(index);
    if (value == Py_None) mismatch(number, to_string(target), "None");
    auto came = sources == nullptr ? store(target, value, cast_)
                                   : store_on_device(target, value, cast_, *sources);
    if (came) mismatch(number, to_string(target), *came);
  }

  [[noreturn]] void mismatch(int index, const std::string& expected, const std::string& got) const {
    raise_mismatch(name(), spec_.spec, index, expected, got);
  }

  // The operands, with empty ones for those that share a result's memory, which is written.
  static std::vector<ArrayView> unshared(std::span<const ArrayView> operands,
                                         std::span<const ArrayView> results) {
    static constexpr std::int64_t kNone = 0;
    std::vector<ArrayView> found(operands.begin(), operands.end());
    for (ArrayView& view : found)
      if (std::ranges::find(results, view.data, &ArrayView::data) != results.end())
        view = {view.data, &kNone, 1, view.dtype};
    return found;
  }

  void check_unwritten(const std::vector<std::size_t>& before,
                       const std::vector<std::size_t>& after) const {
    auto [one, other] = std::ranges::mismatch(before, after);
    if (one == before.end()) return;
    call_python(hooks.input_written, "ssi", name().c_str(), spec_.spec.c_str(),
                static_cast<int>(one - before.begin()));
    nb::raise_python_error();  // the hook raises
  }

  const GateOptions& options_ = callee_->options;
  LateReference target_;
  bool tuple_results_;
  const bool cast_ = casts();
  std::shared_ptr<const Mesh> mesh_;
  SpareViews spares_;  // of operands, then of results
};

}  // namespace

std::shared_ptr<Site> PyCallee::specialise(SiteSpec spec) {
  GilScope gil;
  nb::object target = nb::borrow(function.get());
  bool tuple = options.flat_results || spec.spec == "*";
  if (bind != nullptr) {
    // bind(spec) -> (callable, True if results are a tuple)
    nb::object bound = call_python(bind.get(), "s", spec.spec.c_str());
    if (!bound.is_valid())
      throw Error(ErrorCode::kInvalidArgument, failure_text(nb::python_error(), name(), spec.site));
    target = bound[0];
    tuple = nb::cast<bool>(bound[1]);
  }
  return std::make_shared<PyGateSite>(shared_from_this(), late(std::move(target)), tuple,
                                      std::move(spec));
}

}  // namespace callgate::bindings
