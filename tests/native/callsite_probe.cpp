// The call-site walk alone, as a module that needs no torch: built against every Python at hand.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "callsite.h"

namespace {

rankcall::CallSites g_sites;
std::vector<std::string> g_found;

uint32_t emit(void*, const std::string& json, const std::string&, const char*) {
  g_found.push_back(json);
  return static_cast<uint32_t>(g_found.size());
}

// Arguments: the paths of the library, of the framework and of Python's own modules.
PyObject* configure(PyObject*, PyObject* args) {
  const char *library, *framework, *standard;
  if (!PyArg_ParseTuple(args, "sss", &library, &framework, &standard)) return nullptr;
  g_found.clear();
  g_sites.reset({library}, {framework, standard}, emit, nullptr);
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

// How many code objects are remembered.
PyObject* codes(PyObject*, PyObject*) { return PyLong_FromSize_t(g_sites.codes()); }

// How often a walk has taken the GIL so far.
PyObject* gil_taken(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(g_sites.gil_taken()); }

// Act as an autograd device thread: without a Python frame of its own, look up the caller of
// backward() `walks` times, while two C++ threads call into Python and leave it again. Returns how
// many walks found a line.
PyObject* walk_beside_new_threads(PyObject*, PyObject* walks) {
  const long count = PyLong_AsLong(walks);
  std::atomic<bool> over{false};
  long found = 0;
  Py_BEGIN_ALLOW_THREADS
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; i++)
    threads.emplace_back([&] {
      while (!over) PyGILState_Release(PyGILState_Ensure());
    });
  std::thread walker([&] {
    for (long moment = 1; moment <= count; moment++) found += g_sites.find(moment).site != 0;
  });
  walker.join();
  over = true;
  for (auto& thread : threads) thread.join();
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(found);
}

// Walk on a new thread while the interpreter finalizes, when this capsule is freed, and say so.
PyObject* walk_at_exit(PyObject*, PyObject*) {
  return PyCapsule_New(&g_sites, nullptr, [](PyObject*) {
    uint32_t site = 1;
    bool returned = false;
    std::thread([&] {
      site = g_sites.find(2'000'000'000).site;
      returned = true;
    }).join();
    std::printf("walk at exit: %s, site %u\n", returned ? "returned" : "ended its thread", site);
    std::fflush(stdout);
  });
}

// A walk on a thread without Python frames, in microseconds.
PyObject* frameless_us(PyObject*, PyObject*) {
  constexpr int kCalls = 2000;
  double took = 0;
  Py_BEGIN_ALLOW_THREADS
  std::thread walker([&] {
    const auto began = std::chrono::steady_clock::now();
    for (int moment = 1; moment <= kCalls; moment++) g_sites.find(1'000'000'000 + moment);
    took = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count() / kCalls;
  });
  walker.join();
  Py_END_ALLOW_THREADS
  return PyFloat_FromDouble(took);
}

PyMethodDef g_methods[] = {{"configure", configure, METH_VARARGS, ""},
                           {"find", find, METH_NOARGS, ""},
                           {"codes", codes, METH_NOARGS, ""},
                           {"gil_taken", gil_taken, METH_NOARGS, ""},
                           {"walk_beside_new_threads", walk_beside_new_threads, METH_O, ""},
                           {"walk_at_exit", walk_at_exit, METH_NOARGS, ""},
                           {"frameless_us", frameless_us, METH_NOARGS, ""},
                           {"nanoseconds", nanoseconds, METH_NOARGS, ""},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "callsite_probe", nullptr, -1, g_methods,
                        nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_callsite_probe() { return PyModule_Create(&g_module); }
