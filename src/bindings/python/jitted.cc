// SPDX-License-Identifier: Apache-2.0
// Wraps each call of a jitted function: lists the active calls, and corrects the class of their
// errors.
//
// Before a call has returned its results, a program's objects may not be visible anywhere else. The
// search for unused objects (python/callgate/_objects) therefore asks for the active calls.
//
// jaxlib raises an immediate failure of a program as ValueError if its C++ code dispatched the
// program, and otherwise as JaxRuntimeError (0.10 to 0.12).
//
// On the main thread a program's error may be the result of Ctrl-C, or of another signal handler.
// So when a JaxRuntimeError is created, by any wait for a program, the main thread's pending
// exception is raised instead. A function hears of the error, which the end of the process need not
// report again.
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

// The dispatch of jaxlib's one type for jitted functions.
vectorcallfunc dispatch;  // with which its objects were made
PyObject* runtime_error;  // JaxRuntimeError, for the process's life

// An active call, on its thread's stack.
class Underway : Immovable {
 public:
  Underway() : thread_(std::this_thread::get_id()) {
    nb::ft_lock_guard lock(mutex_);
    number_ = ++last_number_;  // NOLINT(*-prefer-member-initializer): under the lock
    before_ = std::exchange(newest_, this);
    if (before_ != nullptr) before_->after_ = this;
    ++depth_;
  }
  ~Underway() {
    nb::ft_lock_guard lock(mutex_);
    --depth_;
    if (before_ != nullptr) before_->after_ = after_;
    (after_ != nullptr ? after_->before_ : newest_) = before_;
  }

  // The next number of objects and calls, which are in the order of their beginnings.
  static std::uint64_t new_number() {
    nb::ft_lock_guard lock(mutex_);
    return ++last_number_;
  }

  // True on a thread inside such a call.
  static bool is_nested() { return depth_ > 0; }
  // The number of the oldest call, or the largest number for none. With `is_returning`, without
  // this thread's innermost call.
  static std::uint64_t oldest(bool is_returning) {
    std::uint64_t oldest = std::numeric_limits<std::uint64_t>::max();
    bool passed = !is_returning;
    nb::ft_lock_guard lock(mutex_);
    for (const Underway* call = newest_; call != nullptr; call = call->before_) {
      bool innermost = !passed && call->thread_ == std::this_thread::get_id();
      passed = passed || innermost;
      if (!innermost) oldest = call->number_;
    }
    return oldest;
  }
  // True while another thread's call that began before that number has not returned.
  static bool others_before(std::uint64_t number) {
    nb::ft_lock_guard lock(mutex_);
    for (const Underway* call = newest_; call != nullptr; call = call->before_)
      if (call->number_ < number && call->thread_ != std::this_thread::get_id()) return true;
    return false;
  }

 private:
  static inline nb::ft_mutex mutex_;  // guards the list and the numbers
  static inline Underway* newest_ = nullptr;
  static inline std::uint64_t last_number_ = 0;
  static inline thread_local int depth_ = 0;

  std::uint64_t number_ = 0;
  std::thread::id thread_;
  Underway* before_ = nullptr;
  Underway* after_ = nullptr;
};

// Takes the function out and calls it, if there is one.
void call_once(Shared<PyObject*>& function) {
  if (nb::object taken = nb::steal(function.exchange(nullptr))) call_unraisable(taken.ptr(), "");
}

// Raises the exception of a signal handler that runs now, or the main thread's pending exception.
void raise_what_waits() {
  if (PyErr_CheckSignals() != 0 || (MainThread::is_this() && !nothing_left()))
    nb::raise_python_error();
}

// Makes a class of errors raise the pending exception when an instance is created, or else call
// `created` with it.
void raise_instead(nb::object type, nb::object created) {
  nb::object init = type.attr("__init__");
  type.attr("__init__") = nb::cpp_function(
      [init, created](const nb::handle& error, const nb::args& given) {
        init(error, *given);
        if (in_hook) return;  // the error would belong to the hook
        raise_what_waits();
        created(error);
      },
      nb::is_method(), nb::scope(type), nb::name("__init__"));
}

