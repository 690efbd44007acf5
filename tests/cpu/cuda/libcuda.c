/* A stand-in for libcuda.so.1: a made-up device, whose SMs are divided by the documented rules of green contexts.

   Nothing runs on it. It knows which SMs every resource, context and stream has, so tests can ask whether two of them overlap.
   Built with `gcc -shared -fPIC -Wl,-soname,libcuda.so.1`, found through LD_LIBRARY_PATH by the real cuda-bindings.

   Environment, read at every call (the driver's version once, by the bindings):

     STAND_IN_DRIVER     1000 * major + 10 * minor of the CUDA that the driver supports: 13010. Younger calls are not there.
     STAND_IN_DEVICES    how many devices: 1. With 0, cuInit fails as it does on a machine without one.
     STAND_IN_INIT       what cuInit fails with: 0, which is that it does not.
     STAND_IN_NAME       of the devices: "NVIDIA Stand-in". The real driver names a MIG slice "... MIG 1g.18gb".
     STAND_IN_SMS        of a device, at most 256: 132
     STAND_IN_MINIMUM    SMs of a group at least: 8      Drivers from 13.0 on state both, older ones
     STAND_IN_ALIGNMENT  SMs that groups grow by: 8      only round groups accordingly.
     STAND_IN_SHORT      SMs that a group has fewer than the rules give it: 0
     STAND_IN_TOGETHER   the most SMs that the topology has together; a structured group of more is refused: 32
     STAND_IN_LOG        file that gets a line for everything that is made, in order

     CUDA_DEVICE_MAX_CONNECTIONS  work queues, as for the real driver: 8

   Sources of the rules: the comments of cuda.h 13.1 and section 6.35 of the CUDA Driver API. */

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
    NOT_FOUND = 500, INVALID_RESOURCE_TYPE = 914, INVALID_RESOURCE_CONFIGURATION = 915, STREAM_DETACHED = 917,
};
enum { TYPE_INVALID = 0, TYPE_SM = 1, TYPE_QUEUES = 1000 };
enum { SM_BYTES = 32, BACKFILL = 1, IGNORE_COSCHEDULING = 1, DEFAULT_STREAM = 1, NON_BLOCKING = 1, HIGHEST_PRIORITY = -5 };

/* CUdevResource: 144 bytes. What the driver keeps to itself lies in the padding, which callers copy along. */
typedef struct Resource {
    int type;
    unsigned char sms[SM_BYTES]; /* a bit for each SM */
    int divided_by;              /* the split call that this came from; 0: it was queried, and may be split */
    unsigned char padding[92 - SM_BYTES - 4];
    union {
        struct { unsigned count, minimum, alignment, flags; } sm;
        struct { int device; unsigned limit; int scope; } queues;
        unsigned char bytes[40];
    };
    struct Resource *next;
} Resource;
_Static_assert(sizeof(Resource) == 144, "CUdevResource has 144 bytes");

typedef struct { unsigned count, together, preferred, flags, reserved[12]; } Group; /* CU_DEV_SM_RESOURCE_GROUP_PARAMS */
typedef struct { Resource sm, queues; } Description;
typedef struct { int device; Resource sm, queues; struct Green *green; } Context; /* CUcontext; green: NULL if primary */
typedef struct Green { int alive; Context context; } Green; /* CUgreenCtx; its CUcontext is another address */
typedef struct { Context *context; Green *green; int priority; } Stream;

static int initialised, splits;
static Context *primary[16], *current[16];
static int depth;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

static int version(void) { return number("STAND_IN_DRIVER", 13010); }
static int devices(void) { return number("STAND_IN_DEVICES", 1); }
static unsigned alignment(void) { return number("STAND_IN_ALIGNMENT", 8); }
static unsigned minimum(void) { return number("STAND_IN_MINIMUM", 8); }

/* 32 on compute capability 9.0+, else 2; less where the topology has less. */
static unsigned most_together(void) {
    unsigned most = alignment() > 2 ? 32 : 2, has = number("STAND_IN_TOGETHER", 32);
    return most < has ? most : has;
}

