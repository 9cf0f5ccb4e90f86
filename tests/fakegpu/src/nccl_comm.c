/* The life of a communicator: unique id, init (blocking or not), abort, finalize, destroy. */
#define _GNU_SOURCE
#include "nccl_internal.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

/* What a communicator holds of the GPU. Real NCCL takes hundreds of MiB; any amount that shows in NVML will do. */
#define COMM_DEVICE_BYTES (32ll << 20)

static const char *const RESULT_TEXT[] = {
    /* as ncclGetErrorString of 2.30 */
    "no error",
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "internal error - please report this issue to the NCCL developers",
    "invalid argument (run with NCCL_DEBUG=WARN for details)",
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "remote process exited or there was a network error",
    "NCCL operation in progress",
    "timeout",
};
const char *ncclGetErrorString(ncclResult_t r) {
  return (unsigned)r <= ncclTimeout ? RESULT_TEXT[r] : "unknown result code";
}
ncclResult_t ncclGetVersion(int *version) {
  *version = nccl_version();
  return ncclSuccess;
}

ncclResult_t comm_refuse(const char *function) {
  nccl_warn(NULL, "misc/argcheck.cc:44", "%s : comm argument is NULL or corrupted", function);
  return ncclInvalidArgument;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static const char LETTERS[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  unsigned char noise[6];
  int result = nccl_strike(NULL, "getid", -1, -1, NULL);
  if (result >= 0) return (ncclResult_t)result;
  memset(id, 0, sizeof *id);
  if (getrandom(noise, sizeof noise, 0) != (ssize_t)sizeof noise) return ncclSystemError;
  strcpy(id->internal, "nccl-"); /* the id names the shared memory: NCCL's own are /dev/shm/nccl-XXXXXX */
  for (int i = 0; i < 6; i++) id->internal[5 + i] = LETTERS[noise[i] % (sizeof LETTERS - 1)];
  return ncclSuccess;
}

static ncclResult_t take_memory(ncclComm_t c) {
  if (node_used_bytes(c->gpu) + COMM_DEVICE_BYTES > node_memory_bytes()) {
    nccl_warn(c, "include/alloc.h:178", "Cuda failure 2 'out of memory'");
    nccl_warn(c, "include/alloc.h:185", "Failed to CUDA calloc %lld bytes", COMM_DEVICE_BYTES);
    return ncclUnhandledCudaError;
  }
  node_hold(c->gpu, COMM_DEVICE_BYTES);
  return ncclSuccess;
}

static ncclResult_t meet(ncclComm_t c) {
  int met = segment_attach(c);
  if (met == 1) return ncclInternalError;
  if (met == 2) return ncclRemoteError;
  if (met == 0) return ncclSuccess;
  nccl_warn(c, "misc/shmutils.cc:132", "Error while creating shared memory segment %s (size %zu), error: %s (%d)",
            c->path, c->mapped_bytes, strerror(errno), errno);
  return ncclSystemError;
}

static ncclResult_t no_duplicates(ncclComm_t c) {
  const struct member *all = c->segment->member, *me = &all[c->rank];
  for (int i = 0; i < c->size; i++) {
    if (i == c->rank || all[i].gpu != me->gpu || strcmp(all[i].node, me->node)) continue;
    nccl_warn(c, "init.cc:497", "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000", c->rank, i,
              me->gpu + 1);
    return ncclInvalidUsage;
  }
  return ncclSuccess;
}

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static ncclResult_t form(ncclComm_t c) {
  int result;
  ncclResult_t failure;
  struct init_timings t;
  if (nccl_log_network(c)) return ncclInternalError;
  nccl_log_start(c);
  t.began_s = now_s();
  if ((result = nccl_strike(c, "init", -1, -1, NULL)) >= 0) return (ncclResult_t)result;
  t.loaded_s = now_s();
  if ((failure = take_memory(c))) return failure;
  t.ready_s = now_s();
  if ((failure = meet(c))) return failure;
  t.met_s = now_s();
  nccl_log_bootstrap(c, &t);
  if ((failure = no_duplicates(c))) return failure;
  nccl_log_connected(c);
  if ((result = nccl_strike_pairs(c, "init")) >= 0) return (ncclResult_t)result;
  if ((result = nccl_strike(c, "initdone", -1, -1, NULL)) >= 0) return (ncclResult_t)result;
  t.done_s = now_s();
  nccl_log_complete(c);
  nccl_log_timings(c, &t);
  return ncclSuccess;
}

ncclResult_t comm_form(ncclComm_t c) {
  ncclResult_t result = form(c);
  if (result) nccl_info(c, "INIT", "group.cc:73 -> %d [Async thread]", result);
  int asynchronous = c->state != ncclInProgress; /* a fault may have set the state that the next look shall find */
  if (!asynchronous || result) c->state = result;
  return result;
}

static void *form_thread(void *argument) {
  ncclComm_t c = argument;
  runtime_set_current(c->device);
  comm_form(c);
  return NULL;
}

void comm_start_thread(void *(*function)(void *), void *argument) {
  pthread_t thread;
  pthread_create(&thread, NULL, function, argument);
  pthread_detach(thread);
}

ncclComm_t comm_make(const char *name, int size, int rank, int blocking) {
  ncclComm_t c = calloc(1, sizeof *c);
  c->magic = COMM_MAGIC;
  c->size = size;
  c->rank = c->world_rank = rank;
  c->blocking = blocking;
  c->state = ncclInProgress;
  c->device = runtime_current();
  c->gpu = c->device < runtime_visible_count() ? runtime_device(c->device).gpu : -1;
  snprintf(c->name, sizeof c->name, "%.60s", name);
  pthread_mutex_init(&c->lock, NULL);
  pthread_cond_init(&c->changed, NULL);
  return c;
}

ncclResult_t comm_begin(ncclComm_t c, ncclComm_t *out) {
  *out = c; /* set also on failure, as in NCCL: torch aborts what it finds there */
  if (c->blocking && !nccl_group_open()) return comm_form(c);
  comm_start_thread(form_thread, c);
  if (!nccl_group_open()) return ncclInProgress;
  nccl_group_making(c);
  return ncclSuccess;
}

int comm_blocking(const ncclConfig_t *config, int otherwise) {
  return !config || config->blocking == NCCL_CONFIG_UNDEF_INT ? otherwise : config->blocking;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) {
    nccl_warn(NULL, "init.cc:1762", "Invalid rank requested : %d/%d", rank, size);
    return ncclInvalidArgument;
  }
  int error = runtime_context();
  if (runtime_poisoned() || error) return nccl_cuda_failure(NULL, "init.cc:1762", error ? error : runtime_poisoned());
  return comm_begin(comm_make(id.internal, size, rank, comm_blocking(config, 1)), out);
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, size, id, rank, NULL);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int size, int rank, int ids, ncclUniqueId *id,
                                      ncclConfig_t *config) {
  (void)ids;
  return ncclCommInitRankConfig(out, size, id[0], rank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t *out, int size, const int *devices) {
  ncclUniqueId id;
  ncclResult_t result = ncclGetUniqueId(&id);
  if (result) return result;
  ncclGroupStart();
  for (int i = 0; i < size && !result; i++) {
    cudaSetDevice(devices ? devices[i] : i);
    result = ncclCommInitRank(&out[i], size, id, i);
  }
  ncclResult_t end = ncclGroupEnd();
  return result ? result : end;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error) {
  CHECK_COMM(c);
  int result = nccl_strike(c, "asyncerror", -1, -1, NULL);
  *error = (ncclResult_t)(result >= 0 ? result : c->state);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t c, int *out) {
  CHECK_COMM(c);
  *out = c->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t c, int *out) {
  CHECK_COMM(c);
  *out = c->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t c, int *out) {
  CHECK_COMM(c);
  *out = c->device;
  return ncclSuccess;
}

static void await_launched(ncclComm_t c) { /* returns also when the context is lost: nothing will run any more */
  pthread_mutex_lock(&c->lock);
  while (c->finished < c->launched && !runtime_poisoned()) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 20000000; /* 20 ms: how soon a lost context is noticed */
    if (until.tv_nsec >= 1000000000) {
      until.tv_sec++;
      until.tv_nsec -= 1000000000;
    }
    pthread_cond_timedwait(&c->changed, &c->lock, &until);
  }
  pthread_mutex_unlock(&c->lock);
}

