// A null GPU: the CUDA runtime, cuBLAS, cuDNN, NCCL and NVML for machines without a GPU (LD_PRELOAD, see ../README.md)
//
// Device memory is a memfd, mapped twice: the device pointers that callers get lie in a mapping without access (host
// code that touches device memory crashes, as it would with a GPU), copies go through the second mapping. Kernels do
// nothing. Streams are always idle. NCCL is real: ranks of one machine read each other's memfd.
#define _GNU_SOURCE
#include <signal.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define GIB (1ull << 30)
#define MIB (1ull << 20)
#define MAX_DEVICES 16
#define MAX_BLOCKS 65536
#define CUDA_VERSION 13000
enum { OK = 0, INVALID = 1, OOM = 2, OLD_DRIVER = 35, NO_DEVICE = 100, BAD_DEVICE = 101, NOT_FOUND = 500, LOST = 719, NOT_READY = 600, UNSUPPORTED = 801,
       CAPTURE_UNSUPPORTED = 900 };

typedef struct { unsigned x, y, z; } dim3;
typedef struct { int device, flags, priority; int capturing; unsigned long long id; } Stream;
typedef struct { int device, flags, recorded; double when; } Event;

// --- settings ------------------------------------------------------------------------------------------------------

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

static int physical_count(void) { int n = atoi(setting("NULLGPU_DEVICES", "1")); return n > MAX_DEVICES ? MAX_DEVICES : n; }
static int capability(void) { return (int)(atof(setting("NULLGPU_CAPABILITY", "8.0")) * 10 + 0.5); }
static const char *model_name(void) { return setting("NULLGPU_NAME", capability() == 80 ? "NVIDIA A100-SXM4-80GB" : "simulated GPU"); }
static const char *driver(void) { return setting("NULLGPU_DRIVER", "580.00.00"); }
static uint64_t total_memory(void) { return (uint64_t)(atof(setting("NULLGPU_MEMORY_GIB", "16")) * GIB); }
static uint64_t context_memory(void) { return (uint64_t)(atof(setting("NULLGPU_CONTEXT_MIB", "400")) * MIB); }
static int multiprocessors(void) { return capability() >= 90 ? 132 : 108; }

static int visible[MAX_DEVICES], visible_count = -1;

static void uuid_of(int physical, unsigned char out[16]) {
    memset(out, 0, 16);
    memcpy(out, "nullgpu", 7);
    out[15] = (unsigned char)physical;
}

