// See the header. A kernel's calls don't come by here; only their failures do.
#include "bindings/kernel/kernel.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays/host_arrays.h"
#include "bindings/bind.h"
#include "bindings/python/gil.h"
#include "bindings/python/handle.h"
#include "bindings/python/hooks.h"
#include "core/crash_report.h"
#include "core/kernel.h"
#include "core/kernel_mode.h"
#include "core/utf8.h"

namespace callgate::bindings {
namespace {

using Parameters = std::vector<std::tuple<int, int, int>>;  // kind, dtype, rank

// A reference that may die on a thread without the GIL.
std::shared_ptr<void> share(nb::handle object) {
  if (object.is_none()) return nullptr;
  return {nb::borrow(object).release().ptr(),
          [](void* pointer) { release_later(static_cast<PyObject*>(pointer)); }};
}

// For compiled code that has set a Python error, under the GIL: keeps the exception, clears it, and
// fails the call with a text that stands for it.
void take_python_error(const callgate_call* call) {
  nb::object exception = take_raised();
  nb::object text = nb::steal(call_hook(Hooks::instance().kernel_raised, "O",
                                        exception.is_valid() ? exception.ptr() : Py_None));
  if (!text.is_valid()) PyErr_Clear();
  call->services->fail(call, text.is_valid() ? text_of(text).c_str() : "it raised");
}

std::vector<ArrayView> views(const nb::list& arrays) {
  std::vector<ArrayView> views;
  for (nb::handle object : arrays) views.push_back(view_of(object, "a kernel's array"));
  return views;
}

// The Python object `KernelTurn`; see core/kernel.h.
struct TurnHandle {
  std::shared_ptr<KernelTurn> turn;
};

using KernelHandle = Handle<KernelCallee>;

// One call outside XLA, on this thread.
void call(const KernelHandle& kernel, const nb::list& operands, const nb::list& results,
          const std::vector<std::int64_t>& groups, const nb::dict& attributes) {
  KernelCallee& callee = kernel.callee();
  std::unique_ptr<KernelSite> site =
      callee.bind({signature(callee.info()), "", groups, {}, attributes_of(attributes)});
  std::vector<ArrayView> in = views(operands), out = views(results);
  without_gil([&] { site->run(Call{in, out, {}}, nullptr); });
}

std::string kernel_stall_report(const std::string& kernel, const std::string& call) {
  std::string what = "kernel '" + kernel + "'";
  ActiveGil gil;
  if (gil) return stall_text(what, call, /*timed_out=*/false);
  return "callgate: " + what + " called with " + call + " is stalled";
}

std::shared_ptr<KernelCallee> make_callee(std::string name, std::uintptr_t function,
                                          const Parameters& parameters,
                                          std::vector<std::string> names, std::uintptr_t user_data,
                                          bool thread_safe, bool repeatable, nb::handle keep,
                                          std::shared_ptr<KernelTurn> turn) {
  KernelInfo info;
  info.name = std::move(name);
  info.function = reinterpret_cast<callgate_function>(function);
  info.user_data = reinterpret_cast<void*>(user_data);
  for (auto [kind, dtype, rank] : parameters) info.parameters.push_back({kind, dtype, rank});
  info.parameter_names = std::move(names);
  info.thread_safe = thread_safe;
  info.repeatable = repeatable;
  info.turn = std::move(turn);
  std::string kernel = info.name;
  auto callee =
      std::make_shared<KernelCallee>(std::move(info), failures_of(std::move(kernel)), share(keep));
  callee->set_defer(&defer_kernel_failure);
  callee->set_report([kernel = callee->name()](const std::string& call) {
    return kernel_stall_report(kernel, call);
  });
  return callee;
}

nb::list read_library(const std::string& path, std::uintptr_t table) {
  nb::list kernels;
  for (const KernelInfo& info :
       exported_kernels(path, reinterpret_cast<const callgate_kernel* (*)()>(table))) {
    nb::list parameters;
    for (const callgate_parameter& p : info.parameters)
      parameters.append(nb::make_tuple(p.kind, p.dtype, p.rank));
    kernels.append(nb::make_tuple(info.name, reinterpret_cast<std::uintptr_t>(info.function),
                                  parameters, info.parameter_names));
  }
  return kernels;
}

}  // namespace

KernelCalleeBase::Describe failures_of(std::string kernel) {
  return [kernel = std::move(kernel)](const std::string& said, const std::string& site) {
    std::string message = valid_utf8(said);  // native code says things in any encoding
    std::string plain = "callgate: kernel '" + kernel + "': " + message;
    ActiveGil gil;
    if (!gil) return plain;
    nb::object text = nb::steal(call_hook(Hooks::instance().kernel_failed, "sss", kernel.c_str(),
                                          message.c_str(), site.c_str()));
    if (text.is_valid()) return text_of(text);
    PyErr_Clear();
    return plain;
  };
}

void defer_kernel_failure(const Error& error) {
  if (ActiveGil gil; gil) call_deferred(error);
}

void bind_kernel(nb::module_& module) {
  nb::class_<TurnHandle>(module, "KernelTurn", nb::is_weak_referenceable(),
                         "What calls of kernels that are not thread-safe take, one at a time.")
      .def("__init__",
           [](TurnHandle* self) { new (self) TurnHandle{std::make_shared<KernelTurn>()}; })
      .def_static(
          "of_library",
          [](std::uintptr_t address) -> std::optional<TurnHandle> {
            auto turn = turn_of_library(reinterpret_cast<const void*>(address));
            return turn == nullptr ? std::nullopt : std::optional(TurnHandle{std::move(turn)});
          },
          nb::arg("address"),
          "That of all kernels whose code is in the library of this address; None in no library.");
  nb::class_<KernelHandle>(module, "Kernel", nb::is_weak_referenceable(),
                           "The runtime's handle on a native kernel, by name.")
      .def(
          "__init__",
          [](KernelHandle* self, std::string name, std::uintptr_t function,
             const Parameters& parameters, std::vector<std::string> names, std::uintptr_t user_data,
             bool thread_safe, bool repeatable, nb::object keep, const TurnHandle* turn) {
            new (self) KernelHandle(
                make_callee(std::move(name), function, parameters, std::move(names), user_data,
                            thread_safe, repeatable, keep, turn == nullptr ? nullptr : turn->turn));
          },
          nb::arg("name"), nb::arg("function"), nb::arg("parameters"), nb::arg("names"),
          nb::kw_only(), nb::arg("user_data") = 0, nb::arg("thread_safe") = false,
          nb::arg("repeatable") = false, nb::arg("keep") = nb::none(), nb::arg("turn") = nb::none())
      .def_prop_ro("name", &KernelHandle::name)
      .def_prop_ro("signature",
                   [](const KernelHandle& kernel) { return signature(kernel.callee().info()); })
      .def("call", &call, nb::arg("operands"), nb::arg("results"), nb::arg("groups"),
           nb::arg("attributes"));
  module.def("read_library", &read_library, nb::arg("path"), nb::arg("table"),
             "(name, function, parameters, names) of each kernel of a loaded library.");
  module.def("take_python_error_address",
             [] { return reinterpret_cast<std::uintptr_t>(&take_python_error); });
  module.def("set_check_memory", [](bool on) { set_kernel_mode(KernelMode::kCheckMemory, on); });
  module.def("set_crash_report", &set_crash_report, nb::arg("on"));
  module.attr("KERNEL_ABI") = CALLGATE_ABI;
}

}  // namespace callgate::bindings
