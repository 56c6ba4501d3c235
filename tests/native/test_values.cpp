// What comes out: the vendor's known answer, and any layout and dtype against the equations.
#include "mx_driving.h"
#include "problem.h"

#include <string>

void known_answer() {
    Problem p({1, 32, 1, 8, 1, {{1, 1}}}, 0, false);
    for (View *view : {&p.value, &p.weight, &p.grad_output})
        for (int64_t i = 0; i < view->count(); ++i) view->set(i, 1);
    for (int64_t i = 0; i < p.location.count(); ++i) p.location.set(i, 0);
    p.run(nullptr);
    for (int64_t i = 0; i < 8; ++i) CHECK(p.grad_value.get(i) == 8);
    for (int64_t i = 0; i < 64; ++i) CHECK(p.grad_location.get(i) == 4);
    for (int64_t i = 0; i < 32; ++i) CHECK(p.grad_weight.get(i) == 2);
    for (int64_t i = 0; i < 256; ++i) CHECK(p.output.get(i) == 0.25);
}

constexpr double BFLOAT16 = 1.0 / 256; // half an ulp, at most

static void layouts_with_this_isa() {
    const Sizes shapes[] = {
        {2, 9, 3, 8, 3, {{5, 4}, {2, 3}}}, {1, 7, 2, 40, 1, {{20, 20}}}, {1, 3, 16, 16, 2, {{1, 1}, {1, 7}, {6, 1}, {3, 3}}}};
    for (unsigned seed = 0; seed < 8; ++seed)
        for (const Sizes &n : shapes) {
            for (const bool flat : {false, true}) {
                Problem strided(n, seed, true, {ACL_FLOAT}, flat);
                strided.run(nullptr);
                strided.verify(0);
            }
            Problem mixed(n, seed, seed % 2, {ACL_BF16, ACL_FLOAT, ACL_FLOAT, ACL_BF16, ACL_FLOAT, ACL_BF16});
            mixed.run(nullptr);
            mixed.verify(BFLOAT16);
        }
}

void layouts() {
    const std::string best = mxd_isa();
    for (const char *isa : {"baseline", "avx2", "avx512"})
        if (mxd_use_isa(isa) == 0) layouts_with_this_isa();
    CHECK(mxd_use_isa(best.c_str()) == 0);
}

void levels() {
    struct Case {
        double height, width, start;
        const char *sentence;
    };
    const Case cases[] = {{2, 3, 1, "levelStartIndex[1] must leave room for 2 x 3 rows among 26; got 21 (needs 27 rows)"},
                          {0, 3, 0, "spatialShape[1] must be positive (H, W); got (0, 3)"},
                          {2, -1, 0, "spatialShape[1] must be positive (H, W); got (2, -1)"},
                          {2, 3, -21, "levelStartIndex[1] must not be negative; got -1"},
                          {9e18, 9e18, -20, "levelStartIndex[1] must leave room for"},
                          {2, 3, -9e18, "levelStartIndex[1] must not be negative; got -"}};
    for (const Case &c : cases) {
        Problem p({1, 2, 1, 8, 1, {{5, 4}, {2, 3}}}, 4, true); // seed 4: 64-bit index tensors
        p.shapes.set(2, c.height);
        p.shapes.set(3, c.width);
        p.starts.set(1, 20 + c.start);
        p.expect_refusal_by_kernel(c.sentence);
    }
}
