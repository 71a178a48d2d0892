// SPDX-License-Identifier: Apache-2.0
// Around each call of a jitted function: which calls are under way, and the class of their errors.
//
// A program's objects may be known to nobody before its call has returned its results: who looks
// for objects that nobody names any more (python/callgate/_objects) asks which calls those are.
//
// jaxlib raises whatever a program failed with at once as ValueError when its C++ code dispatched
// the program, and as JaxRuntimeError else (0.10 to 0.12).
//
// On the main thread a program's error may be what came of Ctrl-C, or of another signal's handler.
// So where a JaxRuntimeError is made, by whatever waits for a program, what the main thread is to
// raise is raised in its place.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "bindings/python/gil.h"
#include "bindings/python/handle.h"
#include "bindings/python/hooks.h"
#include "bindings/python/signs.h"
#include "core/main_thread.h"

namespace callgate::bindings {
namespace {

// The dispatch of the one type that jaxlib has for jitted functions.
vectorcallfunc dispatch;  // what its objects were made with
PyObject* runtime_error;  // JaxRuntimeError, for the life of the process

// Numbers of objects and calls, in the order in which they began. Under the GIL, as all below.
std::uint64_t last_number = 0;

// A call under way, on the stack of its thread.
class Underway : Immovable {
 public:
  Underway() : number_(++last_number), thread_(std::this_thread::get_id()) {
    if (before_ != nullptr) before_->after_ = this;
    newest_ = this;
    ++depth_;
  }
  ~Underway() {
    --depth_;
    if (before_ != nullptr) before_->after_ = after_;
    (after_ != nullptr ? after_->before_ : newest_) = before_;
  }

  // True on a thread within such a call.
  static bool is_nested() { return depth_ > 0; }
  // The number of the oldest, the largest there is for none; without the innermost of this thread,
  // if that `is_returning`.
  static std::uint64_t oldest(bool is_returning) {
    std::uint64_t oldest = std::numeric_limits<std::uint64_t>::max();
    bool passed = !is_returning;
    for (const Underway* call = newest_; call != nullptr; call = call->before_) {
      bool innermost = !passed && call->thread_ == std::this_thread::get_id();
      passed = passed || innermost;
      if (!innermost) oldest = call->number_;
    }
    return oldest;
  }
  // True while a call by another thread that began before that number has not returned.
  static bool others_before(std::uint64_t number) {
    for (const Underway* call = newest_; call != nullptr; call = call->before_)
      if (call->number_ < number && call->thread_ != std::this_thread::get_id()) return true;
    return false;
  }

 private:
  static inline Underway* newest_ = nullptr;
  static inline thread_local int depth_ = 0;

