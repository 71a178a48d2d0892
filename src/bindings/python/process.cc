// What comes to the process from outside its programs: Ctrl-C, in Python's terms, and its end.
//
// Python runs exit handlers in the reverse of their order: those that were registered before
// callgate's run after it, and may run programs still. What such programs tap can't be delivered
// any more, but it is not lost in silence: it is counted, and reported when the C library ends the
// process. That is after Python's end, so all of that is C++.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "bindings/python/gil.h"
#include "channel/tap.h"
#include "core/lifecycle.h"
#include "core/lifetime.h"

namespace callgate::bindings {
namespace {

struct ExitWatch {
  pid_t process = 0;
  std::map<std::string, std::uint64_t> sent_before;  // by channel
  std::atomic<bool> failed{false};                   // relaxed: one thread sets and reads it
};

ExitWatch& exit_watch() { return immortal<ExitWatch>(); }

std::map<std::string, std::uint64_t> sent_by_channel() {
  std::map<std::string, std::uint64_t> all;
  for (const auto& channel : Channels::instance().all())
    all[channel->options().name] = channel->stats().sent;
  return all;
}

void report_lost(const std::string& what, std::uint64_t count) {
  std::fprintf(stderr,
               "callgate: not delivered at the end of the program: %s: %llu record(s) that came "
               "after callgate's end, from a thread that went on or an atexit handler registered "
               "before callgate was imported\n",
               what.c_str(), static_cast<unsigned long long>(count));
}

void report_late() {
  for (const auto& [name, count] : sent_by_channel()) {
    std::uint64_t known = exit_watch().sent_before[name];
    if (count > known) report_lost("channel '" + name + "'", count - known);
  }
  for (const auto& [name, count] : LateCalls::instance().all()) {
    std::string callee = "'" + name + "'";  // "tap 'name'" for "tap:name"
    if (auto colon = name.find(':'); colon != std::string::npos)
      callee = name.substr(0, colon) + " '" + name.substr(colon + 1) + "'";
    report_lost(callee, count);
  }
}

// At the C library's end of the process.
void at_process_end(int status, void*) {
  if (getpid() != exit_watch().process) return;  // a fork's child, which inherits the handlers
  try {
    report_late();
  } catch (...) {  // NOLINT(bugprone-empty-catch): nobody is left to be told
  }
  // The handlers that follow run in this call's turn, as glibc has it.
  if (status == 0 && exit_watch().failed.load(std::memory_order_relaxed)) std::exit(EXIT_FAILURE);
}

// Begins to count what comes too late. Once.
void watch_exit() {
  exit_watch().process = getpid();
  exit_watch().sent_before = sent_by_channel();
  on_exit(&at_process_end, nullptr);
}

}  // namespace

void bind_process(nb::module_& module) {
  // Held for the life of the process.
  static PyObject *getsignal, *python_handler;
  nb::module_ signals = nb::module_::import_("_signal");
  getsignal = nb::object(signals.attr("getsignal")).release().ptr();
  python_handler = nb::object(signals.attr("default_int_handler")).release().ptr();
  // Whether Python's own handler is there, which raises KeyboardInterrupt as soon as the main
  // thread is back in Python. In C alone: Python code would meet the interrupt itself, here.
  Interrupts::set_judge([] {
    GilScope gil;
    nb::object handler = call_python(getsignal, "i", SIGINT);
    if (!handler.is_valid()) PyErr_Clear();
    return handler.ptr() == python_handler;
  });
  // For a sender that waits, which asks many times a second. Earlier ones have been dealt with.
  Channel::set_interrupted([] {
    Interrupts::watch();
    return Interrupts::recent();
  });
  module.def("interrupted_recently", &Interrupts::recent, "Whether Ctrl-C came just now.");
  module.def("end_programs", &Interrupts::end_all, nb::arg("on"),
             "Has every call of a program end it, until it is told False.");
  module.def("watch_exit", &watch_exit, "What is tapped from now on is reported as too late.");
  module.def("fail_exit", [] { exit_watch().failed.store(true, std::memory_order_relaxed); });
}

}  // namespace callgate::bindings