static void uuid_text(int physical, char *out, size_t size) {
    unsigned char u[16];
    uuid_of(physical, u);
    snprintf(out, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3],
             u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int device_count(void) {  // as the driver: CUDA_VISIBLE_DEVICES is read once, at the first call
    pthread_mutex_lock(&lock);
    if (visible_count < 0) {
        const char *text = getenv("CUDA_VISIBLE_DEVICES");
        int n = 0, all = physical_count();
        if (!text) for (n = 0; n < all; n++) visible[n] = n;
        else {
            char copy[1024], *rest = copy, *word;
            snprintf(copy, sizeof copy, "%s", text);
            while ((word = strsep(&rest, ",")) && n < MAX_DEVICES) {
                int found = -1;
                if (!strncmp(word, "GPU-", 4)) {
                    for (int d = 0; d < all; d++) {
                        char name[64];
                        uuid_text(d, name, sizeof name);
                        if (!strncmp(name, word, strlen(word))) found = d;
                    }
                } else if (*word >= '0' && *word <= '9') found = atoi(word);
                if (found < 0 || found >= all) break;  // the driver stops at the first word that names nothing
                visible[n++] = found;
            }
        }
        visible_count = n;
    }
    pthread_mutex_unlock(&lock);
    return visible_count;
}

// --- what was called -----------------------------------------------------------------------------------------------

enum { LAUNCHES, H2D, D2H, D2D, STREAM_SYNCS, DEVICE_SYNCS, EVENT_SYNCS, PAGEABLE_H2D, PAGEABLE_D2H, MALLOCS, FREES, GEMMS,
       CONVOLUTIONS, COLLECTIVES, BYTES_H2D, BYTES_D2H, COUNTERS };
static const char *counter_names[COUNTERS] = {"launches", "h2d", "d2h", "d2d", "stream_syncs", "device_syncs", "event_syncs",
    "pageable_h2d", "pageable_d2h", "mallocs", "frees", "gemms", "convolutions", "collectives", "bytes_h2d", "bytes_d2h"};
static atomic_ullong counters[COUNTERS];
#define COUNT(which, by) atomic_fetch_add(&counters[which], by)

API unsigned long long nullgpu_counter(const char *name) {
    for (int i = 0; i < COUNTERS; i++) if (!strcmp(name, counter_names[i])) return counters[i];
    return ~0ull;
}

API void nullgpu_reset(void) { for (int i = 0; i < COUNTERS; i++) counters[i] = 0; }

static void tell(const char *form, va_list values) {
    char text[512];
    int n = snprintf(text, sizeof text, "nullgpu: ");
    n += vsnprintf(text + n, sizeof text - n - 1, form, values);
    if (n > (int)sizeof text - 2) n = sizeof text - 2;
    text[n] = '\n';
    if (write(2, text, n + 1) < 0) return;
}

static void complain(const char *form, ...) {  // an error: always on stderr
    va_list values;
    va_start(values, form);
    tell(form, values);
    va_end(values);
}

static void say(const char *form, ...) {  // with NULLGPU_LOG
    if (!getenv("NULLGPU_LOG")) return;
    va_list values;
    va_start(values, form);
    tell(form, values);
    va_end(values);
}

API void nullgpu_missing(const char *name, char *told) {  // a stub was called; each says so once
    if (!*told) complain("there is no code for %s", name);
    *told = 1;
}

API void nullgpu_kernel(void) { COUNT(LAUNCHES, 1); }  // a library's computation, which does nothing, as kernels do

// --- memory --------------------------------------------------------------------------------------------------------

typedef struct { uint64_t offset, size; } Block;
typedef struct {
    int fd, blocks;
    char *guard, *alias;  // what callers see, and where the bytes can be reached
    uint64_t space, used;
    Block *block;  // sorted by offset
} Arena;
static Arena arenas[MAX_DEVICES];
typedef struct { char *start; uint64_t size; int registered; } Pinned;
static Pinned *pinned;
static int pinned_count, pinned_room;
static __thread int current_device, last_error;

static int harmed(const char *fault, int which) {  // NULLGPU_LOST=1:FILE: device 1 is lost as soon as there is such a file
    const char *text = getenv(fault);
    return text && *text && atoi(text) == which && strchr(text, ':') && !access(strchr(text, ':') + 1, F_OK);
}
static int is_lost(void) { return visible_count > current_device && harmed("NULLGPU_LOST", visible[current_device]); }
#define FAIL(e) return (last_error = is_lost() ? LOST : (e))

static Arena *arena(int device) {  // under the lock
    Arena *a = &arenas[device];
    if (a->guard) return a;
    a->space = 16 * total_memory() > 256 * GIB ? 16 * total_memory() : 256 * GIB;
    a->fd = memfd_create("nullgpu", MFD_CLOEXEC);
    if (a->fd < 0 || ftruncate(a->fd, (off_t)a->space)) { perror("nullgpu: memfd"); abort(); }
    a->alias = mmap(NULL, a->space, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, a->fd, 0);
    a->guard = mmap(NULL, a->space, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    a->block = malloc(MAX_BLOCKS * sizeof(Block));
    if (a->alias == MAP_FAILED || a->guard == MAP_FAILED || !a->block) { perror("nullgpu: mmap"); abort(); }
    return a;
}

static int device_of(const void *p) {
    for (int d = 0; d < MAX_DEVICES; d++) {
        char *guard = arenas[d].guard;
        if (guard && (const char *)p >= guard && (const char *)p < guard + arenas[d].space) return d;
    }
    return -1;
}

API void *nullgpu_host(const void *p) {  // where the bytes behind a device pointer can be reached; host pointers as they are
    int d = device_of(p);
    return d < 0 ? (void *)p : arenas[d].alias + ((const char *)p - arenas[d].guard);
}

API int nullgpu_arena(int device, uint64_t *first, uint64_t *host, uint64_t *size) {
    pthread_mutex_lock(&lock);
    Arena *a = arena(device);
    pthread_mutex_unlock(&lock);
    *first = (uint64_t)a->guard; *host = (uint64_t)a->alias; *size = a->space;
    return OK;
}

static int is_pinned(const void *p) {
    pthread_mutex_lock(&lock);
    int found = 0;
    for (int i = 0; i < pinned_count && !found; i++)
        found = (const char *)p >= pinned[i].start && (const char *)p < pinned[i].start + pinned[i].size;
    pthread_mutex_unlock(&lock);
    return found;
}

static void add_pinned(void *p, size_t size, int registered) {
    pthread_mutex_lock(&lock);
    if (pinned_count == pinned_room) pinned = realloc(pinned, (pinned_room = pinned_room * 2 + 64) * sizeof *pinned);
    pinned[pinned_count++] = (Pinned){p, size, registered};
    pthread_mutex_unlock(&lock);
}

static uint64_t drop_pinned(void *p) {
    uint64_t size = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < pinned_count; i++) if (pinned[i].start == p) { size = pinned[i].size; pinned[i] = pinned[--pinned_count]; break; }
    pthread_mutex_unlock(&lock);
    return size;
}

static int place(int device, void **out, uint64_t size, int counts) {  // counts: as memory in use; otherwise addresses alone
    *out = NULL;
    if (!size) return OK;
    size = (size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);  // the driver's granularity
    pthread_mutex_lock(&lock);
    Arena *a = arena(device);
    int at = 0;
    uint64_t end = 0;
    for (; at < a->blocks && a->block[at].offset - end < size; at++) end = a->block[at].offset + a->block[at].size;
    if ((counts && a->used + size + context_memory() > total_memory()) || end + size > a->space || a->blocks == MAX_BLOCKS) {
        pthread_mutex_unlock(&lock);
        say("out of memory on device %d: %llu more, %llu used", device, (unsigned long long)size, (unsigned long long)a->used);
        return OOM;
    }
    memmove(a->block + at + 1, a->block + at, (a->blocks - at) * sizeof(Block));
    a->block[at] = (Block){end, size};
    a->blocks++;
    if (counts) a->used += size;
    *out = a->guard + end;
    pthread_mutex_unlock(&lock);
    if (counts) COUNT(MALLOCS, 1);
    return OK;
}
static int allocate(int device, void **out, uint64_t size) { return place(device, out, size, 1); }

static int displace(void *p, int counts) {
    if (!p) return OK;
    int d = device_of(p), found = 0;
    if (d < 0) return INVALID;
    pthread_mutex_lock(&lock);
    Arena *a = &arenas[d];
    for (int i = 0; i < a->blocks && !found; i++)
        if (a->guard + a->block[i].offset == p) {
            found = 1;
            fallocate(a->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)a->block[i].offset, (off_t)a->block[i].size);
            if (counts) a->used -= a->block[i].size;
            memmove(a->block + i, a->block + i + 1, (--a->blocks - i) * sizeof(Block));
        }
    pthread_mutex_unlock(&lock);
    if (counts) COUNT(FREES, 1);
    return found ? OK : INVALID;
}
static int release(void *p) { return displace(p, 1); }

static int forgets(size_t size) {  // NULLGPU_FORGETS: large contents are not kept; who asks for memory alone needs none
    static int asked = -1;
    if (asked < 0) asked = atoi(setting("NULLGPU_FORGETS", "0")) != 0;
    return asked && size > MIB;
}

static int copy(void *to, const void *from, size_t size, int kind) {  // kind: 0 h2h, 1 h2d, 2 d2h, 3 d2d, 4 by the addresses
    int target = device_of(to), source = device_of(from);
    if (kind == 1 && (target < 0 || source >= 0)) return INVALID;
    if (kind == 2 && (target >= 0 || source < 0)) return INVALID;
    if (kind == 3 && (target < 0 || source < 0)) return INVALID;
    if (target >= 0 && source < 0) { COUNT(H2D, 1); COUNT(BYTES_H2D, size); if (!is_pinned(from)) COUNT(PAGEABLE_H2D, 1); }
    if (target < 0 && source >= 0) { COUNT(D2H, 1); COUNT(BYTES_D2H, size); if (!is_pinned(to)) COUNT(PAGEABLE_D2H, 1); }
    if (target >= 0 && source >= 0) COUNT(D2D, 1);
    if (!forgets(size)) memmove(nullgpu_host(to), nullgpu_host(from), size);
    return OK;
}

static int fill(void *p, int value, size_t size) {
    int d = device_of(p);
    if (d < 0) return INVALID;
    Arena *a = &arenas[d];
    uint64_t offset = (uint64_t)((char *)p - a->guard), first = (offset + 4095) / 4096 * 4096, last = (offset + size) / 4096 * 4096;
    if (!value && last > first + MIB) {  // zeros of whole pages need no memory
        memset(a->alias + offset, 0, first - offset);
        fallocate(a->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)first, (off_t)(last - first));
        memset(a->alias + last, 0, offset + size - last);
    } else if (!forgets(size)) memset(nullgpu_host(p), value, size);
    return OK;
}

