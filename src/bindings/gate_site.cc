// See the header. Everything below `PyGateSite::run_timed` holds the GIL.
#include "bindings/gate_site.h"

#include <nanobind/stl/string.h>

#include <array>
#include <cstdio>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/buffer.h"
#include "bindings/deferred.h"
#include "bindings/gil.h"
#include "bindings/hooks.h"
#include "bindings/views.h"
#include "core/watchdog.h"

namespace callgate::bindings {
namespace {

// New references to the arrays of one lane; small calls stay on the stack.
class Arguments {
 public:
  explicit Arguments(std::size_t capacity) {
    if (capacity > inline_.size()) overflow_.resize(capacity);
  }
  ~Arguments() {
    for (PyObject* object : all()) Py_XDECREF(object);
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

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

std::string text_of(const nb::object& object) { return nb::cast<std::string>(nb::str(object)); }

std::size_t checksum(const ArrayView& view) {
  return std::hash<std::string_view>()({static_cast<const char*>(view.data), view.nbytes()});
}

class PyGateSite final : public Site {
 public:
  PyGateSite(std::shared_ptr<PyCallee> callee, PyObject* target, bool tuple_results, SiteSpec spec)
      : callee_(std::move(callee)),
        options_(callee_->options()),
        target_(target),
        tuple_results_(tuple_results),
        spec_(std::move(spec)) {}
  ~PyGateSite() override { release_later(target_); }

  Outcome run(const Call& call) override {
    auto stall = Settings::instance().stall_ns.load(std::memory_order_relaxed);  // late is fine
    if (stall != 0) return run_watched(call, std::chrono::nanoseconds(stall));
    return run_timed(call);
  }

 private:
  Outcome run_watched(const Call& call, std::chrono::nanoseconds delay) {
    std::string text;
    for (const ArrayView& view : call.operands)
      text += (text.empty() ? "" : ", ") + to_string(view);
    Watch watch(delay, [callee = callee_, text] {
      std::string report = callee->stall_report("(" + text + ")", /*timed_out=*/false);
      std::fprintf(stderr, "%s\n", report.c_str());
    });
    return run_timed(call);
  }

  Outcome run_timed(const Call& call) {
    Counters& counters = callee_->counters();
    counters.calls.fetch_add(spec_.lanes.count(), std::memory_order_relaxed);  // see Counters
    count_bytes(call, counters);
    if (!Recorder::instance().timing()) {
      GilScope gil;
      return run_lanes(call);
    }
    std::int64_t start = Recorder::now_ns();
    GilScope gil;
    std::int64_t locked = Recorder::now_ns();
    Outcome outcome = run_lanes(call);
    Recorder::instance().record(callee_->name(), counters, start, locked, Recorder::now_ns());
    return outcome;
  }

  static void count_bytes(const Call& call, Counters& counters) {
    std::size_t bytes = 0;
    for (const ArrayView& view : call.operands) bytes += view.nbytes();
    for (const ArrayView& view : call.results) bytes += view.nbytes();
    counters.bytes.fetch_add(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  }

  Outcome run_lanes(const Call& call) {
    bool ok = spec_.lanes.empty() ? run_lane(call.operands, call.results, call.context)
                                  : loop_lanes(call);
    if (ok) return Outcome::success();
    callee_->counters().errors.fetch_add(1, std::memory_order_relaxed);
    return Outcome::failure(ErrorCode::kInternal, take_exception(callee_->name(), spec_.site,
                                                                 spec_.layout, call.context.shard));
  }

  bool loop_lanes(const Call& call) {
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
      if (!run_lane(operands, results, call.context)) return false;
    }
    return true;
  }

  // One call of the callable. False with a Python error.
  bool run_lane(std::span<const ArrayView> operands, std::span<ArrayView> results,
                const CallContext& context) {
    Arguments inputs(operands.size());
    Arguments outputs(results.size());
    for (const ArrayView& view : operands) {
      if (!inputs.push(make_input(view, context.device))) return false;
    }
    if (options_.style != Style::kReturn) {
      for (const ArrayView& view : results) {
        if (!outputs.push(make_output(view, context.device))) return false;
      }
    }
    std::vector<std::size_t> sums;
    bool check = Settings::instance().check_writes.load(std::memory_order_relaxed);  // debugging
    if (check) {
      for (const ArrayView& view : operands) sums.push_back(checksum(view));
    }
    nb::object result = invoke(inputs, outputs, context);
    bool ok = result.is_valid() &&
              (options_.style == Style::kReturn ? take(results, result) : returned_none(result));
    result.reset();
    if (!settle_views(inputs, outputs, operands, results, ok)) return false;
    if (check) ok = ok && unwritten(operands, sums);
    return ok;
  }

  PyObject* make_input(const ArrayView& view, std::int64_t device) const {
    if (options_.arrays == Arrays::kBuffer) return make_buffer(view, /*writable=*/false, device);
    return options_.owned_inputs ? make_copy(view) : make_view(view, /*writable=*/false);
  }
  PyObject* make_output(const ArrayView& view, std::int64_t device) const {
    if (options_.arrays == Arrays::kBuffer) return make_buffer(view, /*writable=*/true, device);
    return make_view(view, /*writable=*/true);
  }

  // Calls target(*inputs), target(out, *inputs) or target(context, out, *inputs).
  nb::object invoke(Arguments& inputs, Arguments& outputs, const CallContext& context) {
    if (options_.style == Style::kReturn) {
      return vectorcall(inputs);
    }
    Arguments arguments(inputs.size() + 2);
    if (options_.style == Style::kContext) {
      arguments.push(nb::cast(Context{context, spec_.mesh}).release().ptr());
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

  bool returned_none(const nb::object& result) {
    if (result.is_none()) return true;
    return mismatch(-1, "None (results are written into `out`)",
                    std::string("a value of type ") + nb::type_name(result.type()).c_str());
  }

  // Copies a return-style callable's results into XLA's memory.
  bool take(std::span<ArrayView> results, const nb::object& value) {
    if (!tuple_results_) return take_one(results[0], value.ptr(), 0);
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
      if (!take_one(results[i], item.ptr(), static_cast<int>(i))) return false;
    }
    return true;
  }

  bool take_one(const ArrayView& target, PyObject* value, int index) {
    if (value == Py_None) return mismatch(index, to_string(target), "None");
    switch (store(target, value, options_.cast)) {
      case Stored::kYes: return true;
      case Stored::kError: return false;
      case Stored::kMismatch: break;
    }
    nb::object array = nb::steal(PyArray_FromAny(value, nullptr, 0, 0, 0, nullptr));
    if (!array.is_valid()) return false;
    auto* came = reinterpret_cast<PyArrayObject*>(array.ptr());
    std::string got = text_of(array.attr("dtype"));
    got += '[';
    for (int axis = 0; axis < PyArray_NDIM(came); ++axis) {
      if (axis != 0) got += ',';
      got += std::to_string(PyArray_DIM(came, axis));
    }
    got += ']';
    return mismatch(index, to_string(target), got);
  }

  bool mismatch(int index, const std::string& expected, const std::string& got) {
    nb::object made =
        nb::steal(call_python(Hooks::instance().result_error, "ssiss", callee_->name().c_str(),
                              spec_.spec.c_str(), index, expected.c_str(), got.c_str()));
    return false;  // the hook raises
  }

  // Looks for views that outlived the call, and leaves XLA's memory behind where one did. `ok` is
  // false while the call's own exception is set: its frames may hold views, which is no error of
  // the user's, but must be made safe all the same.
  bool settle_views(Arguments& inputs, Arguments& outputs, std::span<const ArrayView> operands,
                    std::span<ArrayView> results, bool ok) {
    bool escaped = false;
    if (!options_.owned_inputs || options_.arrays == Arrays::kBuffer) {
      for (PyObject* view : inputs.all()) escaped |= Py_REFCNT(view) != 1;
    }
    for (PyObject* view : outputs.all()) escaped |= Py_REFCNT(view) != 1;
    if (!escaped) return ok;
    return settle_escaped(inputs, outputs, operands, results, ok);
  }

  bool settle_escaped(Arguments& inputs, Arguments& outputs, std::span<const ArrayView> operands,
                      std::span<ArrayView> results, bool ok) {
    nb::object pending;
#if PY_VERSION_HEX >= 0x030C0000
    if (!ok) pending = nb::steal(PyErr_GetRaisedException());
#else
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    if (!ok) {
      PyErr_Fetch(&type, &value, &traceback);
      PyErr_NormalizeException(&type, &value, &traceback);
      if (traceback != nullptr) PyException_SetTraceback(value, traceback);
      pending = nb::borrow(value);
    }
#endif
    nb::list suspects;
    auto add = [&](const char* kind, Arguments& views, std::span<const ArrayView> arrays) {
      for (std::size_t i = 0; i < views.size(); ++i) {
        PyObject* view = views.data()[i];
        suspects.append(nb::make_tuple(kind, i, nb::borrow(view),
                                       reinterpret_cast<std::uintptr_t>(arrays[i].data),
                                       arrays[i].nbytes()));
      }
    };
    if (!options_.owned_inputs || options_.arrays == Arrays::kBuffer)
      add("argument", inputs, operands);
    add("result", outputs, results);
    nb::object done =
        nb::steal(call_python(Hooks::instance().escaped, "ssOO", callee_->name().c_str(),
                              spec_.spec.c_str(), suspects.ptr(), ok ? Py_None : pending.ptr()));
    if (ok) return done.is_valid();
    if (!done.is_valid()) PyErr_Clear();  // the call's own exception matters more
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(pending.release().ptr());
#else
    PyErr_Restore(type, value, traceback);
#endif
    return false;
  }

  bool unwritten(std::span<const ArrayView> operands, const std::vector<std::size_t>& sums) {
    for (std::size_t i = 0; i < operands.size(); ++i) {
      if (checksum(operands[i]) == sums[i]) continue;
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
};

}  // namespace

std::shared_ptr<Site> make_gate_site(std::shared_ptr<PyCallee> callee, PyObject* target,
                                     bool tuple_results, SiteSpec spec) {
  return std::make_shared<PyGateSite>(std::move(callee), target, tuple_results, std::move(spec));
}

}  // namespace callgate::bindings