static void release(ncclComm_t c) { /* the struct itself is never freed: torch asks after destroyed communicators */
  if (c->attached) node_hold(c->gpu, -COMM_DEVICE_BYTES);
  segment_detach(c);
  c->magic = 0;
}

ncclResult_t ncclCommFinalize(ncclComm_t c) {
  if (!c) return ncclSuccess;
  CHECK_COMM(c);
  int result = nccl_strike(c, "finalize", -1, -1, NULL);
  if (result >= 0) return (ncclResult_t)result;
  await_launched(c);
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t c) {
  if (!c) return ncclSuccess; /* NULL is fine here, in NCCL too */
  CHECK_COMM(c);
  int result = nccl_strike(c, "destroy", -1, -1, NULL);
  if (result >= 0) return (ncclResult_t)result;
  await_launched(c);
  nccl_info(c, "INIT", "comm %p rank %d nranks %d cudaDev %d busId %x000 - Destroy COMPLETE", (void *)c, c->rank,
            c->size, c->device, c->gpu + 1);
  release(c);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t c) {
  if (!c) return ncclSuccess;
  CHECK_COMM(c);
  int result = nccl_strike(c, "commabort", -1, -1, NULL);
  if (result >= 0) return (ncclResult_t)result;
  c->aborted = 1;
  await_launched(c);
  for (int looks = 0; c->state == ncclInProgress && looks < 1000;)
    pause_between_looks(&looks); /* let its init thread see it */
  nccl_info(c, "INIT", "comm %p rank %d nranks %d cudaDev %d busId %x000 - Abort COMPLETE", (void *)c, c->rank, c->size,
            c->device, c->gpu + 1);
  release(c);
  return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t c, int flags) {
  (void)flags;
  CHECK_COMM(c);
  c->aborted = 1;
  await_launched(c);
  c->aborted = 0;
  return ncclSuccess;
}

/* Asked for by torch, and harmless when nothing is done. */
ncclResult_t ncclCommRegister(ncclComm_t c, void *b, size_t n, void **handle) {
  (void)c, (void)b, (void)n;
  *handle = c;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(ncclComm_t c, void *handle) {
  (void)c, (void)handle;
  return ncclSuccess;
}
ncclResult_t ncclMemAlloc(void **p, size_t n) { return cudaMalloc(p, n) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclMemFree(void *p) { return cudaFree(p) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclCommSuspend(ncclComm_t c, int flags) {
  (void)c, (void)flags;
  return ncclSuccess;
}
ncclResult_t ncclCommResume(ncclComm_t c) {
  (void)c;
  return ncclSuccess;
}
ncclResult_t ncclCommMemStats(ncclComm_t c, int which, uint64_t *value) {
  (void)c, (void)which;
  *value = 0;
  return ncclSuccess;
}
