// SPDX-License-Identifier: Apache-2.0
// The objects of Python's collector, in free-threaded Python.
//
// gc.get_objects() also takes references to tuples that another thread is making. Python's
// functions that resize a new tuple fail if it has a second reference.
#include <vector>

#include "bindings/python/gil.h"

namespace callgate::bindings {

#ifdef Py_GIL_DISABLED
namespace {

struct Found {
  PyTypeObject* kind;  // null for all
  std::vector<PyObject*> objects;
};

nb::list live_objects(nb::handle kind) {
  Found found{kind.is_none() ? nullptr : reinterpret_cast<PyTypeObject*>(kind.ptr()), {}};
  auto take = [](PyObject* object, void* to) {  // while all other threads with Python code stand
    auto& [wanted, objects] = *static_cast<Found*>(to);
    if (wanted == nullptr ? !PyTuple_CheckExact(object) : Py_TYPE(object) == wanted)
      objects.push_back(Py_NewRef(object));
    return 1;  // go on
  };
  PyUnstable_GC_VisitObjects(take, &found);
  nb::list objects;
  for (PyObject* object : found.objects) objects.append(nb::steal(object));
  return objects;
}

}  // namespace

void bind_live_objects(nb::module_& module) {
  module.def("live_objects", &live_objects, nb::arg("kind").none(),
             "The tracked and not frozen objects of exactly a type; with None of all types but "
             "tuple.");
}
#else
void bind_live_objects(nb::module_&) {}
#endif

}  // namespace callgate::bindings