static void note(const char *format, ...) {
    const char *path = getenv("STAND_IN_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    va_list values;
    if (!file) return;
    va_start(values, format);
    vfprintf(file, format, values);
    va_end(values);
    fputc('\n', file);
    fclose(file);
}

static const char *hex(const Resource *resource) {
    static char text[2 * SM_BYTES + 1];
    for (int i = 0; i < SM_BYTES; i++) sprintf(text + 2 * i, "%02x", resource->sms[SM_BYTES - 1 - i]);
    return text;
}

static Resource sm_resource(unsigned together, int divided_by) {
    Resource resource;
    int stated = version() >= 13000;
    memset(&resource, 0, sizeof resource);
    resource.type = TYPE_SM;
    resource.divided_by = divided_by;
    resource.sm.minimum = stated ? minimum() : 0;
    resource.sm.alignment = stated ? together : 0;
    return resource;
}

/* Moves the lowest `count` SMs of one resource to another. */
static void move(Resource *from, Resource *to, unsigned count) {
    for (unsigned sm = 0; sm < 8 * SM_BYTES && count; sm++) {
        unsigned char bit = 1u << sm % 8;
        if (!(from->sms[sm / 8] & bit)) continue;
        from->sms[sm / 8] ^= bit;
        to->sms[sm / 8] |= bit;
        from->sm.count--, to->sm.count++, count--;
    }
}

static Resource whole_device(void) {
    Resource all = sm_resource(alignment(), 0), device = sm_resource(alignment(), 0);
    memset(all.sms, 255, SM_BYTES);
    all.sm.count = 8 * SM_BYTES;
    move(&all, &device, number("STAND_IN_SMS", 132));
    return device;
}

static Resource queues_of(int device) {
    Resource queues;
    memset(&queues, 0, sizeof queues);
    queues.type = TYPE_QUEUES;
    queues.queues.device = device;
    queues.queues.limit = number("CUDA_DEVICE_MAX_CONNECTIONS", 8);
    return queues;
}

int cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (number("STAND_IN_INIT", OK)) return number("STAND_IN_INIT", OK);
    if (!devices()) return NO_DEVICE;
    initialised = 1;
    return OK;
}

int cuDriverGetVersion(int *found) { return *found = version(), OK; }

int cuDeviceGetCount(int *count) {
    if (!initialised) return NOT_INITIALIZED;
    return *count = devices(), OK;
}

int cuDeviceGet(int *device, int ordinal) {
    if (!initialised) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= devices()) return INVALID_DEVICE;
    return *device = ordinal, OK;
}

int cuDeviceGetName(char *name, int bytes, int device) {
    const char *text = getenv("STAND_IN_NAME");
    (void)device;
    snprintf(name, bytes, "%s", text ? text : "NVIDIA Stand-in");
    return OK;
}

int cuDevicePrimaryCtxRetain(Context **context, int device) {
    if (!initialised) return NOT_INITIALIZED;
    if (!primary[device]) primary[device] = calloc(1, sizeof(Context));
    *primary[device] = (Context){device, whole_device(), queues_of(device), NULL};
    note("primary");
    return *context = primary[device], OK;
}

int cuCtxPushCurrent_v2(Context *context) { return current[++depth] = context, OK; }
int cuCtxPopCurrent_v2(Context **context) { return depth ? (*context = current[depth--], OK) : INVALID_CONTEXT; }
int cuCtxGetCurrent(Context **context) { return *context = current[depth], OK; }

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    if (!current[depth]) return INVALID_CONTEXT;
    return *least = 0, *greatest = HIGHEST_PRIORITY, OK;
}

static int make_stream(Stream **stream, Context *context, int priority) {
    *stream = calloc(1, sizeof(Stream));
    **stream = (Stream){context, context->green, priority};
    note("stream %p context=%p priority=%d sms=%s", (void *)*stream, (void *)context, priority, hex(&context->sm));
    return OK;
}

int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    if (!current[depth]) return INVALID_CONTEXT;
    if (flags > NON_BLOCKING || (current[depth]->green && flags != NON_BLOCKING)) return INVALID_VALUE;
    return make_stream(stream, current[depth], priority);
}

int cuStreamQuery(Stream *stream) { return stream->green && !stream->green->alive ? STREAM_DETACHED : OK; }

int cuStreamGetGreenCtx(Stream *stream, Green **green) {
    if (stream->green && !stream->green->alive) return STREAM_DETACHED;
    return *green = stream->green, OK;
}

static int get_resource(Resource *resource, int type, Resource sm, Resource queues) {
    if (type == TYPE_SM) return *resource = sm, OK;
    if (type == TYPE_QUEUES && version() >= 13010) return *resource = queues, OK;
    return INVALID_RESOURCE_TYPE;
}