  std::uint64_t number_;
  std::thread::id thread_;
  Underway* before_ = newest_;
  Underway* after_ = nullptr;
};

// Calls what it takes out, if anything.
void call_once(PyObject*& function) {
  if (nb::object taken = nb::steal(std::exchange(function, nullptr)))
    call_unraisable(taken.ptr(), "");
}

// Raises what signals' handlers raise now, or what calls have left for the main thread.
void raise_what_waits() {
  if (in_hook) return;  // whose error it would be
  if (PyErr_CheckSignals() != 0 || (MainThread::is_this() && !nothing_left()))
    nb::raise_python_error();
}

// Has a class of errors raise what waits when one of it is made.
void raise_instead(nb::object type) {
  nb::object init = type.attr("__init__");
  type.attr("__init__") = nb::cpp_function(
      [init](const nb::handle& error, const nb::args& given) {
        init(error, *given);
        raise_what_waits();
      },
      nb::is_method(), nb::scope(type), nb::name("__init__"));
}

// Makes the error that a call raises a `runtime_error` if it is a program's error from callgate.
// One that was raised in Python, while JAX traced, has a traceback by now.
void translate() {
  nb::python_error error;  // takes it
  if (error.type().is(PyExc_ValueError) && !error.traceback().is_valid()) {
    nb::object text = nb::steal(PyObject_Str(error.value().ptr()));
    if (!text.is_valid()) return;  // a signal's handler raises, which Python has run for that
    const char* characters = PyUnicode_AsUTF8AndSize(text.ptr(), nullptr);
    if (characters == nullptr) PyErr_Clear();
    if (characters != nullptr && std::strstr(characters, "callgate") != nullptr) {
      nb::object made = call_python(runtime_error, "O", text.ptr());
      if (made.is_valid()) PyErr_SetObject(runtime_error, made.ptr());
      return;
    }
  }
  error.restore();
}

PyObject* before_next_call;  // null when it has been called

PyObject* call_jitted(PyObject* function, PyObject* const* arguments, std::size_t count,
                      PyObject* names) {
  if (before_next_call != nullptr) [[unlikely]]
    call_once(before_next_call);
  if (counts_calls && !Underway::is_nested() && !count_call()) [[unlikely]]
    return nullptr;
  Underway underway;
  PyObject* result = dispatch(function, arguments, count, names);
  if (result == nullptr && PyErr_ExceptionMatches(PyExc_ValueError)) translate();
  return result;
}

// Where an object of a type holds the function that calls it. The stable ABI has no name for it:
// PyTypeObject begins with a PyVarObject, a pointer, two sizes and one more pointer.
Py_ssize_t vectorcall_offset(PyTypeObject* type) {
  constexpr std::size_t kAt = sizeof(PyVarObject) + 2 * sizeof(void*) + 2 * sizeof(Py_ssize_t);
  Py_ssize_t offset = 0;
  std::memcpy(&offset, reinterpret_cast<const char*>(type) + kAt, sizeof offset);
  return offset;
}

// False, and nothing is changed, where the function isn't called in the way that is known.
bool have_raise(nb::handle function, nb::handle error) {
  constexpr unsigned long kHasVectorcall = 1UL << 11;  // Py_TPFLAGS_HAVE_VECTORCALL
  PyTypeObject* type = Py_TYPE(function.ptr());
  Py_ssize_t offset = vectorcall_offset(type);
  if ((PyType_GetFlags(type) & kHasVectorcall) == 0 || offset <= 0) return false;
  char* at = reinterpret_cast<char*>(function.ptr()) + offset;
  vectorcallfunc held = nullptr;
  std::memcpy(static_cast<void*>(&held), at, sizeof held);
  if (dispatch == nullptr) {
    dispatch = held;
    runtime_error = nb::borrow(error).release().ptr();
  }
  if (held == nullptr || held != dispatch) return held == &call_jitted;
  held = &call_jitted;
  std::memcpy(at, static_cast<const void*>(&held), sizeof held);
  return true;
}

PyObject* at_first_callee;  // null when it has been called

}  // namespace

void tell_first_callee() { call_once(at_first_callee); }

void bind_jitted(nb::module_& module) {
  MainThread::set_run_handlers(&run_handlers);
  module.def("have_raise", &have_raise, nb::arg("function"), nb::arg("error"),
             "Has a jitted function raise a gate's error as the given class.");
  module.def("raise_instead", &raise_instead, nb::arg("error"),
             "Has a class raise what the main thread is to raise where an error of it is made.");
  module.def(
      "without_signals",
      [](const nb::object& function) {
        return nb::cpp_function([function](const nb::args&) { function(); });
      },
      nb::arg("function"),
      "A function of any arguments that calls another without them. No signal's handler runs "
      "within it, as one would at the begin of a function in Python.");
  module.def("set_main_thread", &MainThread::set, nb::arg("thread"));
  module.def("wake_main_thread", &wake_main_thread,
             "Has the main thread raise what calls have left for it.");
  module.def(
      "at_first_callee", [](nb::object function) { at_first_callee = function.release().ptr(); },
      nb::arg("function"),
      "Has the function called once, before the first gate, kernel or tap is made.");
  module.def(
      "before_next_call",
      [](nb::object function) {
        nb::steal(std::exchange(before_next_call, function.release().ptr()));
      },
      nb::arg("function"),
      "Has the function called once, where the next call of a jitted function begins.");
  module.def(
      "new_number", [] { return ++last_number; },
      "Counts objects and calls of jitted functions, in one order.");
  module.def("others_underway", &Underway::others_before, nb::arg("number"),
             "Whether a call of a jitted function by another thread has not returned that began "
             "before the number.");
  module.def("oldest_underway", &Underway::oldest, nb::arg("is_returning"),
             "The number of the oldest call of a jitted function that has not returned, 2**64 - 1 "
             "for none; is_returning: this thread's innermost has its results.");
}

}  // namespace callgate::bindings