API int cudaMalloc(void **out, size_t size) { FAIL(device_count() ? allocate(current_device, out, size) : NO_DEVICE); }
API int cudaMallocAsync(void **out, size_t size, void *s) { (void)s; return cudaMalloc(out, size); }
API int cudaMallocManaged(void **out, size_t size, unsigned f) { (void)out; (void)size; (void)f; FAIL(UNSUPPORTED); }
API int cudaFree(void *p) { FAIL(release(p)); }
API int cudaFreeAsync(void *p, void *s) { (void)s; return cudaFree(p); }
API int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = total_memory();
    uint64_t used = arenas[current_device].used + context_memory();
    *free_bytes = used > *total ? 0 : *total - used;
    return OK;
}
API int cudaHostAlloc(void **out, size_t size, unsigned flags) {
    (void)flags;
    *out = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED) FAIL(OOM);
    add_pinned(*out, size ? size : 1, 0);
    return OK;
}
API int cudaMallocHost(void **out, size_t size) { return cudaHostAlloc(out, size, 0); }
API int cudaFreeHost(void *p) { uint64_t size = drop_pinned(p); if (size) munmap(p, size); FAIL(size || !p ? OK : INVALID); }
API int cudaHostRegister(void *p, size_t size, unsigned f) { (void)f; if (is_pinned(p)) FAIL(712); add_pinned(p, size, 1); return OK; }
API int cudaHostUnregister(void *p) { FAIL(drop_pinned(p) ? OK : 713); }
API int cudaHostGetDevicePointer(void **out, void *p, unsigned f) { (void)f; *out = p; return OK; }

API int cudaMemcpy(void *to, const void *from, size_t n, int kind) { FAIL(copy(to, from, n, kind)); }
API int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *s) { (void)s; FAIL(copy(to, from, n, kind)); }
API int cudaMemcpyPeerAsync(void *to, int td, const void *from, int fd, size_t n, void *s) { (void)td; (void)fd; (void)s; FAIL(copy(to, from, n, 3)); }
API int cudaMemcpy2DAsync(void *to, size_t tp, const void *from, size_t fp, size_t w, size_t h, int kind, void *s) {
    (void)s;
    for (size_t i = 0; i < h; i++) { int e = copy((char *)to + i * tp, (const char *)from + i * fp, w, kind); if (e) FAIL(e); }
    return OK;
}
API int cudaMemset(void *p, int v, size_t n) { FAIL(fill(p, v, n)); }
API int cudaMemsetAsync(void *p, int v, size_t n, void *s) { (void)s; FAIL(fill(p, v, n)); }
API int cudaMemcpyToSymbol(const void *sym, const void *from, size_t n, size_t off, int kind) { (void)sym; (void)from; (void)n; (void)off; (void)kind; return OK; }
API int cudaGetSymbolAddress(void **out, const void *sym) { (void)sym; return cudaMalloc(out, 2 * MIB); }
API int cudaPointerGetAttributes(struct { int type, device; void *dev, *host; long reserved[8]; } *out, const void *p) {
    int d = device_of(p);
    memset(out, 0, sizeof *out);
    if (d >= 0) { out->type = 2; out->device = d; out->dev = (void *)p; }
    else if (is_pinned(p)) { out->type = 1; out->device = current_device; out->host = out->dev = (void *)p; }
    else { out->type = 0; out->device = -2; out->host = (void *)p; }
    return OK;
}

// --- devices -------------------------------------------------------------------------------------------------------

API int cudaGetDeviceCount(int *n) { *n = device_count(); if (atoi(driver()) < 580) FAIL(OLD_DRIVER); FAIL(*n ? OK : NO_DEVICE); }
API int cudaGetDevice(int *d) { if (!device_count()) FAIL(NO_DEVICE); *d = current_device; return OK; }
API int cudaSetDevice(int d) {
    if (!device_count()) FAIL(NO_DEVICE);
    if (d < 0 || d >= device_count()) FAIL(BAD_DEVICE);
    current_device = d;
    return OK;
}
API int cudaDeviceSynchronize(void) { COUNT(DEVICE_SYNCS, 1); FAIL(OK); }
API int cudaDeviceReset(void) { return OK; }
API int cudaDriverGetVersion(int *v) { *v = CUDA_VERSION; return OK; }
API int cudaRuntimeGetVersion(int *v) { *v = CUDA_VERSION; return OK; }
API int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }
API int cudaDeviceEnablePeerAccess(int d, unsigned f) { (void)d; (void)f; return OK; }
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
API int cudaDeviceGetPCIBusId(char *out, int n, int d) { snprintf(out, (size_t)n, "0000:%02X:00.0", 0x10 + visible[d]); return OK; }
API int cudaDeviceGetLimit(size_t *v, int which) { (void)which; *v = 1024; return OK; }

static int attribute(int which, int device) {
    switch (which) {
        case 1: return 1024; case 2: case 3: return 1024; case 4: return 64; case 5: return 2147483647; case 6: case 7: return 65535;
        case 8: return 49152; case 9: return 65536; case 10: return 32; case 11: return 2147483647; case 12: return 65536;
        case 13: return 1410000; case 14: return 512; case 15: return 1; case 16: return multiprocessors(); case 19: return 1;
        case 31: return 1; case 32: return 1; case 33: return 0x10 + visible[device]; case 36: return 1593000; case 37: return 5120;
        case 38: return 40 << 20; case 39: return 2048; case 40: return 3; case 41: return 1; case 51: return 32;
        case 75: return capability() / 10; case 76: return capability() % 10; case 78: case 79: case 80: return 1;
        case 81: return 167936; case 82: return 65536; case 83: return 1; case 87: return 2; case 89: case 90: return 1;
        case 95: return 1; case 97: return 166912; case 99: return 1; case 106: return 32; case 111: return 1024; case 115: return 1;
        case 120: return capability() >= 90; case 125: return 1;
        default: return 0;
    }
}
API int cudaDeviceGetAttribute(int *v, int which, int d) { if (d < 0 || d >= device_count()) FAIL(BAD_DEVICE); *v = attribute(which, d); return OK; }

