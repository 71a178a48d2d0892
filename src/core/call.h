// SPDX-License-Identifier: Apache-2.0
// Callees, their call sites, and the table of their names.
//
// A `Callee` is what a name stands for: a Python function, a native kernel or a tap. When an
// executable is loaded, every call site asks its callee once for a `Site`, bound to the site's
// static description, and keeps both until the executable dies. `Site::run` is the hot path: any
// XLA thread, several at once, no lock of callgate's held.
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

// Where and when a call runs. `stream` is the platform's stream, null on the CPU. `shard` is the
// device's position in a program over several devices, -1 for a call on whole arrays. `lane` is the
// number of the call among those that a program makes one after the other (core/lanes.h).
struct CallContext {
  std::int32_t device = -1;
  std::int32_t lane = 0;
  std::int64_t run = -1;
  void* stream = nullptr;
  std::int32_t ordinal = -1;  // of the GPU, as its driver counts; -1 for none, or not told
  std::int32_t shard = -1;
  unsigned long thread = 0;  // Python's number of the thread that XLA made the call on; 0: not told
};

// True if each call is told all of its context, whatever its callee reads: while a recording is
// made or replayed. Relaxed: a call that runs when it changes is told or not.
inline constinit std::atomic<bool> contexts_wanted{false};

struct Call {
  std::span<const ArrayView> operands;
  std::span<ArrayView> results;
  CallContext context;
  // The holder of the operands' memory, where the callee may keep that; else null.
  const std::shared_ptr<void>* memory = nullptr;
};

// The devices of a program, and the axes along which they are numbered, outermost first.
struct Mesh {
  std::int64_t devices = 1;
  std::vector<std::pair<std::string, std::int64_t>> axes;  // none where the program tells none

  // As programs hold it: devices, and in order `names` and `sizes`. Throws Error for another form.
  static Mesh of(const Attributes& held);
};

// The static description of a call site, as its attributes in the program state it.
struct SiteSpec {
  std::string spec;    // how flat arrays make up the call's arguments and results; "" when flat
  std::string site;    // where in the user's source the call was traced
  Lanes lanes;         // vmapped levels that the runtime loops over
  Mesh mesh;           // of the program
  std::string layout;  // which part of its arrays each shard is, for messages; "" for whole ones
  Attributes held;     // all that the call holds
};

// Memory of a device that lives as long as somebody holds on to it.
struct DeviceMemory {
  virtual ~DeviceMemory() = default;
};

class Site {
 public:
  virtual ~Site() = default;
  // Throws Error where the call fails.
  virtual void run(const Call& call) = 0;
  // False when it looks at nothing of a call's context but its run.
  virtual bool reads_context() const noexcept { return true; }
  // In place of run(), where another device makes the call: the results of both are added up.
  virtual void skip(const Call& call) noexcept { clear(call.results); }

  // The rest is for sites of callees that are OnDevice::kDeferred.

  // When the program comes to the call, before its arrays can be read: how many of its operands,
  // the first ones, run_deferred() is to get; nothing for nothing to be done. May throw Error.
  virtual std::optional<std::size_t> reads(const Call& call) { return call.operands.size(); }
  // Later, without results: each is the program's already, a copy of the operand copied_to().
  virtual void run_deferred(const Call& call) { run(call); }
  virtual std::size_t copied_to(std::size_t result) const noexcept { return result; }

  // The same for a call that is recorded once and then replayed: what the copies are of, and each
  // replay. The driver makes that call and must not be called back from it, nor wait for anybody.
  // False where run_deferred() is to be called, soon and elsewhere.
  virtual std::size_t reads_replayed(const Call& call) { return call.operands.size(); }
  virtual bool run_replayed(const Call& /*call*/) { return false; }
  // No memory for copies. True where the site has taken note, so that the program goes on.
  virtual bool drop(const Call& /*call*/) noexcept { return false; }

  // How many of its operands, the first ones, the site wants as copies on the device, to keep. If
  // any, run_kept() is called in place of run_deferred(): with views of `memory` for these, which
  // the host can't read, and of the host's memory for the others.
  virtual std::size_t kept_on_device() const noexcept { return 0; }
  virtual void run_kept(const Call& call, const std::shared_ptr<DeviceMemory>& /*memory*/) {
    run_deferred(call);
  }
};

// How a callee takes a call whose arrays are a GPU's.
enum class OnDevice : std::uint8_t {
  kStaged,    // it gets copies in the host's memory, and its results are copied back
  kDeferred,  // the same, later: the program does not wait for it, and gets nothing from it
  kNative,    // it gets the device's own arrays, while the stream may still be writing them
};

class NamedThread;

