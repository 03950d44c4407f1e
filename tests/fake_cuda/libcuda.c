/* A stand-in for the CUDA driver, for tests on machines without a GPU. It is not CUDA.
 *
 * "Memory of a GPU" is memory of the host that fake_cuda_alloc has made. Each stream runs on a thread of its own, in the
 * order of its work, and a test decides when it goes on (fake_cuda_hold). Any call can be made to fail, and any kernel not to
 * load, by its name (fake_cuda_fail).
 * Names and prototypes are those of cuda.h; functions that begin with fake_ are the tests' own.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500,
    NOT_READY = 600,
};
enum { IS_MANAGED = 8, DEVICE_ORDINAL = 9, IS_IPC_CAPABLE = 10, RANGE_START = 11, RANGE_SIZE = 12 };

typedef int CUresult;
typedef struct Stream *CUstream;
typedef struct Event *CUevent;
typedef void (*Callback)(CUstream, CUresult, void *);

/* --- calls that fail, and how often each was made */

#define NUM_CALLS 64
static pthread_mutex_t calls_lock = PTHREAD_MUTEX_INITIALIZER;
static struct { const char *name; int code, times, num_made; } calls[NUM_CALLS];

static int slot_of(const char *name) {
    for (int at = 0; at < NUM_CALLS; at++) {
        if (calls[at].name == NULL) {
            calls[at].name = strdup(name);
            return at;
        }
        if (strcmp(calls[at].name, name) == 0) {
            return at;
        }
    }
    abort();
}

/* Has the next `times` calls of a function return `code`. */
void fake_cuda_fail(const char *name, int code, int times) {
    pthread_mutex_lock(&calls_lock);
    int at = slot_of(name);
    calls[at].code = code;
    calls[at].times = times;
    pthread_mutex_unlock(&calls_lock);
}

/* How often a function was called. */
int fake_cuda_num_calls(const char *name) {
    pthread_mutex_lock(&calls_lock);
    int num = calls[slot_of(name)].num_made;
    pthread_mutex_unlock(&calls_lock);
    return num;
}

static CUresult outcome(const char *name) {
    pthread_mutex_lock(&calls_lock);
    int at = slot_of(name), code = SUCCESS;
    calls[at].num_made++;
    if (calls[at].times > 0) {
        calls[at].times--;
        code = calls[at].code;
    }
    pthread_mutex_unlock(&calls_lock);
    return code;
}

#define MAY_FAIL                                                                                                       \
    do {                                                                                                               \
        CUresult code = outcome(__func__);                                                                             \
        if (code != SUCCESS) {                                                                                         \
            return code;                                                                                               \
        }                                                                                                              \
    } while (0)

/* Contexts that are current in this thread. */
static __thread int num_pushed;

#define NEEDS_CONTEXT                                                                                                  \
    do {                                                                                                               \
        if (num_pushed == 0) {                                                                                         \
            return INVALID_CONTEXT;                                                                                    \
        }                                                                                                              \
    } while (0)

/* --- memory */

#define NUM_RANGES 1024
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;
static struct { uintptr_t start; size_t len; int device; } ranges[NUM_RANGES];
static int num_ranges;

/* Memory of a GPU, never freed; 0 if there is none left. */
uintptr_t fake_cuda_alloc(size_t len, int device) {
    void *start = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_mutex_lock(&ranges_lock);
    if (start == MAP_FAILED || num_ranges == NUM_RANGES) {
        pthread_mutex_unlock(&ranges_lock);
        return 0;
    }
    ranges[num_ranges].start = (uintptr_t)start;
    ranges[num_ranges].len = len;
    ranges[num_ranges++].device = device;
    pthread_mutex_unlock(&ranges_lock);
    return (uintptr_t)start;
}

static int range_of(uintptr_t address) {
    pthread_mutex_lock(&ranges_lock);
    int found = -1;
    for (int at = 0; at < num_ranges; at++) {
        if (address >= ranges[at].start && address - ranges[at].start < ranges[at].len) {
            found = at;
        }
    }
    pthread_mutex_unlock(&ranges_lock);
    return found;
}

CUresult cuPointerGetAttribute(void *data, int attribute, uintptr_t pointer) {
    MAY_FAIL;
    int range = range_of(pointer);
    if (range < 0) {
        return INVALID_VALUE;
    }
    switch (attribute) {
    case IS_MANAGED: *(uint8_t *)data = 0; return SUCCESS;
    case DEVICE_ORDINAL: *(int *)data = ranges[range].device; return SUCCESS;
    case IS_IPC_CAPABLE: *(uint8_t *)data = 1; return SUCCESS;
    case RANGE_START: *(uint64_t *)data = ranges[range].start; return SUCCESS;
    case RANGE_SIZE: *(size_t *)data = ranges[range].len; return SUCCESS;
    default: return INVALID_VALUE;
    }
}