typedef struct {  // cudaDeviceProp of CUDA 13
    char name[256]; unsigned char uuid[16]; char luid[8]; unsigned luid_mask;
    size_t total, shared_block; int regs_block, warp; size_t pitch; int threads_block, threads_dim[3], grid[3];
    size_t constant; int major, minor; size_t texture_alignment, texture_pitch; int multiprocessors, integrated, map_host;
    int textures[39];  // sizes of textures and surfaces
    size_t surface_alignment; int concurrent, ecc, bus, pci_device, domain, tcc, engines, unified, bus_width, l2, l2_persist;
    int threads_sm, priorities, global_l1, local_l1; size_t shared_sm; int regs_sm, managed, multi_board, multi_group, atomics, pageable,
        concurrent_managed, preemption, host_pointer, cooperative; size_t shared_optin; int tables, direct, blocks_sm, window; size_t shared_reserved;
    int rest[76];
} Prop;
API int cudaGetDeviceProperties(Prop *p, int d) {
    if (d < 0 || d >= device_count()) FAIL(BAD_DEVICE);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", model_name());
    uuid_of(visible[d], p->uuid);
    p->total = total_memory(); p->shared_block = 49152; p->regs_block = 65536; p->warp = 32; p->pitch = 2147483647;
    p->threads_block = 1024; p->threads_dim[0] = p->threads_dim[1] = 1024; p->threads_dim[2] = 64;
    p->grid[0] = 2147483647; p->grid[1] = p->grid[2] = 65535; p->constant = 65536; p->major = capability() / 10; p->minor = capability() % 10;
    p->texture_alignment = 512; p->texture_pitch = 32; p->multiprocessors = multiprocessors(); p->map_host = 1;
    p->surface_alignment = 512; p->concurrent = 1; p->ecc = 1; p->bus = 0x10 + visible[d]; p->engines = 3; p->unified = 1; p->bus_width = 5120;
    p->l2 = 40 << 20; p->threads_sm = 2048; p->priorities = p->global_l1 = p->local_l1 = 1; p->shared_sm = 167936; p->regs_sm = 65536;
    p->managed = 1; p->concurrent_managed = p->preemption = p->cooperative = 1; p->shared_optin = 166912; p->blocks_sm = 32; p->shared_reserved = 1024;
    return OK;
}

// --- errors --------------------------------------------------------------------------------------------------------

API int cudaGetLastError(void) { int e = last_error; last_error = OK; return e; }
API int cudaPeekAtLastError(void) { return last_error; }
API const char *cudaGetErrorName(int e) {
    switch (e) { case OK: return "cudaSuccess"; case INVALID: return "cudaErrorInvalidValue"; case OOM: return "cudaErrorMemoryAllocation";
        case NO_DEVICE: return "cudaErrorNoDevice"; case BAD_DEVICE: return "cudaErrorInvalidDevice"; case LOST: return "cudaErrorLaunchFailure"; case NOT_READY: return "cudaErrorNotReady";
        case UNSUPPORTED: return "cudaErrorNotSupported"; case CAPTURE_UNSUPPORTED: return "cudaErrorStreamCaptureUnsupported"; default: return "cudaErrorUnknown"; }
}
API const char *cudaGetErrorString(int e) {
    switch (e) { case OK: return "no error"; case INVALID: return "invalid argument"; case OOM: return "out of memory";
        case OLD_DRIVER: return "CUDA driver version is insufficient for CUDA runtime version"; case NO_DEVICE: return "no CUDA-capable device is detected"; case BAD_DEVICE: return "invalid device ordinal"; case LOST: return "unspecified launch failure"; case NOT_READY: return "device not ready";
        case UNSUPPORTED: return "operation not supported"; case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing"; default: return "unknown error"; }
}

// --- streams and events --------------------------------------------------------------------------------------------

static atomic_ullong stream_ids;
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec / 1e6; }

API int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    Stream *s = calloc(1, sizeof *s);
    *s = (Stream){current_device, (int)flags, priority, 0, ++stream_ids};
    *out = s;
    return OK;
}
API int cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API int cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API int cudaStreamDestroy(void *s) { free(s); return OK; }
API int cudaStreamQuery(void *s) { (void)s; return OK; }
API int cudaStreamSynchronize(void *s) { if ((uintptr_t)s > 2 && ((Stream *)s)->capturing) FAIL(CAPTURE_UNSUPPORTED); COUNT(STREAM_SYNCS, 1); FAIL(OK); }
API int cudaStreamWaitEvent(void *s, void *e, unsigned f) { (void)s; (void)e; (void)f; return OK; }
API int cudaStreamGetPriority(void *s, int *p) { *p = (uintptr_t)s > 2 ? ((Stream *)s)->priority : 0; return OK; }
API int cudaStreamGetFlags(void *s, unsigned *f) { *f = (uintptr_t)s > 2 ? (unsigned)((Stream *)s)->flags : 0; return OK; }
API int cudaStreamAddCallback(void *s, void (*call)(void *, int, void *), void *data, unsigned f) { (void)f; call(s, OK, data); return OK; }
API int cudaLaunchHostFunc(void *s, void (*call)(void *), void *data) { (void)s; call(data); return OK; }
API int cudaStreamIsCapturing(void *s, int *status) { *status = (uintptr_t)s > 2 && ((Stream *)s)->capturing; return OK; }
API int cudaStreamGetCaptureInfo(void *s, int *status, unsigned long long *id, void **graph, void *deps, void *edges, size_t *n) {
    int on = (uintptr_t)s > 2 && ((Stream *)s)->capturing;
    if (status) *status = on;
    if (id) *id = on ? ((Stream *)s)->id : 0;
    if (graph) *graph = on ? s : NULL;
    if (deps) *(void **)deps = NULL;
    if (edges) *(void **)edges = NULL;
    if (n) *n = 0;
    return OK;
}
API int cudaThreadExchangeStreamCaptureMode(int *mode) { static __thread int own; int before = own; own = *mode; *mode = before; return OK; }
API int cudaStreamBeginCapture(void *s, int mode) { (void)mode; if ((uintptr_t)s <= 2) FAIL(CAPTURE_UNSUPPORTED); ((Stream *)s)->capturing = 1; ((Stream *)s)->id = ++stream_ids; return OK; }
API int cudaStreamBeginCaptureToGraph(void *s, void *g, void *d, void *e, size_t n, int mode) { (void)g; (void)d; (void)e; (void)n; return cudaStreamBeginCapture(s, mode); }
API int cudaStreamEndCapture(void *s, void **graph) { ((Stream *)s)->capturing = 0; *graph = calloc(1, 64); return OK; }
API int cudaGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long f) { (void)graph; (void)f; *exec = calloc(1, 64); return OK; }
API int cudaGraphLaunch(void *exec, void *s) { (void)exec; (void)s; COUNT(LAUNCHES, 1); return OK; }
API int cudaGraphGetNodes(void *g, void *nodes, size_t *n) { (void)g; (void)nodes; *n = 1; return OK; }
API int cudaGraphDestroy(void *g) { free(g); return OK; }
API int cudaGraphExecDestroy(void *g) { free(g); return OK; }