class Callee {
 public:
  virtual ~Callee() = default;
  // Binds the callee to one call site. Throws Error when `spec` can't be served.
  virtual std::shared_ptr<Site> specialise(SiteSpec spec) = 0;
  virtual const std::string& name() const noexcept = 0;
  // As the timeline has its calls; "" for none there, or where it adds them by itself.
  virtual std::string_view kind() const noexcept { return {}; }
  // True when calls run on callgate's own threads and complete an FFI future.
  virtual bool own_thread() const noexcept { return false; }
  // The one thread that all its calls run on, if it has such a thread; it is own_thread() then.
  virtual NamedThread* thread() const noexcept { return nullptr; }
  // The error of a call for a thread() that has been closed.
  virtual Error closed_error() { return {ErrorCode::kAborted, name() + ": its thread is closed"}; }
  // Called on one of callgate's own threads before each call: of a GPU's program, or the CPU's.
  virtual void enter_worker(bool /*of_device*/) {}
  // False when its sites never look at a call's context, which then is not asked for.
  virtual bool reads_context() const noexcept { return true; }
  virtual OnDevice on_device() const noexcept { return OnDevice::kStaged; }
  // True when a call that comes while the process is ending succeeds without running.
  virtual bool quiet_at_exit() const noexcept { return false; }
  // After this long the program fails with a report; zero for never.
  virtual std::chrono::nanoseconds timeout() const noexcept { return {}; }
  // Keeps a failure that XLA can't be told of, for the next who asks.
  virtual void defer(const Error& /*error*/) {}
  // On a call that takes too long: what runs, where threads stand. `timed_out`: it is an error's.
  virtual std::string stall_report(const std::string& call, bool /*timed_out*/) { return call; }
  // Why a call on the thread (Python's number) waits for its own program, else "". May throw.
  virtual std::string self_wait(unsigned long /*thread*/) { return {}; }
};

// --- Kinds of callees ----------------------------------------------------------------------------

// Nothing, behind an ordered call of an exported program whose results' shapes are symbolic: XLA
// does not work such shapes out beside a token, so this gives the token on, once a result is there.
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

// A kernel for the CPU or for CUDA. Both are called through targets of their own, so a program that
// calls one as a gate is another's. The texts of their failures come from functions that are set
// before the first call.
class KernelCalleeBase : public Callee {
 public:
  // Makes a failure's message what the program's error says; may keep an exception for it. `lane`:
  // "lane 3", "" without lanes.
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

  // Takes failures that XLA can't be told of.
  void set_defer(std::function<void(const Error&)> defer) { defer_ = std::move(defer); }
  // Makes the report on a call that takes long, of its arrays as text.
  using Report = std::function<std::string(const std::string&)>;
  void set_report(Report report) { report_ = std::move(report); }

 private:
  Describe describe_;
  std::function<void(const Error&)> defer_;
  Report report_;
};

// The names that programs call by: they hold no pointers. The registry knows a callee for as long
// as somebody else keeps it alive (the gate in Python, or an executable that calls it). Two live
// callees never share a name. Any thread.
class Registry {
 public:
  static Registry& instance() { return immortal<Registry>(); }

  // Throws Error(kAlreadyExists) when another live callee has the name.
  void add(const std::shared_ptr<Callee>& callee);

  // Frees the name if `callee` still has it. Executables that hold the callee go on calling it.
  void remove(const Callee& callee) noexcept;

  // The live callee of the name, or the one that claims it. One that is not there yet is asked of
  // the resolver. Throws Error(kNotFound), with names that are defined, when there is none.
  std::shared_ptr<Callee> find(std::string_view name) const;

  // Until release(), find() gives `callee` for its name, whoever is registered under it. One callee
  // at a time claims a name.
  void claim(const std::shared_ptr<Callee>& callee);
  void release(const Callee& callee) noexcept;

  // Called without a lock for names that are not defined. Once it has defined the name (a variant
  // of a kernel, say, that nothing in this process has asked for yet), it returns the owner of the
  // callee, which may have no other; else null.
  using Resolver = std::function<std::shared_ptr<void>(const std::string& name)>;
  void set_resolver(Resolver resolver);

  // True if a live callee has the name, so that add() of another would throw.
  bool has(const std::string& name) const;

  // The live names, sorted.
  std::vector<std::string> names() const;

 private:
  std::shared_ptr<Callee> lookup(std::string_view name) const;

  using Names = std::unordered_map<std::string, std::weak_ptr<Callee>>;

  mutable std::mutex mutex_;  // guards the maps alone: no callee is destroyed or called under it
  Resolver resolver_;
  Names callees_, claims_;
};

}  // namespace callgate
