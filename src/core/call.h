// SPDX-License-Identifier: Apache-2.0
// Callees, their call sites, and the registry of their names.
//
// A `Callee` is the object behind a name: a Python function, a native kernel or a tap. When XLA
// loads an executable, each call site requests a `Site` from its callee, bound to the site's static
// description, and keeps both until the executable dies. `Site::run` is the hot path. It runs on
// any XLA thread, on several at once, and without any of callgate's locks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/array_view.h"
#include "core/attributes.h"
#include "core/error.h"
#include "core/lanes.h"
#include "core/lifetime.h"

namespace callgate {

// The time and place of a call. `stream` is the platform's stream, null on the CPU. `shard` is the
// device's position in a program over several devices, -1 for a call on whole arrays. `lane` is the
// number of the call among those that a program makes one after the other (core/lanes.h).
struct CallContext {
  std::int32_t device = -1;
  std::int32_t lane = 0;
  std::int64_t run = -1;
  void* stream = nullptr;
  std::int32_t ordinal = -1;  // the GPU's number in its driver; -1 for none or unknown
  std::int32_t shard = -1;
  unsigned long thread = 0;  // Python's number of the calling XLA thread; 0 if unknown
};

// True if each call gets its whole context, regardless of what its callee reads: during a recording
// or a replay. Relaxed: a call that runs during the change may use either value.
inline constinit std::atomic<bool> contexts_wanted{false};

struct Call {
  std::span<const ArrayView> operands;
  std::span<ArrayView> results;
  CallContext context;
  // The owner of the operands' memory if the callee may keep the memory; otherwise null.
  const std::shared_ptr<void>* memory = nullptr;
};

// A program's devices and the axes that number them, outermost first.
struct Mesh {
  std::int64_t devices = 1;
  std::vector<std::pair<std::string, std::int64_t>> axes;  // empty if not in the program

  // From the program's attributes: devices, and in order `names` and `sizes`. Throws Error for
  // another form.
  static Mesh of(const Attributes& held);
};

// The static description of a call site, from its attributes in the program.
struct SiteSpec {
  std::string spec;    // the trees of the call's arguments and results; "" for flat arrays
  std::string site;    // the user's source line at which the call was traced
  Lanes lanes;         // vmapped levels over which the runtime loops
  Mesh mesh;           // the program's mesh
  std::string layout;  // each shard's part of the arrays, for messages; "" for whole arrays
  Attributes held;     // all attributes of the call
};

// Device memory with shared ownership.
struct DeviceMemory {
  virtual ~DeviceMemory() = default;
};

class Site {
 public:
  virtual ~Site() = default;
  // Throws Error if the call fails.
  virtual void run(const Call& call) = 0;
  // False if it reads only the run from a call's context.
  virtual bool reads_context() const noexcept { return true; }
  // Called instead of run() if another device makes the call; the results of both are added.
  virtual void skip(const Call& call) noexcept { clear(call.results); }

  // The methods below are for sites of callees that are OnDevice::kDeferred.

  // Called when the program reaches the call, before its arrays can be read. Returns how many of
  // the first operands run_deferred() gets, or nothing to skip the call. May throw Error.
  virtual std::optional<std::size_t> reads(const Call& call) { return call.operands.size(); }
  // Called later, without results: the program has them already, as copies of the operand
  // copied_to().
  virtual void run_deferred(const Call& call) { run(call); }
  virtual std::size_t copied_to(std::size_t result) const noexcept { return result; }

  // The same for a call that is recorded once and then replayed: the operands to copy, and each
  // replay. The driver makes the replayed call, which must not call the driver back or wait. False
  // if run_deferred() must run soon on another thread.
  virtual std::size_t reads_replayed(const Call& call) { return call.operands.size(); }
  virtual bool run_replayed(const Call& /*call*/) { return false; }
  // Called if there is no memory for copies. True if the site has recorded the loss, so the program
  // continues.
  virtual bool drop(const Call& /*call*/) noexcept { return false; }