API int cudaEventCreateWithFlags(void **out, unsigned flags) { Event *e = calloc(1, sizeof *e); e->device = current_device; e->flags = (int)flags; *out = e; return OK; }
API int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }
API int cudaEventDestroy(void *e) { free(e); return OK; }
API int cudaEventRecord(void *e, void *s) { (void)s; ((Event *)e)->recorded = 1; ((Event *)e)->when = now(); return OK; }
API int cudaEventRecordWithFlags(void *e, void *s, unsigned f) { (void)f; return cudaEventRecord(e, s); }
API int cudaEventQuery(void *e) { (void)e; FAIL(OK); }
API int cudaEventSynchronize(void *e) { (void)e; COUNT(EVENT_SYNCS, 1); FAIL(OK); }
API int cudaEventElapsedTime(float *ms, void *a, void *b) {
    if (!((Event *)a)->recorded || !((Event *)b)->recorded) FAIL(400);
    *ms = (float)(((Event *)b)->when - ((Event *)a)->when);
    return OK;
}

// --- kernels -------------------------------------------------------------------------------------------------------

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pending;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *s) { pending.grid = grid; pending.block = block; pending.shared = shared; pending.stream = s; return 0; }
API int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **s) { *grid = pending.grid; *block = pending.block; *shared = pending.shared; *s = pending.stream; return OK; }
API void **__cudaRegisterFatBinary(void *f) { (void)f; return calloc(1, 8); }
API void __cudaRegisterFatBinaryEnd(void **h) { (void)h; }
API void __cudaUnregisterFatBinary(void **h) { (void)h; }
API void __cudaRegisterVar(void) {}
API void __cudaRegisterFunction(void) {}
API char __cudaInitModule(void **h) { (void)h; return 1; }

static int launch(const void *f, dim3 g, dim3 b) {
    COUNT(LAUNCHES, 1);
    if (!g.x || !g.y || !g.z || !b.x || !b.y || !b.z || (uint64_t)b.x * b.y * b.z > 1024 || g.y > 65535 || g.z > 65535 || g.x > 2147483647u)
        { complain("a kernel with a wrong launch configuration"); return 9; }
    (void)f;
    return OK;
}
API int cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, void *s) { (void)a; (void)m; (void)s; FAIL(launch(f, g, b)); }
API int __cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, void *s) { (void)a; (void)m; (void)s; FAIL(launch(f, g, b)); }
API int cudaLaunchKernelExC(struct { dim3 g, b; } *c, const void *f, void **a) { (void)a; FAIL(launch(f, c->g, c->b)); }
API int cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, void *s) { (void)a; (void)m; (void)s; FAIL(launch(f, g, b)); }
API int __cudaGetKernel(const void **k, const void *f) { *k = f; return OK; }
API int cudaGetFuncBySymbol(const void **k, const void *f) { *k = f; return OK; }
typedef struct { size_t shared, constant, local; int threads, regs, ptx, binary, cache_ca, max_dynamic, carveout, cluster[6], rest[16]; } FuncAttributes;
API int cudaFuncGetAttributes(FuncAttributes *a, const void *f) {
    (void)f;
    memset(a, 0, offsetof(FuncAttributes, rest));
    a->threads = 1024; a->regs = 32; a->ptx = a->binary = capability(); a->max_dynamic = 49152;
    return OK;
}
API int cudaFuncSetAttribute(const void *f, int a, int v) { (void)f; (void)a; (void)v; return OK; }
API int cudaKernelSetAttributeForDevice(void *k, int a, int v, int d) { (void)k; (void)a; (void)v; (void)d; return OK; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned fl) { (void)f; (void)m; (void)fl; *n = b > 1024 ? 1 : 2048 / (b > 0 ? b : 1); if (*n > 32) *n = 32; return OK; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t m) { return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, b, m, 0); }
API int cudaLibraryLoadData(void **lib) { *lib = calloc(1, 8); return OK; }
API int cudaLibraryGetKernel(void **k, void *lib, const char *name) { (void)name; *k = lib; return OK; }
API int cudaProfilerStart(void) { return OK; }
API int cudaProfilerStop(void) { return OK; }
static int own_symbol(const char *name, void **out) {
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)own_symbol, &info)) self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    char versioned[128];
    *out = NULL;
    for (int v = 3; v >= 2 && self && !*out; v--) { snprintf(versioned, sizeof versioned, "%s_v%d", name, v); *out = dlsym(self, versioned); }
    void *plain = self ? dlsym(self, name) : NULL;
    if (plain) *out = plain;
    if (!*out) say("no symbol %s", name);
    return *out ? OK : NOT_FOUND;
}
API int cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned v, unsigned long long f, int *status) {
    (void)v; (void)f;
    int e = own_symbol(name, out);
    if (status) *status = e ? 1 : 0;
    return OK;
}
API int cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long f, int *status) { return cudaGetDriverEntryPointByVersion(name, out, 0, f, status); }

// memory pools
API int cudaDeviceGetDefaultMemPool(void **pool, int d) { *pool = (void *)(uintptr_t)(d + 1); return OK; }
API int cudaMemPoolGetAttribute(void *p, int a, void *v) { (void)a; *(uint64_t *)v = arenas[(uintptr_t)p - 1].used; return OK; }
API int cudaMemPoolSetAttribute(void *p, int a, void *v) { (void)p; (void)a; (void)v; return OK; }
API int cudaMemPoolSetAccess(void *p, void *d, size_t n) { (void)p; (void)d; (void)n; return OK; }
API int cudaMemPoolTrimTo(void *p, size_t n) { (void)p; (void)n; return OK; }

// --- driver (libcaffe2_nvrtc, Triton, c10's driver table) --------------------------------------------------------------