CUresult cuMemHostAlloc(void **memory, size_t len, unsigned flags) {
    (void)flags;
    MAY_FAIL;
    NEEDS_CONTEXT;
    *memory = calloc(1, len);
    return *memory == NULL ? OUT_OF_MEMORY : SUCCESS;
}

/* --- streams and events */

enum { COPY, FILL, EVENT, CALLBACK, HOLD, DIGEST, COPY_AND_DIGEST };

typedef struct Job {
    int kind;
    void *to;
    const void *from; /* owned by a FILL */
    size_t len;
    CUevent event;
    Callback callback;
    void *data;
    long hold;
    struct Job *next;
} Job;

struct Event {
    int num_pending; /* records that have not been reached */
    int is_destroyed;
};

struct Stream {
    Job *first, **last;
    int is_busy;
};

/* One lock for all streams and events: the tests have few. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static long num_holds, released_to;
static int status_of_work = SUCCESS;

/* Faults of the next copies: so many do nothing, and in so many that follow a bit is flipped. */
static int num_lost, num_flipped;

void fake_cuda_lose_copies(int times) { __atomic_store_n(&num_lost, times, __ATOMIC_SEQ_CST); }
void fake_cuda_flip_copies(int times) { __atomic_store_n(&num_flipped, times, __ATOMIC_SEQ_CST); }

