/* Calls one function of libmx_driving with arguments from a file, for benchmarks/cache_simulation.py. Plain C, because
 * a simulator takes minutes to start Python with torch.
 *
 * replay LIBRARY FUNCTION ISA ARGUMENTS TIMES: ARGUMENTS holds for each argument its kind and a number. After a
 * tensor's number, the size of its data, come struct mxd_tensor and the data. */
#include <dlfcn.h>
#include <mx_driving.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 14 };               /* arguments of a function */
enum { NUMBER, NOTHING, TENSOR }; /* what an argument is */
typedef intptr_t A;               /* any of them, as Linux passes it on x86-64 and on 64-bit ARM */

static void read_all(void *to, size_t bytes, FILE *file) {
    if (fread(to, 1, bytes, file) != bytes) exit(fprintf(stderr, "the arguments end too soon\n"));
}

static A read_argument(const int64_t head[2], FILE *file) {
    if (head[0] != TENSOR) return head[0] == NUMBER ? (A)head[1] : 0;
    mxd_tensor *t = malloc(sizeof *t);
    void *data = aligned_alloc(64, (head[1] + 127) / 64 * 64);
    if (!t || !data) exit(fprintf(stderr, "no memory\n"));
    read_all(t, sizeof *t, file);
    read_all(data, head[1], file);
    t->data = data;
    return (A)t;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    void *library = dlopen(argv[1], RTLD_NOW);
    FILE *file = fopen(argv[4], "rb");
    if (!library || !file) return fprintf(stderr, "%s\n", library ? argv[4] : dlerror()), 2;
    int (*use_isa)(const char *) = (int (*)(const char *))dlsym(library, "mxd_use_isa");
    if (use_isa(argv[3])) return fprintf(stderr, "no %s here\n", argv[3]), 2;
    A a[MOST] = {0};
    int64_t head[2];
    for (int n = 0; fread(head, sizeof head, 1, file) == 1; ++n) {
        if (n == MOST) return fprintf(stderr, "more than %d arguments\n", MOST), 2;
        a[n] = read_argument(head, file);
    }
    typedef int Function(A, A, A, A, A, A, A, A, A, A, A, A, A, A); /* those that are not there do no harm */
    Function *function = (Function *)dlsym(library, argv[2]);
    if (!function) return fprintf(stderr, "no %s\n", argv[2]), 2;
    for (int i = 0; i < atoi(argv[5]); ++i) {
        const int status = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13]);
        if (status) return fprintf(stderr, "status %d\n", status), 1;
    }
    return 0;
}
