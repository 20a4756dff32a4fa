// Python's lock, if the program is one of Python's. Its functions are looked up: a program in C++ has none.
#pragma once

namespace simulated {

// While it lives, other threads of Python may run, if the calling thread has the GIL.
//
// No real device needs Python. Here, a stream's thread lets go of the arguments of an op that it has run, and
// some of them belong to Python. So whoever waits for a stream must not have the GIL, and torch has it in a few
// functions that wait, such as a storage's copy_.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;  // the thread's, if it had the GIL
};

}  // namespace simulated
