// The call-site walk alone, as a module that needs no torch: built against every Python at hand.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <chrono>
#include <vector>

#include "callsite.h"

namespace {

rankcall::CallSites g_sites;
std::vector<std::string> g_found;

uint32_t emit(void*, const std::string& json, const std::string&, const char*) {
  g_found.push_back(json);
  return static_cast<uint32_t>(g_found.size());
}

PyObject* configure(PyObject*, PyObject* prefix) {
  g_found.clear();
  g_sites.reset({PyUnicode_AsUTF8(prefix)}, emit, nullptr);
  Py_RETURN_NONE;
}

// The JSON of the caller's site (None without one), and whether it continues the last call.
PyObject* find(PyObject*, PyObject*) {
  rankcall::CallSites::Found found;
  Py_BEGIN_ALLOW_THREADS
  found = g_sites.find(0);
  Py_END_ALLOW_THREADS
  if (!found.site) return Py_BuildValue("OO", Py_None, Py_False);
  return Py_BuildValue("sO", g_found[found.site - 1].c_str(), found.continues ? Py_True : Py_False);
}

PyObject* nanoseconds(PyObject*, PyObject*) {
  constexpr int kCalls = 200000;
  double took;
  Py_BEGIN_ALLOW_THREADS
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; i++) g_sites.find(0);
  took = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - began).count() / kCalls;
  Py_END_ALLOW_THREADS
  return PyFloat_FromDouble(took);
}

PyMethodDef g_methods[] = {{"configure", configure, METH_O, ""},
                           {"find", find, METH_NOARGS, ""},
                           {"nanoseconds", nanoseconds, METH_NOARGS, ""},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "callsite_probe", nullptr, -1, g_methods,
                        nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_callsite_probe() { return PyModule_Create(&g_module); }
