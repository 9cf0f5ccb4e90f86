/* From a call such as ncclAllReduce to its run on a stream: groups, order within a communicator, faults on the way. */
#define _GNU_SOURCE
#include "nccl_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *const OPERATION_POINT[] = {"allreduce", "broadcast", "reduce",  "allgather", "reducescatter",
                                       "alltoall",  "gather",    "scatter", "send",      "recv"};

struct batch {
  int count;
  struct request *request;
  unsigned long long *ticket;
};

static long long payload(const struct request *r) { return (long long)(r->count * type_bytes(r->type)); }
static int pairwise(const struct request *r) { return r->operation >= SEND; }

static void finish(ncclComm_t c) {
  pthread_mutex_lock(&c->lock);
  c->finished++;
  pthread_cond_broadcast(&c->changed);
  pthread_mutex_unlock(&c->lock);
}

static void await_turn(ncclComm_t c,
                       unsigned long long ticket) { /* streams may overtake one another, a communicator's calls not */
  pthread_mutex_lock(&c->lock);
  while (c->finished < ticket) pthread_cond_wait(&c->changed, &c->lock);
  pthread_mutex_unlock(&c->lock);
}

static int struck_while_running(const struct request *r, int *wrong) { /* 1: it does not run */
  int peer = pairwise(r) ? r->root : -1;
  return nccl_strike_running(r->comm, OPERATION_POINT[r->operation], payload(r), peer, wrong) ||
         nccl_strike_running(r->comm, pairwise(r) ? "p2p" : "coll", payload(r), peer, wrong);
}

static void spoil(const struct request *r) { /* one element, by an amount that any check of values must see */
  if (!r->receive || !r->count) return;
  if (r->type == ncclFloat32)
    ((float *)r->receive)[0] += 1;
  else if (r->type == ncclFloat64)
    ((double *)r->receive)[0] += 1;
  else
    r->receive[0] ^= 1;
}

static void run_batch(void *argument) {
  struct batch *b = argument;
  for (int i = 0; i < b->count;) {
    struct request *r = &b->request[i];
    int wrong = 0, n = 1, result = -1;
    if (pairwise(r))
      while (i + n < b->count && pairwise(&b->request[i + n])) n++;
    await_turn(r->comm, b->ticket[i]);
    int runs = !r->comm->aborted && !runtime_poisoned() && r->comm->segment;
    for (int k = 0; k < n && runs; k++) runs = !struck_while_running(r + k, &wrong);
    if (runs) result = pairwise(r) ? run_pairwise(r, n) : run_collective(r);
    if (!result && wrong) spoil(r);
    while (r->comm->state == ncclRemoteError && !r->comm->aborted && !runtime_poisoned())
      usleep(500); /* as a kernel that waits */
    for (int k = 0; k < n; k++) finish(b->request[i + k].comm);
    i += n;
  }
  free(b->request);
  free(b->ticket);
  free(b);
}

static void launch(const struct request *requests, int count) { /* one batch per run of requests for the same stream */
  for (int i = 0, n; i < count; i += n) {
    for (n = 1; i + n < count && requests[i + n].stream == requests[i].stream; n++) continue;
    struct batch *b = malloc(sizeof *b);
    b->count = n;
    b->request = malloc(sizeof *b->request * (size_t)n);
    b->ticket = malloc(sizeof *b->ticket * (size_t)n);
    memcpy(b->request, requests + i, sizeof *b->request * (size_t)n);
    for (int k = 0; k < n; k++) {
      ncclComm_t c = b->request[k].comm;
      pthread_mutex_lock(&c->lock);
      b->ticket[k] = c->launched++;
      pthread_mutex_unlock(&c->lock);
    }
    runtime_enqueue(b->request[0].stream, run_batch, b);
  }
}

/* Groups: calls between ncclGroupStart and ncclGroupEnd start together, new communicators among them. */
static __thread int depth, queued, queue_capacity, made;
static __thread struct request *queue;
static __thread ncclComm_t making[MAX_RANKS];

int nccl_group_open(void) { return depth > 0; }
void nccl_group_making(ncclComm_t c) {
  if (made < MAX_RANKS) making[made++] = c;
}

ncclResult_t ncclGroupStart(void) {
  depth++;
  return ncclSuccess;
}

