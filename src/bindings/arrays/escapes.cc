// See the header.
#include "bindings/arrays/escapes.h"

#include <nanobind/stl/string.h>

#include <string>

#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"

namespace callgate::bindings {
namespace {

// The call's own exception, set aside while the hook runs.
class PendingException {
 public:
  explicit PendingException(bool any) {
    if (!any) return;
#if PY_VERSION_HEX >= 0x030C0000
    value_ = nb::steal(PyErr_GetRaisedException());
#else
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr) PyException_SetTraceback(value, traceback);
    type_ = nb::steal(type);
    value_ = nb::steal(value);
    traceback_ = nb::steal(traceback);
#endif
  }

  PyObject* object() const { return value_.is_valid() ? value_.ptr() : Py_None; }

  void restore() {
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(value_.release().ptr());
#else
    PyErr_Restore(type_.release().ptr(), value_.release().ptr(), traceback_.release().ptr());
#endif
  }

 private:
  nb::object type_, value_, traceback_;
};

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
  PendingException pending(!ok);
  nb::list suspects = suspects_of(escaped);
  nb::object make_private = nb::cpp_function([callee](const std::string& kind) {
    callee->make_private(kind == "argument" ? kPrivateInputs : kPrivateResults);
  });
  nb::object done =
      nb::steal(call_python(Hooks::instance().escaped, "ssOOO", callee->name().c_str(),
                            spec.c_str(), suspects.ptr(), pending.object(), make_private.ptr()));
  if (ok) return done.is_valid();
  if (!done.is_valid()) PyErr_Clear();  // the call's own exception matters more
  pending.restore();
  return false;
}

}  // namespace callgate::bindings
