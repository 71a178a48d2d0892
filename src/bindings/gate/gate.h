// SPDX-License-Identifier: Apache-2.0
// A Python callable as a Callee: a gate at run time.
//
// PyCallee holds the callable and its options. It outlives the Python Gate as long as an executable
// can still call it. gate_site.cc has its call sites.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/call.h"
#include "core/item_queue.h"
#include "core/named_thread.h"
#include "core/threads.h"

namespace callgate::bindings {

// Clocks are only read while timing or a trace is on.
template <typename Count>
struct CountersOf {
  Count calls{0}, errors{0}, bytes{0}, python_ns{0}, gil_wait_ns{0};
};
using Counters = CountersOf<Shared<std::int64_t>>;
using SharedCounters = CountersOf<std::atomic<std::int64_t>>;

// Debug and watch settings of the process. Relaxed throughout: a late reader misses a few calls.
struct Settings {
  static constexpr int kTiming = 1, kTracing = 2, kProfiling = 4;
  std::atomic<int> recorded{0};           // of calls
  std::atomic<bool> check_writes{false};  // compares checksums of inputs around each call
  std::atomic<std::int64_t> stall_ns{0};  // reports slower calls; 0 for never
};
inline constinit Settings settings;

enum class Style { kReturn, kInplace, kContext };

struct GateOptions {
  Style style = Style::kReturn;
  bool buffers = false;       // its arrays are Buffers
  bool owned_inputs = false;  // inputs are copies that the callable may keep
  bool flat_results = false;  // results are a flat tuple, regardless of the spec
  bool own_thread = false;
  bool native = false;          // gets a GPU's arrays as Buffers; otherwise host copies
  bool default_stream = false;  // its library uses CUDA's legacy default stream
  bool command_buffer = false;  // runs while XLA records its stream's work
  bool located = false;         // may ask for its call's place (CallPlace)
  bool taped = false;           // recordings have its calls (tape.h)
  bool parallel = false;        // lanes run at once
  std::chrono::nanoseconds timeout{0};
};

// Views that are private copies, which the callable may keep.
enum : unsigned { kPrivateInputs = 1, kPrivateResults = 2 };

// The callee of a gate, for any place of its callable.
class GateCallee : public Callee {
 public:
  explicit GateCallee(std::string name) : name_(std::move(name)) {}

  const std::string& name() const noexcept final { return name_; }
  void defer(const Error& error) final {
    GilScope gil;
    call_deferred(error);
  }
  std::string stall_report(const std::string& call, bool timed_out) final {
    GilScope gil;
    return stall_text("gate '" + name_ + "'", call, timed_out);
  }

 private:
  std::string name_;
};

// The bytes of all operands and results.
inline std::int64_t nbytes(const Call& call) {
  std::size_t bytes = 0;
  for (const ArrayView& view : call.operands) bytes += view.nbytes();
  for (const ArrayView& view : call.results) bytes += view.nbytes();
  return static_cast<std::int64_t>(bytes);
}

class PyCallee final : public GateCallee, public std::enable_shared_from_this<PyCallee> {
 public:
  // For a site's spec "" (one result) or "*" (a tuple of results), `called` gets flat arrays. For
  // any other spec, `binder(spec)` returns the function to call, with flat_results' form.
  PyCallee(std::string name, nb::object called, nb::object binder, GateOptions chosen,
           std::shared_ptr<NamedThread> of_thread = nullptr)
      : GateCallee(std::move(name)),
        private_views(chosen.owned_inputs ? +kPrivateInputs : 0u),
        options(chosen),
        its_thread(std::move(of_thread)),
        function(late(std::move(called))),
        bind(binder.is_none() ? nullptr : late(std::move(binder))) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  std::array<LateReference*, 2> references() { return {&function, &bind}; }
  bool own_thread() const noexcept override { return options.own_thread || its_thread != nullptr; }
  NamedThread* thread() const noexcept override { return its_thread.get(); }
  Error closed_error() override {
    GilScope gil;
    (void)call_python(hooks.closed_thread, "s", its_thread->name().c_str());  // raises
    return Error::verbatim(ErrorCode::kAborted, failure_text(nb::python_error(), name(), ""));
  }
  bool reads_context() const noexcept override {
    return options.style == Style::kContext || options.buffers || options.located;
  }
  OnDevice on_device() const noexcept override {
    return options.native ? OnDevice::kNative : OnDevice::kStaged;
  }
  std::chrono::nanoseconds timeout() const noexcept override { return options.timeout; }
  void enter_worker(bool of_device) override {
    thread_local bool device_worker = false;
    if (std::exchange(device_worker, of_device) == of_device) return;
    if (ActiveGil gil; gil)
      call_unraisable(hooks.device_worker, "O", of_device ? Py_True : Py_False);
  }
  std::string self_wait(unsigned long thread) override {
    ActiveGil gil;
    if (!gil) return {};
    nb::object text = call_unraisable(hooks.self_wait, "sk", name().c_str(), thread);
    return text.is_valid() ? nb::cast<std::string>(text) : std::string();
  }

  // The views that are private from the next call on. Relaxed: it orders nothing. A call that reads
  // it too early gets views, whose escape is detected again.
  std::atomic<unsigned> private_views;
  Counters counters;

  const GateOptions options;
  const std::shared_ptr<NamedThread> its_thread;  // null for none
  LateReference function, bind;                   // bind is null for None
  // A feed's items, which serve its calls on the host if possible. Set before the first call.
  std::shared_ptr<ItemQueue> items;
};

struct Context : CallContext {
  std::shared_ptr<const Mesh> mesh;
};

}  // namespace callgate::bindings
