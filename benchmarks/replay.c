/* Calls one function of libmx_driving with arguments from a file, for benchmarks/cache_simulation.py. Plain C, because
 * a simulator takes minutes to start Python with torch.
 *
 * replay LIBRARY FUNCTION ISA ARGUMENTS TIMES: ARGUMENTS holds for each tensor struct mxd_tensor without its data, then
 * the bytes of its data. FUNCTION takes those tensors, and then 1 (threads). */
#include <dlfcn.h>
#include <mx_driving.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 16 };

static size_t size_of(int64_t dtype) {
    return dtype == MXD_FLOAT64 || dtype == MXD_INT64 ? 8 : dtype == MXD_FLOAT16 || dtype == MXD_BFLOAT16 ? 2 : 4;
}

static mxd_tensor *read_tensor(FILE *file) {
    int64_t head[13], count = 1;
    if (fread(head, sizeof head, 1, file) != 1) return NULL;
    mxd_tensor *t = malloc(sizeof *t);
    t->dtype = head[0];
    for (int i = 0; i < 6; ++i) {
        t->shape[i] = head[1 + i];
        t->strides[i] = head[7 + i];
        count *= head[1 + i] > 0 ? head[1 + i] : 1;
    }
    t->data = aligned_alloc(64, (count * size_of(t->dtype) + 127) / 64 * 64);
    if (!t->data || fread(t->data, size_of(t->dtype), count, file) != (size_t)count) exit(2);
    return t;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    void *library = dlopen(argv[1], RTLD_NOW);
    FILE *file = fopen(argv[4], "rb");
    if (!library || !file) return fprintf(stderr, "%s\n", library ? argv[4] : dlerror()), 2;
    int (*use_isa)(const char *) = (int (*)(const char *))dlsym(library, "mxd_use_isa");
    if (use_isa(argv[3])) return fprintf(stderr, "no %s here\n", argv[3]), 2;
    mxd_tensor *t[MOST];
    int n = 0;
    while (n < MOST && (t[n] = read_tensor(file))) ++n;
    typedef mxd_tensor *P;
    typedef int Six(P, P, P, P, P, P, int);
    typedef int Nine(P, P, P, P, P, P, P, P, P, int);
    void *function = dlsym(library, argv[2]);
    if (!function || (n != 6 && n != 9)) return fprintf(stderr, "%s of %d tensors cannot be called\n", argv[2], n), 2;
    for (int i = 0; i < atoi(argv[5]); ++i) {
        const int status = n == 6 ? ((Six *)function)(t[0], t[1], t[2], t[3], t[4], t[5], 1)
                                  : ((Nine *)function)(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], 1);
        if (status) return fprintf(stderr, "status %d\n", status), 1;
    }
    return 0;
}