int cuDeviceGetDevResource(int device, Resource *resource, int type) {
    if (!initialised) return NOT_INITIALIZED;
    return get_resource(resource, type, whole_device(), queues_of(device));
}

int cuCtxGetDevResource(Context *context, Resource *resource, int type) {
    return get_resource(resource, type, context->sm, context->queues);
}

int cuGreenCtxGetDevResource(Green *green, Resource *resource, int type) {
    if (!green->alive) return INVALID_CONTEXT;
    return get_resource(resource, type, green->context.sm, green->context.queues);
}

/* Homogeneous groups of at least `least` SMs: rounded up to the minimum and the alignment, perhaps fewer groups than asked. */
int cuDevSmResourceSplitByCount(Resource *result, unsigned *groups, const Resource *input, Resource *remainder, unsigned flags,
                                unsigned least) {
    if (!groups || !input || flags > 3) return INVALID_VALUE;
    if (input->type != TYPE_SM) return INVALID_RESOURCE_TYPE;
    if (least > input->sm.count) return INVALID_VALUE;
    if (input->divided_by) return INVALID_RESOURCE_CONFIGURATION;
    unsigned grain = flags & IGNORE_COSCHEDULING && alignment() > 2 ? 2 : alignment();
    unsigned floor = flags & IGNORE_COSCHEDULING && minimum() > 2 ? 2 : minimum();
    unsigned size = ((least > floor ? least : floor) + grain - 1) / grain * grain;
    unsigned fits = input->sm.count / size, wanted = *groups;
    if (!fits) return INVALID_RESOURCE_CONFIGURATION;
    *groups = wanted < fits ? wanted : fits;
    if (!result) return OK;
    Resource rest = *input;
    rest.divided_by = ++splits;
    for (unsigned i = 0; i < *groups; i++) {
        result[i] = sm_resource(grain, splits);
        move(&rest, &result[i], size - number("STAND_IN_SHORT", 0));
    }
    rest.type = rest.sm.count ? TYPE_SM : TYPE_INVALID;
    if (remainder) *remainder = rest;
    note("by count least=%u size=%u groups=%u", least, size, *groups);
    return OK;
}

/* Groups of exactly the SMs asked for, in clusters of `together`, from left to right. */
int cuDevSmResourceSplit(Resource *result, unsigned groups, const Resource *input, Resource *remainder, unsigned flags,
                         Group *wanted) {
    if (!groups || !input || !wanted || flags) return INVALID_VALUE;
    if (input->type != TYPE_SM) return INVALID_RESOURCE_TYPE;
    if (input->divided_by) return INVALID_RESOURCE_CONFIGURATION;
    Resource rest = *input;
    rest.divided_by = ++splits;
    for (unsigned i = 0; i < groups; i++) {
        unsigned together = wanted[i].together ? wanted[i].together : alignment();
        int backfill = wanted[i].flags & BACKFILL;
        if (together > most_together()) return INVALID_RESOURCE_CONFIGURATION;
        if (wanted[i].count && !result) return INVALID_RESOURCE_CONFIGURATION; /* without a result this discovers, or nothing */
        if (!wanted[i].count) wanted[i].count = backfill ? rest.sm.count : rest.sm.count / together * together;
        if (wanted[i].count % 2 || (wanted[i].count % together && !backfill)) return INVALID_RESOURCE_CONFIGURATION;
        if (!result) continue;
        if (wanted[i].count < together || wanted[i].count > rest.sm.count) return INVALID_RESOURCE_CONFIGURATION;
        result[i] = sm_resource(together, splits);
        move(&rest, &result[i], wanted[i].count - number("STAND_IN_SHORT", 0));
    }
    rest.type = rest.sm.count ? TYPE_SM : TYPE_INVALID;
    if (remainder) *remainder = rest;
    note("structured sms=%u together=%u groups=%u", wanted[0].count, wanted[0].together, groups);
    return OK;
}

