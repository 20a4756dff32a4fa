// A check of the native tests, which ends the program and says which line has failed.

#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "line %d: not %s\n", __LINE__, #condition);     \
      std::abort();                                                        \
    }                                                                      \
  } while (0)
