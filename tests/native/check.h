// A test is a function; CHECK ends the program at the first thing that does not hold.
#pragma once

#include "acl/acl.h"

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                                                       \
    do {                                                                                                                       \
        if (!(condition)) {                                                                                                    \
            const char *sentence = aclGetRecentErrMsg();                                                                       \
            std::fprintf(stderr, "%s:%d: %s does not hold (%s)\n", __FILE__, __LINE__, #condition,                             \
                         sentence ? sentence : "no message");                                                                  \
            std::exit(1);                                                                                                      \
        }                                                                                                                      \
    } while (0)

// In test_*.cpp.
void known_answer();
void pooling();
void handles();
void any_number();
void executors();
void streams();
void many_threads();
void own_threads();
void callers_at_once();
