// Calls into Python that must not fail: a hook that raises is reported as text of its own.
#include "bindings/python/hooks.h"

#include <nanobind/stl/string.h>

#include <utility>

#include "bindings/python/gil.h"
#include "core/utf8.h"

namespace callgate::bindings {

Hooks& Hooks::instance() {
  static constinit Hooks hooks;
  return hooks;
}

nb::object take_raised() {
#if PY_VERSION_HEX >= 0x030C0000
  return nb::steal(PyErr_GetRaisedException());
#else
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return nb::steal(value);
#endif
}

void restore_raised(nb::object exception) {
#if PY_VERSION_HEX >= 0x030C0000
  PyErr_SetRaisedException(exception.release().ptr());
#else
  PyObject* type = exception.type().inc_ref().ptr();
  PyObject* traceback = PyException_GetTraceback(exception.ptr());
  PyErr_Restore(type, exception.release().ptr(), traceback);
#endif
}

std::string text_of(nb::handle text) {
  nb::object bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) {
    PyErr_Clear();
    return "a text that can't be shown";
  }
  return {PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr()))};
}

namespace {

// Whether this thread runs a hook, and has met an interrupt there.
thread_local bool in_hook = false, met_interrupt = false;

// Has the main thread raise a gate's KeyboardInterrupt as soon as it is in Python. The program ends
// with an Exception, which many a caller takes for one to go on after: Ctrl-C would be lost.
void pass_on_interrupt() {
  auto raise = [](void*) -> int {
    if (in_hook) {  // whose error would be taken for its own
      met_interrupt = true;
      return 0;
    }
    nb::object done = nb::steal(call_python(Hooks::instance().interrupted, ""));
    return done.is_valid() ? 0 : -1;
  };
  (void)Py_AddPendingCall(raise, nullptr);  // full where others are about to be raised
}

}  // namespace

RunningHook::RunningHook() noexcept : outer_(std::exchange(in_hook, true)) {}

RunningHook::~RunningHook() {
  in_hook = outer_;
  if (!outer_ && std::exchange(met_interrupt, false)) pass_on_interrupt();
}

std::string stall_text(const std::string& what, const std::string& call, bool timed_out) {
  nb::object text = nb::steal(call_hook(Hooks::instance().stalled, "ssO", what.c_str(),
                                        call.c_str(), timed_out ? Py_True : Py_False));
  if (text.is_valid()) return text_of(text);
  PyErr_Clear();
  return "callgate: " + what + " called with " + call + " is stalled";
}

void call_deferred(const Error& error) {
  nb::object done =
      nb::steal(call_hook(Hooks::instance().deferred, "s", valid_utf8(error.what()).c_str()));
  if (!done.is_valid()) PyErr_WriteUnraisable(nullptr);
}

std::string take_exception(const std::string& gate, const std::string& site,
                           const std::string& layout, const CallContext& context) {
  nb::object exception = take_raised();
  // Not by "s#": what its length is depends on the Python that the module was built for.
  auto str = [](const std::string& from) {
    return nb::steal(
        PyUnicode_FromStringAndSize(from.data(), static_cast<Py_ssize_t>(from.size())));
  };
  nb::object name = str(gate), place = str(site), parts = str(layout);
  nb::object text = nb::steal(call_hook(
      Hooks::instance().failed, "OOOOiLk", exception.ptr(), name.ptr(), place.ptr(), parts.ptr(),
      static_cast<int>(context.shard), static_cast<long long>(context.run), context.thread));
  if (!text.is_valid()) {
    PyErr_Clear();
    return "callgate: gate '" + gate + "' raised, and its error could not be shown";
  }
  if (PyErr_GivenExceptionMatches(exception.ptr(), PyExc_KeyboardInterrupt) != 0)
    pass_on_interrupt();
  return text_of(text);
}

}  // namespace callgate::bindings
