// Ctrl-C in Python's terms. Only calls that meet an interrupt take the GIL here.
#include "core/interrupt.h"

#include <csignal>

#include "bindings/bind.h"
#include "bindings/python/gil.h"
#include "channel/channel.h"

namespace callgate::bindings {
namespace {

// Held for the life of the process.
PyObject* g_getsignal = nullptr;
PyObject* g_default = nullptr;

// Whether Python's own handler is there, which raises KeyboardInterrupt as soon as the main thread
// is back in Python. In C alone: Python code would meet the interrupt itself, here.
bool raises() {
  GilScope gil;
  nb::object handler = nb::steal(call_python(g_getsignal, "i", SIGINT));
  if (!handler.is_valid()) PyErr_Clear();
  return handler.ptr() == g_default;
}

// For a sender that waits, which asks many times a second. Earlier ones have been dealt with.
bool interrupted() {
  Interrupts::watch();
  return Interrupts::recent();
}

}  // namespace

void bind_interrupt(nb::module_& module) {
  nb::module_ signals = nb::module_::import_("_signal");
  g_getsignal = nb::object(signals.attr("getsignal")).release().ptr();
  g_default = nb::object(signals.attr("default_int_handler")).release().ptr();
  Interrupts::set_judge(&raises);
  Channel::set_interrupted(&interrupted);
  module.def("interrupted_recently", &Interrupts::recent,
             "Whether Ctrl-C came in the last second.");
  module.def("end_programs", &Interrupts::end_all, nb::arg("on"),
             "Has every call of a program end it, until it is told False.");
}

}  // namespace callgate::bindings