static int takes_one(int *left) {
    int num = __atomic_load_n(left, __ATOMIC_SEQ_CST);
    while (num > 0 && !__atomic_compare_exchange_n(left, &num, num - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return num > 0;
}

static void copy(uint8_t *to, const uint8_t *from, size_t len) {
    if (takes_one(&num_lost)) {
        return;
    }
    memcpy(to, from, len);
    if (len > 0 && takes_one(&num_flipped)) {
        to[len / 2] ^= 16;
    }
}

/* The digest that the kernel computes: CRC-64/NVME from the state 0, not inverted. */
static uint64_t digest(const uint8_t *bytes, size_t len) {
    uint64_t state = 0;
    for (size_t at = 0; at < len; at++) {
        state ^= bytes[at];
        for (int bit = 0; bit < 8; bit++) {
            state = state >> 1 ^ (state & 1 ? UINT64_C(0x9a6c9329ac4bc9b5) : 0);
        }
    }
    return state;
}

typedef struct { uint64_t from, num_bytes, digest, to; } DigestedChunk;

/* The kernel writes and digests what it has read. One that is lost does not run. */
static void copy_and_digest(DigestedChunk *chunk) {
    uint8_t *to = (uint8_t *)chunk->to;
    if (takes_one(&num_lost)) {
        return;
    }
    uint8_t *read = malloc(chunk->num_bytes + 1);
    memcpy(read, (const void *)chunk->from, chunk->num_bytes);
    if (chunk->num_bytes > 0 && takes_one(&num_flipped)) {
        read[chunk->num_bytes / 2] ^= 16;
    }
    memcpy(to, read, chunk->num_bytes);
    chunk->digest = digest(read, chunk->num_bytes);
    free(read);
}

static void run(CUstream stream, Job *job) {
    switch (job->kind) {
    case DIGEST: *(uint64_t *)job->to = digest(job->from, job->len); break;
    case COPY: copy(job->to, job->from, job->len); break;
    case COPY_AND_DIGEST: copy_and_digest(job->data); break;
    case FILL: memcpy(job->to, job->from, job->len); break;
    case CALLBACK: job->callback(stream, status_of_work, job->data); break;
    default: break;
    }
}

static void *run_stream(void *argument) {
    CUstream stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (stream->first == NULL || (stream->first->kind == HOLD && stream->first->hold > released_to)) {
            pthread_cond_wait(&changed, &lock);
        }
        Job *job = stream->first;
        pthread_mutex_unlock(&lock);
        run(stream, job);
        pthread_mutex_lock(&lock);
        stream->first = job->next;
        if (stream->first == NULL) {
            stream->last = &stream->first;
        }
        if (job->kind == EVENT && --job->event->num_pending == 0 && job->event->is_destroyed) {
            free(job->event);
        }
        if (job->kind == FILL) {
            free((void *)job->from);
        }
        free(job);
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static CUstream new_stream(void) {
    CUstream stream = calloc(1, sizeof *stream);
    stream->last = &stream->first;
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_stream, stream) != 0) {
        abort();
    }
    pthread_detach(thread);
    return stream;
}

static CUstream default_stream;
static pthread_once_t default_once = PTHREAD_ONCE_INIT;
static void make_default(void) { default_stream = new_stream(); }

/* 0, 1 and 2 are the default ones, which are one here. */
static CUstream known(CUstream stream) {
    if ((uintptr_t)stream > 2) {
        return stream;
    }
    pthread_once(&default_once, make_default);
    return default_stream;
}

static void append(CUstream stream, Job job) {
    Job *kept = malloc(sizeof job);
    *kept = job;
    pthread_mutex_lock(&lock);
    *stream->last = kept;
    stream->last = &kept->next;
    if (job.kind == EVENT) {
        job.event->num_pending++;
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* A kernel that writes these bytes, which are copied now. */
void fake_cuda_write(CUstream stream, void *to, const void *bytes, size_t len) {
    void *from = malloc(len);
    memcpy(from, bytes, len);
    append(known(stream), (Job){.kind = FILL, .to = to, .from = from, .len = len});
}

/* A kernel that ends when the test releases it: a number for fake_cuda_release. */
long fake_cuda_hold(CUstream stream) {
    pthread_mutex_lock(&lock);
    long number = ++num_holds;
    pthread_mutex_unlock(&lock);
    append(known(stream), (Job){.kind = HOLD, .hold = number});
    return number;
}

static int holds_kernels;

/* Has kernels that are launched from now on begin only when the test releases them, or at once again. */
void fake_cuda_hold_kernels(int is_held) {
    pthread_mutex_lock(&lock);
    holds_kernels = is_held;
    pthread_mutex_unlock(&lock);
}

/* The number of the last kernel that is held, for fake_cuda_release. */
long fake_cuda_last_hold(void) {
    pthread_mutex_lock(&lock);
    long number = num_holds;
    pthread_mutex_unlock(&lock);
    return number;
}

/* Ends the kernels that are held up to this number. */
void fake_cuda_release(long number) {
    pthread_mutex_lock(&lock);
    released_to = number;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* What callbacks are told from now on, as after an error of the device. */
void fake_cuda_break(int code) {
    pthread_mutex_lock(&lock);
    status_of_work = code;
    pthread_mutex_unlock(&lock);
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    (void)flags;
    MAY_FAIL;
    NEEDS_CONTEXT;
    *stream = new_stream();
    return SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    MAY_FAIL;
    stream = known(stream);
    pthread_mutex_lock(&lock);
    while (stream->first != NULL) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) {
    MAY_FAIL;
    NEEDS_CONTEXT;
    stream = known(stream);
    pthread_mutex_lock(&lock);
    int is_idle = stream->first == NULL;
    pthread_mutex_unlock(&lock);
    return is_idle ? SUCCESS : NOT_READY;
}

CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    (void)stream;
    MAY_FAIL;
    *status = 0;
    return SUCCESS;
}

CUresult cuStreamAddCallback(CUstream stream, Callback callback, void *data, unsigned flags) {
    (void)flags;
    MAY_FAIL;
    append(known(stream), (Job){.kind = CALLBACK, .callback = callback, .data = data});
    return SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t len, CUstream stream) {
    MAY_FAIL;
    NEEDS_CONTEXT;
    if (range_of(to) < 0) {
        return INVALID_VALUE;
    }
    append(known(stream), (Job){.kind = COPY, .to = (void *)to, .from = from, .len = len});
    return SUCCESS;
}

CUresult cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t len, CUstream stream) {
    MAY_FAIL;
    NEEDS_CONTEXT;
    if (range_of(from) < 0) {
        return INVALID_VALUE;
    }
    append(known(stream), (Job){.kind = COPY, .to = to, .from = (const void *)from, .len = len});
    return SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    (void)flags;
    MAY_FAIL;
    NEEDS_CONTEXT;
    *event = calloc(1, sizeof **event);
    return SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    MAY_FAIL;
    NEEDS_CONTEXT;
    append(known(stream), (Job){.kind = EVENT, .event = event});
    return SUCCESS;
}

CUresult cuEventSynchronize(CUevent event) {
    MAY_FAIL;
    pthread_mutex_lock(&lock);
    while (event->num_pending > 0) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
    MAY_FAIL;
    pthread_mutex_lock(&lock);
    int is_done = event->num_pending == 0;
    pthread_mutex_unlock(&lock);
    return is_done ? SUCCESS : NOT_READY;
}

CUresult cuEventDestroy_v2(CUevent event) {
    MAY_FAIL;
    pthread_mutex_lock(&lock);
    event->is_destroyed = 1;
    if (event->num_pending == 0) {
        free(event);
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

/* --- devices and contexts */

enum { NUM_DEVICES = 2 };

/* Contexts that the calling thread has left current. */
int fake_cuda_num_current(void) { return num_pushed; }

CUresult cuInit(unsigned flags) {
    (void)flags;
    MAY_FAIL;
    return SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char **name) {
    MAY_FAIL;
    switch (code) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NOT_READY: *name = "CUDA_ERROR_NOT_READY"; break;
    default: *name = "CUDA_ERROR_UNKNOWN"; break;
    }
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    MAY_FAIL;
    *count = NUM_DEVICES;
    return SUCCESS;
}

CUresult cuDeviceGet(int *device, int ordinal) {
    MAY_FAIL;
    *device = ordinal;
    return ordinal < NUM_DEVICES ? SUCCESS : INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    MAY_FAIL;
    *context = (void *)(uintptr_t)(device + 1);
    return SUCCESS;
}

CUresult cuCtxPushCurrent_v2(void *context) {
    MAY_FAIL;
    if (context == NULL) {
        return INVALID_CONTEXT;
    }
    num_pushed++;
    return SUCCESS;
}

CUresult cuCtxPopCurrent_v2(void **context) {
    MAY_FAIL;
    if (num_pushed == 0) {
        return INVALID_CONTEXT;
    }
    num_pushed--;
    *context = NULL;
    return SUCCESS;
}

/* Network cards reach this GPU (116), the host can flush what they write (117), and nothing orders it (118). */
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    MAY_FAIL;
    *value = attribute == 116 || attribute == 117;
    return SUCCESS;
}

CUresult cuFlushGPUDirectRDMAWrites(int target, int scope) {
    (void)target;
    (void)scope;
    MAY_FAIL;
    return SUCCESS;
}

/* --- the kernels */

typedef struct { uint64_t to, from, num_bytes; } Chunk;
typedef struct { uint64_t from, num_bytes, digest; } Block;
static char copying, digesting, copying_and_digesting;

CUresult cuModuleLoadData(void **module, const void *image) {
    (void)image;
    MAY_FAIL;
    NEEDS_CONTEXT;
    *module = (void *)1;
    return SUCCESS;
}

/* Any GPU's kernels use the memory of the others. */
CUresult cuCtxEnablePeerAccess(void *peer, unsigned flags) {
    (void)peer, (void)flags;
    MAY_FAIL;
    NEEDS_CONTEXT;
    return SUCCESS;
}

CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    MAY_FAIL;
    CUresult code = outcome(name);
    if (code != SUCCESS) {
        return code;
    }
    if (strcmp(name, "kvpipe_copy_chunks") == 0) {
        *function = &copying;
    } else if (strcmp(name, "kvpipe_digest_blocks") == 0) {
        *function = &digesting;
    } else if (strcmp(name, "kvpipe_copy_and_digest") == 0) {
        *function = &copying_and_digesting;
    } else {
        return NOT_FOUND;
    }
    return SUCCESS;
}

CUresult cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters,
                        void **extra) {
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)extra;
    MAY_FAIL;
    NEEDS_CONTEXT;
    uint32_t num_items = *(uint32_t *)parameters[1];
    /* Numbered at once: the last number after kernels are held no more is that of the last one that is. */
    pthread_mutex_lock(&lock);
    long number = holds_kernels ? ++num_holds : 0;
    pthread_mutex_unlock(&lock);
    if (number > 0) {
        append(known(stream), (Job){.kind = HOLD, .hold = number});
    }
    if (function == &digesting) {
        Block *blocks = *(Block **)parameters[0];
        for (uint32_t at = 0; at < num_items; at++) {
            append(known(stream), (Job){.kind = DIGEST, .to = &blocks[at].digest, .from = (const void *)blocks[at].from,
                                        .len = blocks[at].num_bytes});
        }
        return SUCCESS;
    }
    if (function == &copying_and_digesting) {
        DigestedChunk *chunks = *(DigestedChunk **)parameters[0];
        for (uint32_t at = 0; at < num_items; at++) {
            append(known(stream), (Job){.kind = COPY_AND_DIGEST, .data = &chunks[at]});
        }
        return SUCCESS;
    }
    const Chunk *chunks = *(const Chunk **)parameters[0];
    for (uint32_t at = 0; at < num_items; at++) {
        append(known(stream), (Job){.kind = COPY, .to = (void *)chunks[at].to, .from = (const void *)chunks[at].from,
                                    .len = chunks[at].num_bytes});
    }
    return SUCCESS;
}
