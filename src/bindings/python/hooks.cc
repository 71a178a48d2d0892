// SPDX-License-Identifier: Apache-2.0
// Texts and errors from the hooks, and interrupts on their way to the main thread.
#include "bindings/python/hooks.h"

namespace callgate::bindings {

bool nothing_left() {
  nb::object left = call_hook(hooks.interrupted, "");
  if (left.is_valid() && left.is_none()) return true;
  if (left.is_valid()) PyErr_SetObject(left.type().ptr(), left.ptr());
  return false;
}

void wake_main_thread() {
  if (!passes_interrupts_on) return;
  auto raise = [](void*) -> int {
    if (!in_hook) return nothing_left() ? 0 : -1;
    met_interrupt = true;  // its error would look like the hook's own
    return 0;
  };
  (void)Py_AddPendingCall(raise, nullptr);  // full if others are about to be raised
}

bool is_left_to_main_thread(const nb::python_error& error) {
  nb::object left = call_hook(hooks.unheard, "O", error.value().ptr());
  if (!left.is_valid()) PyErr_Clear();
  return left.ptr() == Py_True;
}

void write_unraisable(PyObject* raising) {
  nb::python_error error;  // takes it
  if (is_left_to_main_thread(error)) return;
  error.restore();
  PyErr_WriteUnraisable(raising);
}

std::string text_or(nb::object text, const std::string& otherwise) {
  if (text.is_valid()) {
    nb::object bytes =
        nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
    if (bytes.is_valid())
      return {PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr()))};
  }
  clear_error();
  return text.is_valid() ? "a text that can't be shown" : otherwise;
}

void run_handlers() {
  ActiveGil gil;
  if (!gil || PyErr_CheckSignals() == 0) return;
  nb::python_error raised;  // takes it
  throw Error::verbatim(ErrorCode::kAborted,
                        text_or(call_hook(hooks.handled, "O", raised.value().ptr()),
                                "callgate: a signal's handler raised"));
}

void call_deferred(const Error& error) {
  if (!call_hook(hooks.deferred, "s", valid_utf8(error.what()).c_str()).is_valid())
    write_unraisable(nullptr);
}

void raise_mismatch(const std::string& gate, const std::string& spec, int index,
                    const std::string& expected, const std::string& got) {
  call_python(hooks.result_error, "ssiss", gate.c_str(), spec.c_str(), index, expected.c_str(),
              got.c_str());
  nb::raise_python_error();  // the hook raises
}

std::string stall_text(const std::string& what, const std::string& call, bool timed_out) {
  return text_or(
      call_hook(hooks.stalled, "ssO", what.c_str(), call.c_str(), timed_out ? Py_True : Py_False),
      stalled_text(what, call));
}

std::string failure_text(const nb::python_error& raised, const std::string& gate,
                         const std::string& site, const std::string& layout,
                         const CallContext& context, const std::string& lane) {
  // Not by "s#", whose length type depends on the Python for which the module was built.
  auto str = [](const std::string& from) { return nb::str(from.data(), from.size()); };
  nb::object name = str(gate), place = str(site), parts = str(layout), which = str(lane);
  nb::object text =
      call_hook(hooks.failed, "OOOOiLkO", raised.value().ptr(), name.ptr(), place.ptr(),
                parts.ptr(), context.shard, context.run, context.thread, which.ptr());
  return text_or(text, "callgate: gate '" + gate + "' raised, and its error could not be shown");
}

Error failure_of(const nb::python_error& raised, const std::string& gate, const SiteSpec& spec,
                 const CallContext& context, const std::string& lane) {
  if (raised.matches(hooks.interruption)) return interrupted(gate);
  return Error::verbatim(ErrorCode::kInternal,
                         failure_text(raised, gate, spec.site, spec.layout, context, lane));
}

}  // namespace callgate::bindings