API int cuInit(unsigned f) { (void)f; return device_count() ? OK : NO_DEVICE; }
API int cuDriverGetVersion(int *v) { *v = CUDA_VERSION; return OK; }
API int cuDeviceGetCount(int *n) { *n = device_count(); return OK; }
API int cuDeviceGet(int *d, int i) { if (i < 0 || i >= device_count()) return BAD_DEVICE; *d = i; return OK; }
API int cuDeviceGetName(char *out, int n, int d) { (void)d; snprintf(out, (size_t)n, "%s", model_name()); return OK; }
API int cuDeviceGetAttribute(int *v, int which, int d) { *v = attribute(which, d); return OK; }
API int cuDeviceTotalMem_v2(size_t *n, int d) { (void)d; *n = total_memory(); return OK; }
API int cuDeviceGetUuid_v2(unsigned char *u, int d) { uuid_of(visible[d], u); return OK; }
API int cuDeviceGetUuid(unsigned char *u, int d) { return cuDeviceGetUuid_v2(u, d); }
API int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(uintptr_t)(d + 1); return OK; }
API int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return OK; }
API int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) { *f = 0; *active = arenas[d].guard != NULL || d == current_device; return OK; }
API int cuCtxGetCurrent(void **c) { *c = (void *)(uintptr_t)(current_device + 1); return OK; }
API int cuCtxSetCurrent(void *c) { if (c) current_device = (int)(uintptr_t)c - 1; return OK; }
API int cuCtxPushCurrent_v2(void *c) { return cuCtxSetCurrent(c); }
API int cuCtxPopCurrent_v2(void **c) { return cuCtxGetCurrent(c); }
API int cuCtxGetDevice(int *d) { *d = current_device; return OK; }
API int cuCtxSetLimit(int which, size_t v) { (void)which; (void)v; return OK; }
API int cuCtxGetLimit(size_t *v, int which) { (void)which; *v = 1024; return OK; }
API int cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }
API int cuStreamSynchronize(void *s) { return cudaStreamSynchronize(s); }
API int cuGetErrorString(int e, const char **s) { *s = cudaGetErrorString(e); return OK; }
API int cuGetErrorName(int e, const char **s) { *s = cudaGetErrorName(e); return OK; }
API int cuModuleLoadData(void **m, const void *image) { (void)image; *m = calloc(1, 8); return OK; }
API int cuModuleLoadDataEx(void **m, const void *image, unsigned n, void *o, void *v) { (void)n; (void)o; (void)v; return cuModuleLoadData(m, image); }
API int cuModuleLoad(void **m, const char *file) { (void)file; return cuModuleLoadData(m, NULL); }
API int cuModuleUnload(void *m) { free(m); return OK; }
API int cuModuleGetFunction(void **f, void *m, const char *name) { (void)name; *f = m; return OK; }
API int cuFuncGetAttribute(int *v, int a, void *f) { (void)f; *v = a == 0 ? 1024 : a == 4 ? 32 : 0; return OK; }
API int cuFuncSetAttribute(void *f, int a, int v) { (void)f; (void)a; (void)v; return OK; }
API int cuFuncSetCacheConfig(void *f, int c) { (void)f; (void)c; return OK; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t m) { return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, b, m, 0); }
API int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { (void)f; (void)c; *n = 16; return OK; }
API int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned m, void *s, void **a, void **e) { (void)m; (void)s; (void)a; (void)e; return launch(f, (dim3){gx, gy, gz}, (dim3){bx, by, bz}); }
API int cuLaunchKernelEx(struct { unsigned gx, gy, gz, bx, by, bz; } *c, void *f, void **a, void **e) { (void)a; (void)e; return launch(f, (dim3){c->gx, c->gy, c->gz}, (dim3){c->bx, c->by, c->bz}); }
API int cuPointerGetAttribute(void *out, int which, uint64_t p) {
    int d = device_of((void *)p);
    if (d < 0 && !is_pinned((void *)p)) return INVALID;
    if (which == 1) *(void **)out = (void *)(uintptr_t)((d < 0 ? 0 : d) + 1);
    else if (which == 2) *(unsigned *)out = d >= 0 ? 2 : 1;
    else if (which == 3 || which == 4) *(uint64_t *)out = p;
    else if (which == 9) *(int *)out = d;
    else *(uint64_t *)out = 0;
    return OK;
}
API int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t p) {
    int d = device_of((void *)p), e = INVALID;
    if (d < 0) return e;
    uint64_t offset = p - (uint64_t)arenas[d].guard;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < arenas[d].blocks; i++) {
        Block b = arenas[d].block[i];
        if (offset >= b.offset && offset < b.offset + b.size) { if (base) *base = (uint64_t)arenas[d].guard + b.offset; if (size) *size = b.size; e = OK; }
    }
    pthread_mutex_unlock(&lock);
    return e;
}
// Virtual memory (expandable segments): a reserved range is a part of the arena that counts only where memory is mapped
typedef struct { int type, handles, location, device; } Placement;
typedef struct { int device; uint64_t size; int mapped, released; } Physical;
API int cuMemAddressReserve(uint64_t *out, size_t size, size_t align, uint64_t hint, uint64_t f) {
    (void)align; (void)hint; (void)f;
    void *p;
    int e = place(current_device, &p, size, 0);
    *out = (uint64_t)p;
    return e;
}
API int cuMemAddressFree(uint64_t p, size_t size) { (void)size; return displace((void *)p, 0); }
static void forget(Physical *h) {
    if (!h->released || h->mapped) return;
    pthread_mutex_lock(&lock);
    arenas[h->device].used -= h->size;
    pthread_mutex_unlock(&lock);
    free(h);
}
API int cuMemCreate(Physical **out, size_t size, const Placement *where, uint64_t f) {
    (void)f;
    int d = where->device, e = OK;
    if (where->location != 1) return INVALID;
    pthread_mutex_lock(&lock);
    Arena *a = arena(d);
    if (a->used + size + context_memory() > total_memory()) e = OOM; else a->used += size;
    pthread_mutex_unlock(&lock);
    if (e) return e;
    *out = calloc(1, sizeof(Physical));
    **out = (Physical){d, size, 0, 0};
    COUNT(MALLOCS, 1);
    return OK;
}
typedef struct { uint64_t at; Physical *h; } Mapping;
static Mapping *maps; static int maps_count, maps_room;
API int cuMemMap(uint64_t p, size_t size, size_t off, Physical *h, uint64_t f) {
    (void)off; (void)f;
    if (device_of((void *)p) != h->device || size != h->size) return INVALID;
    pthread_mutex_lock(&lock);
    if (maps_count == maps_room) maps = realloc(maps, (maps_room = maps_room * 2 + 64) * sizeof *maps);
    maps[maps_count++] = (Mapping){p, h};
    h->mapped++;
    pthread_mutex_unlock(&lock);
    return OK;
}
API int cuMemUnmap(uint64_t p, size_t size) {
    int d = device_of((void *)p);
    if (d < 0) return INVALID;
    fallocate(arenas[d].fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(p - (uint64_t)arenas[d].guard), (off_t)size);
    for (int i = 0; i < maps_count; ) {
        pthread_mutex_lock(&lock);
        Physical *h = NULL;
        if (i < maps_count && maps[i].at >= p && maps[i].at < p + size) { h = maps[i].h; h->mapped--; maps[i] = maps[--maps_count]; } else i++;
        pthread_mutex_unlock(&lock);
        if (h) forget(h);
    }
    return OK;
}
API int cuMemRelease(Physical *h) { h->released = 1; forget(h); COUNT(FREES, 1); return OK; }
API int cuMemSetAccess(uint64_t p, size_t size, const void *d, size_t n) { (void)p; (void)size; (void)d; (void)n; return OK; }
API int cuMemGetAllocationGranularity(size_t *n, const void *p, int f) { (void)p; (void)f; *n = 2 * MIB; return OK; }
API int cuGetProcAddress_v2(const char *name, void **out, int v, uint64_t f, int *status) { (void)v; (void)f; int e = own_symbol(name, out); if (status) *status = e ? 1 : 0; return e; }
API int cuGetProcAddress(const char *name, void **out, int v, uint64_t f) { return cuGetProcAddress_v2(name, out, v, f, NULL); }

