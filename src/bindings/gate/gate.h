// A Python callable as a Callee: what a gate is at run time.
//
// PyCallee holds the callable and its options, and outlives the Gate in Python for as long as some
// executable can still call it; gate_site.cc is one call site of it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python/gil.h"
#include "core/call.h"
#include "core/lifetime.h"

namespace callgate::bindings {

// Always kept, by three relaxed additions a call; clocks are read only while timing or a trace is
// on.
struct Counters {
  // Relaxed throughout: each is a sum that nobody orders anything by.
  std::atomic<std::int64_t> calls{0}, errors{0}, bytes{0}, python_ns{0}, gil_wait_ns{0};
};

// One call of a trace.
struct TraceEvent {
  std::string gate;
  std::int64_t thread;    // the system's thread id
  std::int64_t start_ns;  // since the clock's epoch
  std::int64_t gil_wait_ns;
  std::int64_t duration_ns;  // GIL wait included
};

// What is timed and traced. Its lock is taken only while a trace is on.
class Recorder {
 public:
  static Recorder& instance() { return immortal<Recorder>(); }

  bool timing() const noexcept {
    return mode_.load(std::memory_order_relaxed) != 0;  // a late reader misses a call or two
  }
  void set_timing(bool on) noexcept { set(kTiming, on); }
  void start_trace() {
    std::lock_guard lock(mutex_);
    events_.clear();
    set(kTracing, /*on=*/true);
  }
  std::vector<TraceEvent> stop_trace() {
    std::lock_guard lock(mutex_);
    set(kTracing, /*on=*/false);
    return std::exchange(events_, {});
  }

  void record(const std::string& gate, Counters& counters, std::int64_t start_ns,
              std::int64_t locked_ns, std::int64_t end_ns) {
    counters.gil_wait_ns.fetch_add(locked_ns - start_ns, std::memory_order_relaxed);
    counters.python_ns.fetch_add(end_ns - locked_ns, std::memory_order_relaxed);
    if ((mode_.load(std::memory_order_relaxed) & kTracing) == 0) return;
    thread_local const std::int64_t thread = gettid();
    std::lock_guard lock(mutex_);
    events_.push_back({gate, thread, start_ns, locked_ns - start_ns, end_ns - start_ns});
  }

  static std::int64_t now_ns() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

 private:
  static constexpr int kTiming = 1, kTracing = 2;
  void set(int bit, bool on) noexcept {
    // Relaxed: see timing().
    on ? mode_.fetch_or(bit, std::memory_order_relaxed)
       : mode_.fetch_and(~bit, std::memory_order_relaxed);
  }

  std::atomic<int> mode_{0};
  std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

enum class Style { kReturn, kInplace, kContext };
enum class Arrays { kNumpy, kBuffer };

struct GateOptions {
  Style style = Style::kReturn;
  Arrays arrays = Arrays::kNumpy;
  bool cast = false;          // same-kind casts of results
  bool owned_inputs = false;  // inputs are copies that the callable may keep
  bool flat_results = false;  // results come and go as a flat tuple, whatever the spec says
  bool own_thread = false;
  bool native = false;          // gets a GPU's own arrays, as Buffers, else copies on the host
  bool default_stream = false;  // its library works on CUDA's legacy default stream by itself
  bool command_buffer = false;  // runs while XLA records its stream's work
  std::chrono::nanoseconds timeout{0};
};

// Views that are private copies, which the callable may keep.
enum : unsigned { kPrivateInputs = 1, kPrivateResults = 2 };

class PyCallee final : public Callee, public std::enable_shared_from_this<PyCallee> {
 public:
  // `function` is called with flat arrays when a site's spec is "" (one result) or "*" (a tuple of
  // results); for any other spec `bind(spec)` gives the function to call, with flat_results' form.
  PyCallee(std::string name, nb::object function, nb::object bind, GateOptions options);
  ~PyCallee() override;

  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  const std::string& name() const noexcept override { return name_; }
  bool own_thread() const noexcept override { return options_.own_thread; }
  bool reads_context() const noexcept override {
    return options_.style == Style::kContext || options_.arrays == Arrays::kBuffer;
  }
  OnDevice on_device() const noexcept override {
    return options_.native ? OnDevice::kNative : OnDevice::kStaged;
  }
  std::chrono::nanoseconds timeout() const noexcept override { return options_.timeout; }
  void defer(const Error& error) override;
  void enter_worker(bool of_device) override;
  std::string stall_report(const std::string& call, bool timed_out) override;
  std::string self_wait(unsigned long thread) override;

  // For Python's cycle collector, by way of the handle.
  int traverse(visitproc visit, void* arg);
  void clear();

  const GateOptions& options() const noexcept { return options_; }

  // Which views are private from the next call on. Relaxed: it orders nothing, and a call that
  // comes too early gets views, whose escape is found again.
  unsigned private_views() const noexcept { return private_.load(std::memory_order_relaxed); }
  void make_private(unsigned views) noexcept {
    private_.fetch_or(views, std::memory_order_relaxed);  // as above
  }
  Counters& counters() noexcept { return counters_; }

 private:
  std::string name_;
  PyObject* function_;
  PyObject* bind_;  // null when None
  GateOptions options_;
  std::atomic<unsigned> private_;
  Counters counters_;
};

struct Context {
  CallContext call;
  std::shared_ptr<const Mesh> mesh;
};

// `target` is a new reference to the flat callable, which the site takes over; `tuple_results` says
// whether its results come and go as a tuple.
std::shared_ptr<Site> make_gate_site(std::shared_ptr<PyCallee> callee, PyObject* target,
                                     bool tuple_results, SiteSpec spec);

// Debug and watch settings of the process.
struct Settings {
  std::atomic<bool> check_writes{false};  // checksum inputs around each call
  std::atomic<std::int64_t> stall_ns{0};  // report calls that take longer; 0 for never
  static Settings& instance();
};

}  // namespace callgate::bindings
