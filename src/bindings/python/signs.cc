// SPDX-License-Identifier: Apache-2.0
// Takes the signs of programs from JAX's C++ code, with their results, and limits a thread's lead
// over its programs.
//
// XLA has at most 32 programs of a device in flight; the next one waits, even if a gate's function
// runs it and a program in flight waits for it. So a thread is held back before that.
#include "bindings/python/signs.h"

#include <cstddef>
#include <utility>

namespace callgate::bindings {
namespace {

// A thread's programs since it was last held back. Owned by the thread's state; Python drops it
// under the GIL.
class Ahead : Immovable {
 public:
  // This thread's.
  static Ahead& of_thread() {
    if (of_thread_ == nullptr) {
      nb::object owner = nb::capsule(new Ahead, [](void* ahead) noexcept {
        if (of_thread_ == ahead) of_thread_ = nullptr;
        delete static_cast<Ahead*>(ahead);
      });
      PyObject* held = PyThreadState_GetDict();
      if (held == nullptr || PyDict_SetItemString(held, "callgate.ahead", owner.ptr()) != 0)
        nb::raise_python_error();
      of_thread_ = static_cast<Ahead*>(PyCapsule_GetPointer(owner.ptr(), nullptr));
    }
    return *of_thread_;
  }

  void add(nb::handle sign, bool runs_programs) {
    last_ = nb::borrow(sign);
    counts_calls |= runs_programs;
    if (!counts_calls) count();
  }

  // At every `kStep`th program, waits for the program `kStep` before.
  void count() {
    if (++count_ < kStep) return;
    count_ = 0;
    nb::object before = std::exchange(before_, std::exchange(last_, {}));
    if (!before_.is_valid()) counts_calls = false;
    if (!before.is_valid()) return;
    try {
      before.attr("block_until_ready")();
    } catch (nb::python_error& error) {  // for those who wait for the program
      if (!error.matches(PyExc_Exception)) throw;
    }
  }

  // Releases and returns its signs.
  nb::list take() {
    counts_calls = false;
    nb::list taken;
    for (nb::object* sign : {&before_, &last_})
      if (sign->is_valid()) taken.append(std::exchange(*sign, {}));
    return taken;
  }

 private:
  static constexpr int kStep = 6;
  static inline thread_local Ahead* of_thread_ = nullptr;

  int count_ = 0;
  nb::object before_, last_;
};

// The values set by `keep_signs`, for the process's life.
struct Keeper {
  nb::dict signs;
  nb::list listeners;
  nb::object prune;
  Shared<std::size_t> prune_at;
};
Keeper* keeper;

// Removes a program's sign from its results and returns the results. `key`: see `_Program.key`.
nb::object keep(const nb::tuple& key, const nb::sequence& children, bool returning) {
  nb::object results = children[0], sign = children[1];
  nb::handle number = key[0];
  if (!number.is_none()) {
    nb::object thread = nb::steal(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
    keeper->signs[nb::make_tuple(thread, number)] = sign;
    if (keeper->signs.size() > keeper->prune_at)
      keeper->prune_at = nb::cast<std::size_t>(keeper->prune());
  }
  Ahead::of_thread().add(sign, key[1].is(Py_True));
  if (!number.is_none() && !keeper->listeners.empty())
    for (nb::handle listener : nb::tuple(keeper->listeners)) listener(returning);
  return results;
}

}  // namespace

bool count_call() {
  try {
    Ahead::of_thread().count();
    return true;
  } catch (nb::python_error& error) {
    error.restore();
    return false;
  }
}

void bind_signs(nb::module_& module) {
  module.def(
      "keep_signs",
      [](nb::dict signs, nb::list listeners, nb::object prune, std::size_t prune_at) {
        keeper = new Keeper{std::move(signs), std::move(listeners), std::move(prune), {prune_at}};
      },
      nb::arg("signs"), nb::arg("listeners"), nb::arg("prune"), nb::arg("prune_at"),
      "Sets up keep_sign(): it fills the dict, notifies the listeners, and calls `prune` when "
      "there are more than `prune_at` signs, which returns the next limit.");
  module.def("keep_sign", &keep, nb::arg("key"), nb::arg("children"), nb::arg("returning") = true,
             "Stores a program's sign and returns its other results. Waits if this thread is too "
             "far ahead of its programs.");
  module.def(
      "take_signs_ahead", [] { return Ahead::of_thread().take(); },
      "Ends this thread's waits for its dispatched programs; returns their signs.");
}

}  // namespace callgate::bindings