  // The number of first operands that the site keeps as copies on the device. If it isn't 0,
  // run_kept() runs instead of run_deferred(). It gets views of `memory` for these operands, which
  // the host can't read, and views of host memory for the others.
  virtual std::size_t kept_on_device() const noexcept { return 0; }
  virtual void run_kept(const Call& call, const std::shared_ptr<DeviceMemory>& /*memory*/) {
    run_deferred(call);
  }
};

// The way in which a callee handles arrays on a GPU.
enum class OnDevice : std::uint8_t {
  kStaged,    // copies operands to host memory, and results back
  kDeferred,  // the same, later: the program doesn't wait and gets no results
  kNative,    // gets the device's arrays, which the stream may still be writing
};

class NamedThread;

class Callee {
 public:
  virtual ~Callee() = default;
  // Binds the callee to one call site. Throws Error if it can't serve `spec`.
  virtual std::shared_ptr<Site> specialise(SiteSpec spec) = 0;
  virtual const std::string& name() const noexcept = 0;
  // The kind of its calls in the timeline; "" if they are not recorded, or the callee records them
  // itself.
  virtual std::string_view kind() const noexcept { return {}; }
  // True if calls run on callgate's own threads and complete an FFI future.
  virtual bool own_thread() const noexcept { return false; }
  // The one thread on which all its calls run, or null; with a thread, own_thread() is true.
  virtual NamedThread* thread() const noexcept { return nullptr; }
  // The error of a call for a thread() that is closed.
  virtual Error closed_error() { return {ErrorCode::kAborted, name() + ": its thread is closed"}; }
  // Called on callgate's own threads before each call, for a GPU's program or the CPU's.
  virtual void enter_worker(bool /*of_device*/) {}
  // False if its sites never read a call's context, which is then not collected.
  virtual bool reads_context() const noexcept { return true; }
  virtual OnDevice on_device() const noexcept { return OnDevice::kStaged; }
  // True if a call at the end of the process succeeds without running.
  virtual bool quiet_at_exit() const noexcept { return false; }
  // The time after which the program fails with a report; zero for no limit.
  virtual std::chrono::nanoseconds timeout() const noexcept { return {}; }
  // Stores a failure that XLA can't report, for the next barrier or `errors()`.
  virtual void defer(const Error& /*error*/) {}
  // A report on a call that takes too long: the running function and the threads' stacks.
  // `timed_out` is true if the report belongs to an error.
  virtual std::string stall_report(const std::string& call, bool /*timed_out*/) { return call; }
  // The reason why a call on this thread (Python's number) waits for its own program; "" if it
  // doesn't. May throw.
  virtual std::string self_wait(unsigned long /*thread*/) { return {}; }
};

// --- Kinds of callees ----------------------------------------------------------------------------

// Passes on a token behind an ordered call of an exported program with symbolic result shapes. XLA
// can't compute such shapes beside a token, so the ordered call returns none, and this call returns
// the token once a result is ready.
class AfterCallee final : public Callee {
 public:
  static constexpr std::string_view kName = "callgate.after";

  std::shared_ptr<Site> specialise(SiteSpec /*spec*/) override { return std::make_shared<Nop>(); }
  const std::string& name() const noexcept override { return name_; }
  bool reads_context() const noexcept override { return false; }
  bool quiet_at_exit() const noexcept override { return true; }
  OnDevice on_device() const noexcept override { return OnDevice::kNative; }

 private:
  struct Nop final : Site {
    void run(const Call& /*call*/) override {}
  };

  std::string name_{kName};
};

// A kernel for the CPU or for CUDA. Both have targets of their own, so a program that calls a
// kernel as a gate is rejected. Functions that are set before the first call make the texts of
// failures.
class KernelCalleeBase : public Callee {
 public:
  // Converts a failure's message into the program's error, and may store an exception for it.
  // `lane` is "lane 3", or "" without lanes.
  using Describe = std::function<std::string(const std::string& message, const std::string& site,
                                             const std::string& lane)>;
  explicit KernelCalleeBase(Describe describe) : describe_(std::move(describe)) {}

  std::shared_ptr<Site> specialise(SiteSpec /*spec*/) final {
    throw Error("the program's call of '" + name() + "'", "a gate", "a kernel of that name");
  }

  std::string describe(const std::string& message, const std::string& site,
                       const std::string& lane = "") const {
    if (describe_) return describe_(message, site, lane);
    return "kernel '" + name() + (lane.empty() ? "': " : "' in " + lane + ": ") + message;
  }
  void defer(const Error& error) final {
    if (defer_) defer_(error);
  }
  std::string stall_report(const std::string& call, bool /*timed_out*/) final {
    return report_ ? report_(call) : "kernel '" + name() + "'" + call;
  }

  // Receives failures that XLA can't report.
  void set_defer(std::function<void(const Error&)> defer) { defer_ = std::move(defer); }
  // Makes the report on a slow call from its arrays as text.
  using Report = std::function<std::string(const std::string&)>;
  void set_report(Report report) { report_ = std::move(report); }

 private:
  Describe describe_;
  std::function<void(const Error&)> defer_;
  Report report_;
};

// The names by which programs call; programs hold no pointers. The registry doesn't keep a callee
// alive: the gate in Python or an executable that calls it does. Two live callees never share a
// name. Thread-safe.
class Registry {
 public:
  static Registry& instance() { return immortal<Registry>(); }

  // Throws Error(kAlreadyExists) if another live callee has the name.
  void add(const std::shared_ptr<Callee>& callee);

  // Frees the name if `callee` still has it. Executables that hold the callee keep calling it.
  void remove(const Callee& callee) noexcept;

  // The live callee of the name, or the callee that claims it. The resolver is called for a missing
  // name. Throws Error(kNotFound), with defined names, if there is none.
  std::shared_ptr<Callee> find(std::string_view name) const;

  // Until release(), find() returns `callee` for its name, regardless of the registered callee.
  // Only one callee at a time claims a name.
  void claim(const std::shared_ptr<Callee>& callee);
  void release(const Callee& callee) noexcept;

  // Called without a lock for undefined names. If it defines the name (such as a kernel's variant
  // that this process has not used yet), it returns the owner of the callee, which may have no
  // other owner; otherwise null, and the defined names for the message, those most like it first.
  using Resolver = std::function<std::shared_ptr<void>(const std::string& name,
                                                       std::vector<std::string>& defined)>;
  void set_resolver(Resolver resolver);

  // True if a live callee has the name, so that add() of another one would throw.
  bool has(const std::string& name) const;

  // The live names, sorted.
  std::vector<std::string> names() const;

 private:
  std::shared_ptr<Callee> lookup(std::string_view name) const;

  using Names = std::unordered_map<std::string, std::weak_ptr<Callee>>;

  mutable std::mutex mutex_;  // guards only the maps: no callee is destroyed or called under it
  Resolver resolver_;
  Names callees_, claims_;
};

}  // namespace callgate
