/* Stands for libcuda.so.1: says what it is asked for, on stderr, and does nothing.

   A module's image is text: the sizes of its kernel's parameters in bytes, like "8 8 4". */

#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };
enum { FUNCTION = 0x2222, FAULTY_STREAM = 0xbad };

static int sizes[64], num_sizes;

static int load(void **module, const char *image) {
    num_sizes = 0;
    for (char *rest; *image; image = rest) {
        int size = strtol(image, &rest, 10);
        if (rest == image) break;
        sizes[num_sizes++] = size;
    }
    *module = (void *)0x1111;
    return SUCCESS;
}

static int get_function(void **function, void *module, const char *name) {
    fprintf(stderr, "function %s of %p\n", name, module);
    *function = (void *)FUNCTION;
    return SUCCESS;
}

static int get_attribute(int *value, int attribute, void *function) {
    *value = function == (void *)FUNCTION ? 100 + attribute : -1;
    return SUCCESS;
}

static int launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                  unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
    if (stream == (void *)FAULTY_STREAM) return ILLEGAL_ADDRESS;
    fprintf(stderr, "launch %p grid %u %u %u block %u %u %u shared %u stream %p extra %p\n",
            function, gx, gy, gz, bx, by, bz, shared, stream, (void *)extra);
    for (int i = 0; i < num_sizes; i++) {
        for (int k = 0; k < sizes[i]; k++) fprintf(stderr, "%02x", ((uint8_t *)parameters[i])[k]);
        fprintf(stderr, "\n");
    }
    return SUCCESS;
}

/* As cuda.h has them. */
typedef struct { int id; char pad[4]; union { char bytes[64]; int allowed; } value; } attribute;
typedef struct {
    unsigned gx, gy, gz, bx, by, bz, shared;
    void *stream;
    attribute *attributes;
    unsigned num_attributes;
} config;

static int launch_ex(const config *c, void *function, void **parameters, void **extra) {
    for (unsigned i = 0; i < c->num_attributes; i++)
        fprintf(stderr, "attribute %d: %d\n", c->attributes[i].id, c->attributes[i].value.allowed);
    return launch(function, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream,
                  parameters, extra);
}

static int init(unsigned flags) { return flags; }

static int version(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuGetProcAddress_v2(const char *name, void **function, int cuda_version, uint64_t flags,
                        int *status) {
    static const struct { const char *name; void *function; } known[] = {
        {"cuInit", init},
        {"cuDriverGetVersion", version},
        {"cuGetProcAddress", cuGetProcAddress_v2},
        {"cuModuleLoadData", load},
        {"cuModuleGetFunction", get_function},
        {"cuFuncGetAttribute", get_attribute},
        {"cuLaunchKernel", launch},
        {"cuLaunchKernelEx", launch_ex},
    };
    (void)cuda_version, (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) *function = known[i].function;
    if (status) *status = !*function;
    return *function ? SUCCESS : NOT_FOUND;
}