static ncclResult_t await_made(void) {
  ncclResult_t result = ncclSuccess;
  int in_progress = 0;
  for (int i = 0; i < made; i++) {
    if (!making[i]->blocking) {
      in_progress = 1;
      continue;
    }
    for (int looks = 0; making[i]->state == ncclInProgress;) pause_between_looks(&looks);
    if (making[i]->state) result = (ncclResult_t)making[i]->state;
  }
  made = 0;
  return result ? result : in_progress ? ncclInProgress : ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  if (depth <= 0) return ncclInvalidUsage;
  if (--depth) return ncclSuccess;
  ncclResult_t result = await_made();
  launch(queue, queued);
  queued = 0;
  return result;
}

ncclResult_t ncclGroupSimulateEnd(void *information) {
  (void)information;
  return ncclGroupEnd();
}

static ncclResult_t issue(struct request r) {
  ncclComm_t c = r.comm;
  char point[32];
  if (!c || c->magic != COMM_MAGIC) {
    nccl_warn(NULL, "misc/argcheck.cc:44", "%s : comm argument is NULL or corrupted", OPERATION_POINT[r.operation]);
    return ncclInvalidArgument;
  }
  snprintf(point, sizeof point, "call_%s", OPERATION_POINT[r.operation]);
  int result = nccl_strike(c, point, payload(&r), pairwise(&r) ? r.root : -1, NULL);
  if (result >= 0) return (ncclResult_t)result;
  if (runtime_poisoned()) return nccl_cuda_failure(c, "enqueue.cc:1556", runtime_poisoned());
  for (int looks = 0; c->state == ncclInProgress && !c->aborted;) pause_between_looks(&looks);
  if (c->state) return (ncclResult_t)c->state;
  nccl_info(c, "COLL", "%s: count %zu datatype %d op %d root %d comm %p [nranks=%d] stream %p",
            OPERATION_POINT[r.operation], r.count, r.type, r.reduction, r.root, (void *)c, c->size, (void *)r.stream);
  if (!depth) {
    launch(&r, 1);
    return ncclSuccess;
  }
  if (queued == queue_capacity) {
    queue_capacity = queue_capacity ? 2 * queue_capacity : 64;
    queue = realloc(queue, sizeof *queue * (size_t)queue_capacity);
  }
  queue[queued++] = r;
  return ncclSuccess;
}

#define BUFFERS const void *send, void *receive, size_t count, int type
#define TAIL ncclComm_t comm, cudaStream_t stream
#define ISSUE(OP, REDUCTION, ROOT) \
  return issue((struct request){OP, comm, send, receive, count, type, REDUCTION, ROOT, stream})

ncclResult_t ncclAllReduce(BUFFERS, int op, TAIL) { ISSUE(ALL_REDUCE, op, 0); }
ncclResult_t ncclBroadcast(BUFFERS, int root, TAIL) { ISSUE(BROADCAST, 0, root); }
ncclResult_t ncclReduce(BUFFERS, int op, int root, TAIL) { ISSUE(REDUCE, op, root); }
ncclResult_t ncclAllGather(BUFFERS, TAIL) { ISSUE(ALL_GATHER, 0, 0); }
ncclResult_t ncclReduceScatter(BUFFERS, int op, TAIL) { ISSUE(REDUCE_SCATTER, op, 0); }
ncclResult_t ncclAlltoAll(BUFFERS, TAIL) { ISSUE(ALL_TO_ALL, 0, 0); }
ncclResult_t ncclGather(BUFFERS, int root, TAIL) { ISSUE(GATHER, 0, root); }
ncclResult_t ncclScatter(BUFFERS, int root, TAIL) { ISSUE(SCATTER, 0, root); }
ncclResult_t ncclBcast(void *receive, size_t count, int type, int root, TAIL) {
  const void *send = receive;
  ISSUE(BROADCAST, 0, root);
}
ncclResult_t ncclSend(const void *send, size_t count, int type, int root, TAIL) {
  void *receive = NULL;
  ISSUE(SEND, 0, root);
}
ncclResult_t ncclRecv(void *receive, size_t count, int type, int root, TAIL) {
  const void *send = NULL;
  ISSUE(RECV, 0, root);
}
