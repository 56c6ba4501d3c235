/* Trains a deformable attention by gradient descent, in plain C: its locations, weights and values, until its output is
 * close to a target. Prints the loss of every tenth step.
 *
 *     cc train.c $(python -m mx_driving.config --cflags --libs) -o train && ./train
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "acl/acl.h"
#include "aclnnop/aclnn_multi_scale_deformable_attention_grad.h"
#include "aclnnop/aclnn_multi_scale_deformable_attn_function.h"

enum { KEYS = 8 * 8 + 4 * 4, QUERIES = 12, HEADS = 2, CHANNELS = 8, LEVELS = 2, POINTS = 4, STEPS = 100 };

#define MUST(call)                                                                                                             \
    do {                                                                                                                       \
        const int status = (call);                                                                                             \
        if (status != ACL_SUCCESS) {                                                                                           \
            const char *sentence = aclGetRecentErrMsg();                                                                       \
            fprintf(stderr, "%s: %d (%s)\n", #call, status, sentence ? sentence : "no message");                               \
            exit(1);                                                                                                           \
        }                                                                                                                      \
    } while (0)

/* A contiguous tensor and its memory. */
typedef struct {
    aclTensor *tensor;
    void *data;
    int64_t count;
} Array;

static Array make(const int64_t *shape, uint64_t axes, aclDataType dtype, size_t element) {
    Array array = {NULL, NULL, 1};
    for (uint64_t a = 0; a < axes; ++a) array.count *= shape[a];
    MUST(aclrtMalloc(&array.data, (size_t)array.count * element, ACL_MEM_MALLOC_HUGE_FIRST));
    array.tensor = aclCreateTensor(shape, axes, dtype, NULL, 0, ACL_FORMAT_ND, shape, axes, array.data);
    MUST(array.tensor ? ACL_SUCCESS : 1);
    return array;
}

static Array floats(const int64_t *shape, uint64_t axes) { return make(shape, axes, ACL_FLOAT, sizeof(float)); }

static void release(Array array) {
    MUST(aclDestroyTensor(array.tensor));
    MUST(aclrtFree(array.data));
}

/* Device memory is host memory here, so the program fills it in place. On an NPU it must call aclrtMemcpy. */
static void fill_random(Array array, float low, float high) {
    float *numbers = array.data;
    for (int64_t i = 0; i < array.count; ++i) numbers[i] = low + (high - low) * (float)rand() / (float)RAND_MAX;
}

static void descend(Array parameter, Array gradient, float rate) {
    float *numbers = parameter.data;
    const float *slopes = gradient.data;
    for (int64_t i = 0; i < parameter.count; ++i) numbers[i] -= rate * slopes[i];
}

/* The mean squared error of output, and its gradient. */
static double squared_error(Array output, Array target, Array gradient) {
    const float *got = output.data, *want = target.data;
    float *slope = gradient.data;
    double sum = 0;
    for (int64_t i = 0; i < output.count; ++i) {
        const float error = got[i] - want[i];
        sum += (double)error * (double)error;
        slope[i] = 2 * error / (float)output.count;
    }
    return sum / (double)output.count;
}

/* All tensors of a step. */
typedef struct {
    Array value, shapes, starts, location, weight, output, target;
    Array grad_value, grad_location, grad_weight, grad_output;
    aclrtStream stream;
} Model;

static Model make_model(void) {
    const int64_t value[] = {1, KEYS, HEADS, CHANNELS}, shapes[] = {LEVELS, 2}, starts[] = {LEVELS};
    const int64_t location[] = {1, QUERIES, HEADS, LEVELS, POINTS, 2}, weight[] = {1, QUERIES, HEADS, LEVELS, POINTS};
    const int64_t output[] = {1, QUERIES, HEADS * CHANNELS};
    const int64_t maps[LEVELS][2] = {{8, 8}, {4, 4}}, rows[LEVELS] = {0, 64};
    Model m;
    m.value = floats(value, 4);
    m.grad_value = floats(value, 4);
    m.location = floats(location, 6);
    m.grad_location = floats(location, 6);
    m.weight = floats(weight, 5);
    m.grad_weight = floats(weight, 5);
    m.output = floats(output, 3);
    m.target = floats(output, 3);
    m.grad_output = floats(output, 3);
    m.shapes = make(shapes, 2, ACL_INT64, sizeof(int64_t));
    m.starts = make(starts, 1, ACL_INT64, sizeof(int64_t));
    MUST(aclrtMemcpy(m.shapes.data, sizeof(maps), maps, sizeof(maps), ACL_MEMCPY_HOST_TO_DEVICE));
    MUST(aclrtMemcpy(m.starts.data, sizeof(rows), rows, sizeof(rows), ACL_MEMCPY_HOST_TO_DEVICE));
    fill_random(m.value, -1, 1);
    fill_random(m.location, 0, 1);
    fill_random(m.weight, 0, 0.25f);
    fill_random(m.target, -1, 1);
    MUST(aclrtCreateStream(&m.stream));
    return m;
}

static void release_model(const Model *m) {
    const Array all[] = {m->value,  m->shapes,     m->starts,        m->location,    m->weight,     m->output,
                         m->target, m->grad_value, m->grad_location, m->grad_weight, m->grad_output};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); ++i) release(all[i]);
    MUST(aclrtDestroyStream(m->stream));
}

typedef aclnnStatus PhaseTwo(void *, uint64_t, aclOpExecutor *, aclrtStream);

static void run(PhaseTwo *phase_two, uint64_t size, aclOpExecutor *executor, aclrtStream stream) {
    void *workspace = NULL;
    if (size > 0) MUST(aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST));
    MUST(phase_two(workspace, size, executor, stream));
    MUST(aclrtSynchronizeStream(stream));
    if (workspace) MUST(aclrtFree(workspace));
}

static void forward(const Model *m) {
    uint64_t size = 0;
    aclOpExecutor *executor = NULL;
    MUST(aclnnMultiScaleDeformableAttnFunctionGetWorkspaceSize(m->value.tensor, m->shapes.tensor, m->starts.tensor,
                                                               m->location.tensor, m->weight.tensor, m->output.tensor, &size,
                                                               &executor));
    run(aclnnMultiScaleDeformableAttnFunction, size, executor, m->stream);
}

static void backward(const Model *m) {
    uint64_t size = 0;
    aclOpExecutor *executor = NULL;
    MUST(aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
        m->value.tensor, m->shapes.tensor, m->starts.tensor, m->location.tensor, m->weight.tensor, m->grad_output.tensor,
        m->grad_value.tensor, m->grad_location.tensor, m->grad_weight.tensor, &size, &executor));
    run(aclnnMultiScaleDeformableAttentionGrad, size, executor, m->stream);
}

int main(void) {
    MUST(aclInit(NULL));
    MUST(aclrtSetDevice(0));
    srand(1);
    const Model m = make_model();
    for (int step = 0; step <= STEPS; ++step) {
        forward(&m);
        const double loss = squared_error(m.output, m.target, m.grad_output);
        if (step % 10 == 0) printf("step %3d  loss %.6f\n", step, loss);
        backward(&m);
        descend(m.value, m.grad_value, 4);
        descend(m.location, m.grad_location, 0.01f);
        descend(m.weight, m.grad_weight, 1);
    }
    release_model(&m);
    MUST(aclrtResetDevice(0));
    MUST(aclFinalize());
    return 0;
}
