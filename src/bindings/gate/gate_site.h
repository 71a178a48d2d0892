// One call site of a gate: how a call of a compiled program becomes a call of the user's function.
//
// Takes the GIL once a call, makes one view per array and lane, vectorcalls, copies results (style
// return), and looks at the views' reference counts for escapes. On the fast path nothing is
// allocated but the views, and no lock is taken but the GIL.
#pragma once

#include <memory>
#include <string>

#include "bindings/gate/gate.h"

namespace callgate::bindings {

struct Context {
  CallContext call;
  std::shared_ptr<const Mesh> mesh;
};

// `target` is a new reference to the flat callable, which the site takes over; `tuple_results` says
// whether its results come and go as a tuple.
std::shared_ptr<Site> make_gate_site(std::shared_ptr<PyCallee> callee, PyObject* target,
                                     bool tuple_results, SiteSpec spec);

}  // namespace callgate::bindings