// Turns the error of a call into a `runtime_error` if it is a program's error from callgate. An
// error that Python code raised while JAX traced has a traceback at this point.
void translate() {
  nb::python_error error;  // takes it
  if (error.type().is(PyExc_ValueError) && !error.traceback().is_valid()) {
    nb::object text = nb::steal(PyObject_Str(error.value().ptr()));
    if (!text.is_valid()) return;  // a signal handler raised during str()
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

Shared<PyObject*> before_next_call{nullptr};  // null after the call

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

// The offset of an object's call function, by its type. The stable ABI has no name for it.
// PyTypeObject begins with a PyVarObject, a pointer, two sizes and one more pointer.
Py_ssize_t vectorcall_offset(PyTypeObject* type) {
  constexpr std::size_t kAt = sizeof(PyVarObject) + 2 * sizeof(void*) + 2 * sizeof(Py_ssize_t);
  Py_ssize_t offset = 0;
  std::memcpy(&offset, reinterpret_cast<const char*>(type) + kAt, sizeof offset);
  return offset;
}

// False, without any change, if the function isn't called in the known way.
bool have_raise(nb::handle function, nb::handle error) {
  constexpr unsigned long kHasVectorcall = 1UL << 11;  // Py_TPFLAGS_HAVE_VECTORCALL
  PyTypeObject* type = Py_TYPE(function.ptr());
  Py_ssize_t offset = vectorcall_offset(type);
  if ((PyType_GetFlags(type) & kHasVectorcall) == 0 || offset <= 0) return false;
  char* at = reinterpret_cast<char*>(function.ptr()) + offset;
  vectorcallfunc held = nullptr;
  static nb::ft_mutex mutex;
  nb::ft_lock_guard lock(mutex);
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

Shared<PyObject*> at_first_callee{nullptr};  // null after the call

}  // namespace

void tell_first_callee() {
  if (at_first_callee != nullptr) call_once(at_first_callee);
}

void bind_jitted(nb::module_& module) {
  MainThread::set_run_handlers(&run_handlers);
  module.def("have_raise", &have_raise, nb::arg("function"), nb::arg("error"),
             "Makes a jitted function raise a gate's error as the given class.");
  module.def(
      "raise_instead", &raise_instead, nb::arg("error"), nb::arg("created"),
      "Makes an error class raise the main thread's pending exception at each instantiation, or "
      "else call `created(error)`.");
  module.def(
      "without_signals",
      [](const nb::object& function) {
        return nb::cpp_function([function](const nb::args&) { function(); });
      },
      nb::arg("function"),
      "A function that ignores its arguments and calls another. No signal handler runs in it, "
      "unlike at the start of a Python function.");
  module.def("set_main_thread", &MainThread::set, nb::arg("thread"));
  module.def("wake_main_thread", &wake_main_thread,
             "Makes the main thread raise its pending exception.");
  module.def(
      "at_first_callee",
      [](nb::object function) { at_first_callee.exchange(function.release().ptr()); },
      nb::arg("function"),
      "Calls the function once, before the first gate, kernel or tap is created.");
  module.def(
      "before_next_call",
      [](nb::object function) { nb::steal(before_next_call.exchange(function.release().ptr())); },
      nb::arg("function"),
      "Calls the function once, at the start of the next call of a jitted function.");
  module.def("new_number", &Underway::new_number,
             "Returns the next number, in one order with the calls of jitted functions.");
  module.def(
      "others_underway", &Underway::others_before, nb::arg("number"),
      "True if a jitted call of another thread that began before the number has not returned.");
  module.def("oldest_underway", &Underway::oldest, nb::arg("is_returning"),
             "The number of the oldest active call of a jitted function, 2**64 - 1 for none; "
             "is_returning: this thread's innermost call already has its results.");
}

}  // namespace callgate::bindings
