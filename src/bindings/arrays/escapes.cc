// See the header.
#include "bindings/arrays/escapes.h"

#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"

namespace callgate::bindings {
namespace {

nb::list suspects_of(std::span<const Views> escaped) {
  nb::list suspects;
  for (const Views& views : escaped) {
    for (std::size_t i = 0; i < views.objects.size(); ++i) {
      suspects.append(nb::make_tuple(views.kind, i, nb::borrow(views.objects.data()[i]),
                                     reinterpret_cast<std::uintptr_t>(views.memory[i].data),
                                     views.memory[i].nbytes()));
    }
  }
  return suspects;
}

}  // namespace

bool settle_escapes(const std::shared_ptr<PyCallee>& callee, const std::string& spec,
                    std::span<const Views> escaped, bool ok) {
  nb::object raised = ok ? nb::none() : take_raised();  // set aside while the hook runs
  nb::list suspects = suspects_of(escaped);
  nb::object make_private = nb::cpp_function([callee](const std::string& kind) {
    callee->make_private(kind == "argument" ? kPrivateInputs : kPrivateResults);
  });
  nb::object done =
      nb::steal(call_python(Hooks::instance().escaped, "ssOOO", callee->name().c_str(),
                            spec.c_str(), suspects.ptr(), raised.ptr(), make_private.ptr()));
  if (ok) return done.is_valid();
  if (!done.is_valid()) PyErr_Clear();  // the call's own exception matters more
  restore_raised(std::move(raised));
  return false;
}

}  // namespace callgate::bindings
