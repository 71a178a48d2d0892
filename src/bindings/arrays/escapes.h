// Views that outlive their call: the way from a call site to Python's `escaped` hook, which finds
// who holds them. The slow path of a mistake; the GIL is held.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "bindings/gate/gate.h"
#include "bindings/python/arguments.h"
#include "core/array_view.h"

namespace callgate::bindings {

// The views of one kind ("argument" or "result") of a call, and the memory that they show.
struct Views {
  const char* kind;
  Arguments& objects;
  std::span<const ArrayView> memory;
};

// Has what still refers to the views made safe. `ok` is false while the call's own exception is
// set: its frames may hold views, which is no error of the user's. False with a Python error: the
// call's own, or that of an escape. What can't be made safe makes the callee's later views private.
bool settle_escapes(const std::shared_ptr<PyCallee>& callee, const std::string& spec,
                    std::span<const Views> escaped, bool ok);

}  // namespace callgate::bindings
