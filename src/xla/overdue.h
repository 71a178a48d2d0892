// Calls that have run longer than their timeout.
//
// A report says where Python's threads stand, so it needs the GIL, which the very callable may hold
// for ever. So another thread makes it, and after a short while the call fails without: the
// watchdog's thread never waits, neither do other calls' timeouts.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "xla/call_site.h"

namespace callgate::xla_ffi {

// Ends a call with a text, unless it has ended: then it returns false. Before its program goes on
// it calls `keep`. It takes no GIL itself.
using Settle = std::function<bool(const std::string& text, const std::function<void()>& keep)>;

// On the watchdog's thread, for a call with arguments `described` of the site. A failure that XLA
// is not told of is `deferred` to the callee. A report that comes too late goes to stderr.
void fail_overdue(std::shared_ptr<const CallSite> site, std::string described, bool deferred,
                  Settle settle);

}  // namespace callgate::xla_ffi