// --- cuBLAS --------------------------------------------------------------------------------------------------------

static int handle(void **out) { *out = calloc(1, 4096); return 0; }
API int cublasCreate_v2(void **h) { return handle(h); }
API int cublasDestroy_v2(void *h) { free(h); return 0; }
API int cublasGetPointerMode_v2(void *h, int *m) { *m = *(int *)h; return 0; }
API int cublasSetPointerMode_v2(void *h, int m) { *(int *)h = m; return 0; }
API int cublasGetMathMode(void *h, int *m) { *m = ((int *)h)[1]; return 0; }
API int cublasSetMathMode(void *h, int m) { ((int *)h)[1] = m; return 0; }
API int cublasLtMatmulDescCreate(void **d) { return handle(d); }
API int cublasLtMatrixLayoutCreate(void **d) { return handle(d); }
API int cublasLtMatmulPreferenceCreate(void **d) { return handle(d); }
API int cublasLtMatmulDescDestroy(void *d) { free(d); return 0; }
API int cublasLtMatrixLayoutDestroy(void *d) { free(d); return 0; }
API int cublasLtMatmulPreferenceDestroy(void *d) { free(d); return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *pref, int asked, void *results, int *got) {
    (void)h; (void)op; (void)a; (void)b; (void)c; (void)d; (void)pref;
    memset(results, 0, (size_t)asked * 96);  // cublasLtMatmulHeuristicResult_t: 64 of algorithm, workspace, state, waves
    *got = asked > 0;
    return 0;
}
API size_t cublasLtGetVersion(void) { return 130000; }
#define GEMM(name) API int name(void) { COUNT(GEMMS, 1); return 0; }
GEMM(cublasSgemm_v2) GEMM(cublasDgemm_v2) GEMM(cublasCgemm_v2) GEMM(cublasZgemm_v2) GEMM(cublasGemmEx) GEMM(cublasSgemmEx)
GEMM(cublasGemmStridedBatchedEx) GEMM(cublasSgemmStridedBatched) GEMM(cublasDgemmStridedBatched) GEMM(cublasLtMatmul)
GEMM(cublasSgemmBatched) GEMM(cublasDgemmBatched) GEMM(cublasSgemv_v2) GEMM(cublasDgemv_v2)

// --- cuDNN ---------------------------------------------------------------------------------------------------------

API int cudnnCreate(void **h) { return handle(h); }
API int cudnnSetStream(void **h, void *s) { h[0] = s; return 0; }
API int cudnnGetStream(void **h, void **s) { *s = h[0]; return 0; }
API int cudnnBackendCreateDescriptor(int type, void **d) { handle(d); **(int **)d = type; return 0; }
API int cudnnBackendDestroyDescriptor(void *d) { free(d); return 0; }
API int cudnnBackendSetAttribute(void *d, int name, int type, int64_t n, const void *v) { (void)d; (void)name; (void)type; (void)n; (void)v; return 0; }
API int cudnnBackendFinalize(void *d) { (void)d; return 0; }
API int cudnnBackendExecute(void *h, void *p, void *v) { (void)h; (void)p; (void)v; COUNT(CONVOLUTIONS, 1); COUNT(LAUNCHES, 1); return 0; }
API int cudnnBackendGetAttribute(void *d, int name, int type, int64_t asked, int64_t *got, void *v) {
    static const int sizes[] = {8, 4, 1, 8, 4, 8, 8};  // handle, data type, boolean, int64, float, double, pointer
    (void)d;
    int64_t n = name == 202 || name == 301 ? 1 : name == 1303 || name == 1305 || name == 1302 || name == 1304 || name == 302 ? 0 : 1;
    if (got) *got = n;
    if (v && asked > 0 && n && type != 15) memset(v, 0, type < 7 ? (size_t)sizes[type] : 4);
    if (name == 802 && v) *(int64_t *)v = 1;
    return 0;
}
#define DESCRIPTOR(name) API int cudnnCreate##name(void **d) { return handle(d); } API int cudnnDestroy##name(void *d) { free(d); return 0; }
DESCRIPTOR(ActivationDescriptor) DESCRIPTOR(CTCLossDescriptor) DESCRIPTOR(ConvolutionDescriptor) DESCRIPTOR(DropoutDescriptor)
DESCRIPTOR(FilterDescriptor) DESCRIPTOR(PoolingDescriptor) DESCRIPTOR(RNNDataDescriptor) DESCRIPTOR(RNNDescriptor)
DESCRIPTOR(SpatialTransformerDescriptor) DESCRIPTOR(TensorDescriptor)
#define SIZE_AT(name, position) API int name(void *a, void *b, void *c, void *d, void *e, void *f, void *g, void *h, void *i, void *j, void *k) \
    { void *all[] = {a, b, c, d, e, f, g, h, i, j, k}; *(size_t *)all[position] = 4096; return 0; }
SIZE_AT(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, 8)
SIZE_AT(cudnnGetBatchNormalizationBackwardExWorkspaceSize, 10)
SIZE_AT(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, 5)
SIZE_AT(cudnnDropoutGetStatesSize, 1)
SIZE_AT(cudnnGetRNNWeightSpaceSize, 2)
API int cudnnGetRNNTempSpaceSizes(void *h, void *d, int m, void *x, size_t *work, size_t *reserve) { (void)h; (void)d; (void)m; (void)x; if (work) *work = 4096; if (reserve) *reserve = 4096; return 0; }

// --- NVML ----------------------------------------------------------------------------------------------------------

