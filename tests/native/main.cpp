#include "check.h"
#include "mx_driving.h"

#include <cstring>

namespace {

const struct {
    const char *name;
    void (*run)();
} TESTS[] = {{"known_answer", known_answer}, {"instruction_sets", instruction_sets},
             {"pooling", pooling},           {"handles", handles},
             {"any_number", any_number},     {"executors", executors},
             {"streams", streams},           {"many_threads", many_threads},
             {"own_threads", own_threads},   {"callers_at_once", callers_at_once}};

} // namespace

// With a name: that test alone.
int main(int count, char **arguments) {
    std::printf("instruction set: %s\n", mxd_isa());
    CHECK(aclFinalize() == ACL_ERROR_UNINITIALIZE);
    CHECK(aclInit(nullptr) == ACL_SUCCESS && aclInit(nullptr) == ACL_ERROR_REPEAT_INITIALIZE);
    for (const auto &test : TESTS) {
        if (count > 1 && std::strcmp(arguments[1], test.name) != 0) continue;
        test.run();
        std::printf("%s: passed\n", test.name);
    }
    CHECK(aclrtResetDevice(0) == ACL_SUCCESS && aclFinalize() == ACL_SUCCESS);
    CHECK(aclFinalize() == ACL_ERROR_REPEAT_FINALIZE);
}
