/* "Device memory" is anonymous memory of this process, entered in the node's ledger; copies are memmove on a stream. */
#define _GNU_SOURCE
#include "runtime.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULE ((size_t)2 << 20) /* CUDA maps device memory in pages of 2 MiB */

struct range {
  char *start;
  size_t bytes;
  int ordinal, type;
};

static struct range *ranges;
static int range_count, range_capacity;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add(void *start, size_t bytes, int type) { /* lock held */
  if (range_count == range_capacity) {
    range_capacity = range_capacity ? 2 * range_capacity : 64;
    ranges = realloc(ranges, sizeof *ranges * (size_t)range_capacity);
  }
  ranges[range_count++] = (struct range){start, bytes, runtime_current(), type};
}

static int find(const void *pointer) { /* lock held */
  const char *p = pointer;
  for (int i = 0; i < range_count; i++)
    if (p >= ranges[i].start && p < ranges[i].start + ranges[i].bytes) return i;
  return -1;
}

int runtime_range(const void *pointer, void **base, size_t *bytes, int *ordinal) {
  pthread_mutex_lock(&lock);
  int i = find(pointer);
  if (i >= 0) {
    *base = ranges[i].start;
    *bytes = ranges[i].bytes;
    *ordinal = ranges[i].ordinal;
  }
  pthread_mutex_unlock(&lock);
  return i >= 0;
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
  RETURN_IF(runtime_enter("malloc"));
  RETURN_IF(runtime_context());
  *out = NULL;
  if (!bytes) return 0;
  int gpu = runtime_device(runtime_current()).gpu;
  size_t whole = (bytes + GRANULE - 1) & ~(GRANULE - 1);
  if (node_used_bytes(gpu) + whole > node_memory_bytes()) return runtime_fail(cudaErrorMemoryAllocation);
  void *p = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return runtime_fail(cudaErrorMemoryAllocation);
  node_hold(gpu, (long long)whole);
  pthread_mutex_lock(&lock);
  add(p, whole, cudaMemoryTypeDevice);
  pthread_mutex_unlock(&lock);
  *out = p;
  return 0;
}

cudaError_t cudaFree(void *pointer) {
  RETURN_IF(runtime_enter("free"));
  if (!pointer) return runtime_context(); /* cudaFree(0) is the usual way to make a context */
  RETURN_IF(cudaDeviceSynchronize());
  pthread_mutex_lock(&lock);
  int i = find(pointer);
  if (i < 0 || ranges[i].start != pointer) {
    pthread_mutex_unlock(&lock);
    return runtime_fail(cudaErrorInvalidValue);
  }
  node_hold(runtime_device(ranges[i].ordinal).gpu, -(long long)ranges[i].bytes);
  munmap(ranges[i].start, ranges[i].bytes);
  ranges[i] = ranges[--range_count];
  pthread_mutex_unlock(&lock);
  return 0;
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t s) {
  (void)s;
  return cudaMalloc(out, bytes);
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t s) {
  (void)s;
  return cudaFree(pointer);
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
  (void)flags;
  RETURN_IF(runtime_fail(runtime_poisoned()));
  pthread_mutex_lock(&lock);
  add(pointer, bytes, cudaMemoryTypeHost);
  pthread_mutex_unlock(&lock);
  return 0;
}

cudaError_t cudaHostUnregister(void *pointer) {
  pthread_mutex_lock(&lock);
  int i = find(pointer);
  if (i >= 0) ranges[i] = ranges[--range_count];
  pthread_mutex_unlock(&lock);
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
  RETURN_IF(runtime_enter("hostalloc"));
  if (posix_memalign(out, 4096, bytes ? bytes : 1)) return runtime_fail(cudaErrorMemoryAllocation);
  return cudaHostRegister(*out, bytes, flags);
}

cudaError_t cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

cudaError_t cudaFreeHost(void *pointer) {
  cudaError_t error = cudaHostUnregister(pointer);
  free(pointer);
  return error;
}