/* Several SM resources in one description come from one split call; of the other kinds there is one at most. */
int cuDevResourceGenerateDesc(Description **description, Resource *resources, unsigned count) {
    Description made;
    if (!description || !resources || !count) return INVALID_VALUE;
    memset(&made, 0, sizeof made);
    for (unsigned i = 0; i < count; i++) {
        if (resources[i].type == TYPE_QUEUES && version() >= 13010) {
            if (made.queues.type) return INVALID_RESOURCE_CONFIGURATION;
            made.queues = resources[i];
        } else if (resources[i].type != TYPE_SM) {
            return INVALID_RESOURCE_TYPE;
        } else if (!made.sm.type) {
            made.sm = resources[i];
        } else {
            if (made.sm.divided_by != resources[i].divided_by || made.sm.sm.alignment != resources[i].sm.alignment)
                return INVALID_RESOURCE_CONFIGURATION;
            Resource more = resources[i];
            move(&more, &made.sm, more.sm.count);
        }
    }
    *description = malloc(sizeof made);
    **description = made;
    return OK;
}

int cuGreenCtxCreate(Green **green, Description *description, int device, unsigned flags) {
    if (!initialised) return NOT_INITIALIZED;
    if (flags != DEFAULT_STREAM) return INVALID_VALUE;
    *green = calloc(1, sizeof(Green));
    Context context = {device, description->sm.type ? description->sm : whole_device(), queues_of(device), *green};
    context.sm.divided_by = 0;
    if (description->queues.type) context.queues = description->queues;
    **green = (Green){1, context};
    note("green sms=%s scope=%d limit=%u", hex(&context.sm), context.queues.queues.scope, context.queues.queues.limit);
    return OK;
}

int cuGreenCtxDestroy(Green *green) { return green->alive ? (green->alive = 0, OK) : INVALID_CONTEXT; }
int cuCtxFromGreenCtx(Context **context, Green *green) { return *context = &green->context, OK; }

int cuGreenCtxStreamCreate(Stream **stream, Green *green, unsigned flags, int priority) {
    if (!green->alive) return INVALID_CONTEXT;
    return flags != NON_BLOCKING ? INVALID_VALUE : make_stream(stream, &green->context, priority);
}

int cuGetProcAddress_v2(const char *name, void **address, int asked, uint64_t flags, int *status);

static const struct { const char *name; int since; void *address; } CALLS[] = {
    {"cuGetProcAddress", 12000, cuGetProcAddress_v2},
    {"cuInit", 2000, cuInit},
    {"cuDriverGetVersion", 2020, cuDriverGetVersion},
    {"cuDeviceGetCount", 2000, cuDeviceGetCount},
    {"cuDeviceGet", 2000, cuDeviceGet},
    {"cuDeviceGetName", 2000, cuDeviceGetName},
    {"cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain},
    {"cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2},
    {"cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2},
    {"cuCtxGetCurrent", 4000, cuCtxGetCurrent},
    {"cuCtxGetStreamPriorityRange", 5050, cuCtxGetStreamPriorityRange},
    {"cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority},
    {"cuStreamQuery", 2000, cuStreamQuery},
    {"cuStreamGetGreenCtx", 12040, cuStreamGetGreenCtx},
    {"cuDeviceGetDevResource", 12040, cuDeviceGetDevResource},
    {"cuCtxGetDevResource", 12040, cuCtxGetDevResource},
    {"cuGreenCtxGetDevResource", 12040, cuGreenCtxGetDevResource},
    {"cuDevSmResourceSplitByCount", 12040, cuDevSmResourceSplitByCount},
    {"cuDevSmResourceSplit", 13010, cuDevSmResourceSplit},
    {"cuDevResourceGenerateDesc", 12040, cuDevResourceGenerateDesc},
    {"cuGreenCtxCreate", 12040, cuGreenCtxCreate},
    {"cuGreenCtxDestroy", 12040, cuGreenCtxDestroy},
    {"cuCtxFromGreenCtx", 12040, cuCtxFromGreenCtx},
    {"cuGreenCtxStreamCreate", 12050, cuGreenCtxStreamCreate},
};

/* `asked`: of which version of the call's interface the caller knows. */
int cuGetProcAddress_v2(const char *name, void **address, int asked, uint64_t flags, int *status) {
    (void)flags;
    if (status) *status = 1;
    *address = NULL;
    for (unsigned i = 0; i < sizeof CALLS / sizeof *CALLS; i++) {
        if (strcmp(CALLS[i].name, name) || CALLS[i].since > asked || CALLS[i].since > version()) continue;
        if (status) *status = 0;
        return *address = CALLS[i].address, OK;
    }
    return NOT_FOUND;
}
