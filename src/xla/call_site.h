// A call site of a gate or tap, on any platform.
#pragma once

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
  // In a program over several devices; see poisoned_on_error() in guard.h.
  bool poison_on_error = false;
  bool reads_context = true;
  Shards shards;

  // For arrays in the host's memory.
  Outcome run(const Call& call) const;
};

// Finds the callee and binds it to the site that the attributes describe. Throws Error.
std::shared_ptr<CallSite> make_call_site(const ::xla::ffi::Dictionary& attributes);

// The outcome of a call that comes when the process is ending.
Outcome shutting_down(const Callee& callee);

// The failure of a call that Ctrl-C ends.
Failure interrupted(const std::string& callee);

}  // namespace callgate::xla_ffi