cudaError_t cudaHostGetDevicePointer(void **out, void *pointer, unsigned flags) {
  (void)flags;
  *out = pointer;
  return 0;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
  RETURN_IF(runtime_fail(runtime_poisoned()));
  memset(out, 0, sizeof *out);
  pthread_mutex_lock(&lock);
  int i = find(pointer);
  out->type = i < 0 ? cudaMemoryTypeUnregistered : ranges[i].type;
  out->device = i < 0 ? -2 : ranges[i].ordinal; /* -2: cudaInvalidDeviceId */
  out->devicePointer = i < 0 ? NULL : (void *)pointer;
  out->hostPointer = out->type == cudaMemoryTypeDevice ? NULL : (void *)pointer;
  pthread_mutex_unlock(&lock);
  return 0;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  RETURN_IF(runtime_enter("memgetinfo"));
  RETURN_IF(runtime_context());
  uint64_t used = node_used_bytes(runtime_device(runtime_current()).gpu);
  *total_bytes = node_memory_bytes();
  *free_bytes = used > *total_bytes ? 0 : *total_bytes - used;
  return 0;
}

struct copy {
  char *to;
  const char *from;
  size_t width, to_pitch, from_pitch, rows;
  int value;
}; /* from NULL: fill */

static void run_copy(void *argument) {
  struct copy *c = argument;
  for (size_t row = 0; row < c->rows; row++) {
    if (c->from)
      memmove(c->to + row * c->to_pitch, c->from + row * c->from_pitch, c->width);
    else
      memset(c->to + row * c->to_pitch, c->value, c->width);
  }
  free(c);
}

static cudaError_t queue_copy(struct copy copy, cudaStream_t stream, int wait) {
  RETURN_IF(runtime_enter(copy.from ? "memcpy" : "memset"));
  if (!copy.width || !copy.rows) return 0;
  struct copy *c = malloc(sizeof *c);
  *c = copy;
  runtime_submit(stream, run_copy, c);
  return wait ? runtime_fail(runtime_drain(stream)) : 0;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, cudaStream_t s) {
  (void)kind;
  pthread_mutex_lock(&lock);
  int pageable = find(to) < 0 || find(from) < 0; /* CUDA, too, does not return before it is done with pageable memory */
  pthread_mutex_unlock(&lock);
  return queue_copy((struct copy){to, from, bytes, 0, 0, 1, 0}, s, pageable);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
  (void)kind;
  return queue_copy((struct copy){to, from, bytes, 0, 0, 1, 0}, NULL, 1);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t s) {
  (void)to_device, (void)from_device;
  return queue_copy((struct copy){to, from, bytes, 0, 0, 1, 0}, s, 0);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, int kind, cudaStream_t s) {
  (void)kind;
  return queue_copy((struct copy){to, from, width, to_pitch, from_pitch, height, 0}, s, 0);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) {
  return queue_copy((struct copy){to, NULL, bytes, 0, 0, 1, value}, s, 0);
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  return queue_copy((struct copy){to, NULL, bytes, 0, 0, 1, value}, NULL, 1);
}

static char symbol_memory[1 << 16]; /* no kernel reads a device symbol, so one place serves all */

cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  (void)symbol;
  *out = symbol_memory;
  return 0;
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int kind) {
  (void)symbol, (void)from, (void)bytes, (void)offset, (void)kind;
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaDeviceGetDefaultMemPool(void **pool, int device) {
  (void)device;
  *pool = symbol_memory; /* any address: the pool functions below do nothing */
  return 0;
}

cudaError_t cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
  (void)pool, (void)attribute, (void)value;
  return 0;
}
cudaError_t cudaMemPoolSetAccess(void *pool, const void *access, size_t n) {
  (void)pool, (void)access, (void)n;
  return 0;
}
cudaError_t cudaMemPoolTrimTo(void *pool, size_t bytes) {
  (void)pool, (void)bytes;
  return 0;
}
cudaError_t cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
  (void)pool, (void)attribute;
  *(uint64_t *)value = 0;
  return 0;
}
