// A call site of a gate or tap, on any platform.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "core/call.h"
#include "xla/ffi.h"
#include "xla/shards.h"

namespace callgate::xla_ffi {

// One call site of one executable. Shared, since a call on its own thread that was given up by the
// watchdog may outlive the executable.
struct CallSite {
  std::shared_ptr<Callee> callee;
  std::shared_ptr<Site> site;
  bool poison_on_error = false;  // see settled() in guard.h
  bool reads_context = true;
  Shards shards;
  mutable std::atomic<std::int64_t> first_run{-1};

  // Whether the run is the first that comes by.
  bool is_first(std::int64_t run) const noexcept {
    std::int64_t first = -1;  // relaxed: a number that is set once
    return first_run.compare_exchange_strong(first, run, std::memory_order_relaxed) || first == run;
  }

  // For arrays in the host's memory.
  void run(const Call& call) const;
};

// Finds the callee and binds it to the site that the attributes describe. Throws Error.
std::shared_ptr<CallSite> make_call_site(const XLA_FFI_Attrs& attributes);

// For a call that comes when the process is ending: throws Error, unless the callee is quiet then.
void refuse_at_exit(const Callee& callee);

// The failure of a call that Ctrl-C ends.
Error interrupted(const std::string& callee);

}  // namespace callgate::xla_ffi