#define NVML(name, ...) API int nvml##name(__VA_ARGS__)
static int nvml_index(void *h) { return (int)(uintptr_t)h - 1; }
#define NVML_LOST 15
#define ANSWER(h) if (harmed("NULLGPU_LOST", nvml_index(h))) return NVML_LOST
NVML(Init_v2, void) { return 0; }
NVML(InitWithFlags, unsigned f) { (void)f; return 0; }
NVML(Init, void) { return 0; }
NVML(Shutdown, void) { return 0; }
API const char *nvmlErrorString(int e) { return e == NVML_LOST ? "GPU is lost" : e ? "null GPU error" : "Success"; }
NVML(DeviceGetCount_v2, unsigned *n) { *n = (unsigned)physical_count(); return 0; }
NVML(DeviceGetHandleByIndex_v2, unsigned i, void **h) { if ((int)i >= physical_count()) return 2; *h = (void *)(uintptr_t)(i + 1); return 0; }
NVML(DeviceGetHandleByUUID, const char *text, void **h) {
    for (int d = 0; d < physical_count(); d++) { char own[64]; uuid_text(d, own, sizeof own); if (!strncmp(own, text, strlen(text))) { *h = (void *)(uintptr_t)(d + 1); return 0; } }
    return 6;
}
NVML(DeviceGetHandleByPciBusId_v2, const char *text, void **h) {
    unsigned domain = 0, bus = 0;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || (int)bus - 0x10 >= physical_count()) return 6;
    *h = (void *)(uintptr_t)(bus - 0x10 + 1);
    return 0;
}
NVML(DeviceGetIndex, void *h, unsigned *i) { *i = (unsigned)nvml_index(h); return 0; }
NVML(DeviceGetName, void *h, char *out, unsigned n) { (void)h; snprintf(out, n, "%s", model_name()); return 0; }
NVML(DeviceGetUUID, void *h, char *out, unsigned n) { uuid_text(nvml_index(h), out, n); return 0; }
NVML(DeviceGetSerial, void *h, char *out, unsigned n) { snprintf(out, n, "%d", nvml_index(h)); return 0; }
NVML(DeviceGetMemoryInfo, void *h, uint64_t out[3]) {
    ANSWER(h);
    uint64_t used = context_memory();
    for (int i = 0; i < visible_count; i++) if (visible[i] == nvml_index(h)) used += arenas[i].used;
    out[0] = total_memory(); out[2] = used; out[1] = out[0] - out[2];
    return 0;
}
NVML(DeviceGetMemoryInfo_v2, void *h, struct { unsigned version; uint64_t total, reserved, free, used; } *out) {
    uint64_t m[3];
    ANSWER(h);
    nvmlDeviceGetMemoryInfo(h, m);
    out->total = m[0]; out->reserved = 0; out->free = m[1]; out->used = m[2];
    return 0;
}
NVML(DeviceGetUtilizationRates, void *h, unsigned out[2]) { ANSWER(h); out[0] = atoi(setting("NULLGPU_UTILISATION", "0")); out[1] = 0; return 0; }
NVML(DeviceGetPowerUsage, void *h, unsigned *mw) { ANSWER(h); *mw = 250000; return 0; }
NVML(DeviceGetEnforcedPowerLimit, void *h, unsigned *mw) { (void)h; *mw = 400000; return 0; }
NVML(DeviceGetPowerManagementLimit, void *h, unsigned *mw) { (void)h; *mw = 400000; return 0; }
NVML(DeviceGetTotalEnergyConsumption, void *h, unsigned long long *mj) { (void)h; *mj = (unsigned long long)(now() * 250); return 0; }
NVML(DeviceGetTemperature, void *h, int sensor, unsigned *t) { ANSWER(h); (void)sensor; *t = 55; return 0; }
NVML(DeviceGetTemperatureV, void *h, struct { unsigned version; int sensor, t; } *out) { (void)h; out->t = 55; return 0; }
NVML(DeviceGetClockInfo, void *h, int type, unsigned *mhz) { (void)h; *mhz = type == 2 ? 1593 : 1410; return 0; }
NVML(DeviceGetMaxClockInfo, void *h, int type, unsigned *mhz) { return nvmlDeviceGetClockInfo(h, type, mhz); }
NVML(DeviceGetCurrentClocksThrottleReasons, void *h, unsigned long long *r) { (void)h; *r = 0; return 0; }
NVML(DeviceGetCurrentClocksEventReasons, void *h, unsigned long long *r) { (void)h; *r = 0; return 0; }
NVML(DeviceGetCudaComputeCapability, void *h, int *major, int *minor) { (void)h; *major = capability() / 10; *minor = capability() % 10; return 0; }
NVML(DeviceGetMigMode, void *h, unsigned *now_, unsigned *later) { (void)h; *now_ = *later = 0; return 0; }
NVML(DeviceGetMaxMigDeviceCount, void *h, unsigned *n) { (void)h; *n = 0; return 0; }
NVML(DeviceGetComputeRunningProcesses_v3, void *h, unsigned *n, void *out) { (void)h; (void)out; *n = 0; return 0; }
NVML(DeviceGetComputeRunningProcesses, void *h, unsigned *n, void *out) { (void)h; (void)out; *n = 0; return 0; }
NVML(DeviceGetGpuFabricInfoV, void *h, void *info) { (void)h; (void)info; return 3; }  // not supported: before Hopper
NVML(DeviceGetTotalEccErrors, void *h, int type, int since, unsigned long long *n) {  // type 1: what ECC could not correct
    ANSWER(h);
    (void)since;
    *n = type == 1 && harmed("NULLGPU_ECC", nvml_index(h));
    return 0;
}
NVML(DeviceGetFanSpeed, void *h, unsigned *v) { (void)h; (void)v; return 3; }
NVML(SystemGetDriverVersion, char *out, unsigned n) { snprintf(out, n, "%s", driver()); return 0; }
NVML(SystemGetCudaDriverVersion_v2, int *v) { *v = CUDA_VERSION; return 0; }
NVML(SystemGetCudaDriverVersion, int *v) { *v = CUDA_VERSION; return 0; }
NVML(SystemGetNVMLVersion, char *out, unsigned n) { snprintf(out, n, "13.580.00"); return 0; }

#include "nccl.inc"

// --- the driver's files exist --------------------------------------------------------------------------------------

static const char *seen(const char *path) {
    return path && (!strcmp(path, "/dev/nvidiactl") || !strcmp(path, "/proc/driver/nvidia")) && !getenv("NULLGPU_NO_DRIVER_FILES") ? "/dev/null" : path;
}
API int fstatat(int fd, const char *path, struct stat *out, int flags) {
    long e = syscall(SYS_newfstatat, fd, seen(path), out, flags);
    return (int)e;
}
API int fstatat64(int fd, const char *path, struct stat64 *out, int flags) { return fstatat(fd, path, (struct stat *)out, flags); }
API int stat(const char *path, struct stat *out) { return fstatat(AT_FDCWD, path, out, 0); }
API int stat64(const char *path, struct stat64 *out) { return fstatat(AT_FDCWD, path, (struct stat *)out, 0); }
