/* The arithmetic and the copying of collectives and of send/recv, over the communicator's shared memory. */
#define _GNU_SOURCE
#include "nccl_internal.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PREMULTIPLIED 64 /* custom reductions that may be alive at once; torch makes one per call */
static double factor[PREMULTIPLIED];
static _Atomic int factors;

ncclResult_t ncclRedOpCreatePreMulSum(int *out, void *scalar, int type, int residence, ncclComm_t comm) {
  (void)residence, (void)comm;
  int i = atomic_fetch_add(&factors, 1) % PREMULTIPLIED;
  factor[i] = type == ncclFloat64 ? *(double *)scalar : *(float *)scalar;
  *out = ncclNumOps + i;
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(int op, ncclComm_t comm) {
  (void)op, (void)comm;
  return ncclSuccess;
}

size_t type_bytes(int type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 8;
  }
}

static float from_bfloat16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static uint16_t to_bfloat16(float f) { /* round to nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define SAME(x) (x)
/* out[i] = the reduction over all ranks' staged element i; WIDE is the type that sums are kept in. */
#define REDUCE_AS(NARROW, WIDE, WIDEN, NARROWED)                     \
  for (size_t i = 0; i < count; i++) {                               \
    WIDE total = 0;                                                  \
    for (int rank = 0; rank < c->size; rank++) {                     \
      WIDE x = WIDEN(((const NARROW *)segment_stage(c, rank))[i]);   \
      if (op >= ncclNumOps) x = (WIDE)(x * factor[op - ncclNumOps]); \
      if (rank == 0)                                                 \
        total = x;                                                   \
      else if (op == ncclProd)                                       \
        total *= x;                                                  \
      else if (op == ncclMax)                                        \
        total = x > total ? x : total;                               \
      else if (op == ncclMin)                                        \
        total = x < total ? x : total;                               \
      else                                                           \
        total += x;                                                  \
    }                                                                \
    if (op == ncclAvg) total = (WIDE)(total / (WIDE)c->size);        \
    ((NARROW *)out)[i] = (NARROW)NARROWED(total);                    \
  }                                                                  \
  break

static void reduce(ncclComm_t c, char *out, size_t count, int type, int op) {
  switch (type) {
    case ncclInt8: REDUCE_AS(int8_t, int, SAME, SAME);
    case ncclUint8: REDUCE_AS(uint8_t, unsigned, SAME, SAME);
    case ncclInt32: REDUCE_AS(int32_t, int32_t, SAME, SAME);
    case ncclUint32: REDUCE_AS(uint32_t, uint32_t, SAME, SAME);
    case ncclInt64: REDUCE_AS(int64_t, int64_t, SAME, SAME);
    case ncclUint64: REDUCE_AS(uint64_t, uint64_t, SAME, SAME);
    case ncclFloat32: REDUCE_AS(float, float, SAME, SAME);
    case ncclFloat64: REDUCE_AS(double, double, SAME, SAME);
    case ncclFloat16: REDUCE_AS(_Float16, float, SAME, SAME);
    case ncclBfloat16: REDUCE_AS(uint16_t, float, from_bfloat16, to_bfloat16);
    default: fprintf(stderr, "fakegpu: the double does not reduce NCCL type %d\n", type);
  }
}

/* NCCL does not compare what the ranks ask for, it hangs or worse; so do we, but say so. */
static int agree(const struct request *r) {
  ncclComm_t c = r->comm;
  struct signature mine = {r->count, r->operation, r->type, r->root}, *all = c->segment->signature;
  all[c->rank] = mine;
  if (segment_barrier(c)) return -1;
  for (int i = 0; i < c->size; i++) {
    if (all[i].operation == mine.operation && all[i].count == mine.count && all[i].type == mine.type &&
        all[i].root == mine.root)
      continue;
    fprintf(stderr, "fakegpu: rank %d calls %s of %llu, rank %d calls %s of %llu: this hangs\n", c->rank,
            OPERATION_POINT[mine.operation], mine.count, i, OPERATION_POINT[all[i].operation], all[i].count);
    while (!segment_lost(c)) usleep(500);
    return -1;
  }
  return segment_barrier(c);
}

/* One round: who has data stages it, all meet, who needs data takes it, all meet. */
static int stage(ncclComm_t c, const char *data, size_t bytes) {
  if (data) memcpy(segment_stage(c, c->rank), data, bytes);
  return segment_barrier(c);
}

/* The rounds of one chunk: `n` elements at element `at`. `block` is the bytes of one rank's whole part. */
static int chunk(const struct request *r, size_t at, size_t n) {
  ncclComm_t c = r->comm;
  size_t element = type_bytes(r->type), offset = at * element, bytes = n * element, block = r->count * element;
  int root = c->rank == r->root;
  switch (r->operation) {
    case ALL_REDUCE:
    case REDUCE:
      if (stage(c, r->send + offset, bytes)) return -1;
      if (r->operation == ALL_REDUCE || root) reduce(c, r->receive + offset, n, r->type, r->reduction);
      return segment_barrier(c);
    case BROADCAST:
      if (stage(c, root ? r->send + offset : NULL, bytes)) return -1;
      memcpy(r->receive + offset, segment_stage(c, r->root), bytes);
      return segment_barrier(c);
    case ALL_GATHER:
    case GATHER:
      if (stage(c, r->send + offset, bytes)) return -1;
      if (r->operation == ALL_GATHER || root)
        for (int i = 0; i < c->size; i++) memcpy(r->receive + (size_t)i * block + offset, segment_stage(c, i), bytes);
      return segment_barrier(c);
    case REDUCE_SCATTER:
    case ALL_TO_ALL:
    case SCATTER:
      for (int to = 0; to < c->size; to++) {
        const char *part = r->operation == SCATTER && !root ? NULL : r->send + (size_t)to * block + offset;
        if (stage(c, part, bytes)) return -1;
        if (c->rank == to && r->operation == REDUCE_SCATTER) reduce(c, r->receive + offset, n, r->type, r->reduction);
        if (c->rank == to && r->operation == SCATTER) memcpy(r->receive + offset, segment_stage(c, r->root), bytes);
        if (c->rank == to && r->operation == ALL_TO_ALL)
          for (int i = 0; i < c->size; i++) memcpy(r->receive + (size_t)i * block + offset, segment_stage(c, i), bytes);
        if (segment_barrier(c)) return -1;
      }
      return 0;
    default: return -1;
  }
}

int run_collective(const struct request *r) {
  if (agree(r)) return -1;
  size_t step = r->comm->stage_bytes / type_bytes(r->type);
  for (size_t at = 0; at < r->count; at += step)
    if (chunk(r, at, r->count - at < step ? r->count - at : step)) return -1;
  return 0;
}

/* Moves what can be moved of one send or receive; 1 when anything moved. */
static int advance(const struct request *r, size_t *done) {
  ncclComm_t c = r->comm;
  int sends = r->operation == SEND;
  size_t left = r->count * type_bytes(r->type) - *done;
  struct channel *channel = sends ? segment_channel(c, c->rank, r->root) : segment_channel(c, r->root, c->rank);
  if (atomic_load(&channel->full) == (unsigned)sends) return 0;
  unsigned bytes = sends ? PAIR_BYTES : channel->bytes;
  if (bytes > left) bytes = (unsigned)left;
  if (sends)
    memcpy(channel->data, r->send + *done, bytes);
  else
    memcpy(r->receive + *done, channel->data, bytes);
  if (sends) channel->bytes = bytes;
  atomic_store(&channel->full, (unsigned)sends);
  *done += bytes;
  return 1;
}

/* In one direction of one pair, requests go in the order in which they were made. */
static int must_wait(const struct request *r, int i, const char *finished) {
  for (int j = 0; j < i; j++)
    if (!finished[j] && r[j].comm == r[i].comm && r[j].operation == r[i].operation && r[j].root == r[i].root) return 1;
  return 0;
}

int run_pairwise(const struct request *r, int count) {
  size_t done[256] = {0};
  char finished[256] = {0};
  int left = count > 256 ? 256 : count, all = left, looks = 0; /* 256: four times the ranks there can be */
  while (left) {
    int moved = 0;
    for (int i = 0; i < all; i++) {
      if (finished[i] || must_wait(r, i, finished)) continue;
      size_t total = r[i].count * type_bytes(r[i].type);
      if (total) moved |= advance(&r[i], &done[i]);
      if (done[i] < total) continue;
      finished[i] = 1;
      left--;
    }
    if (moved)
      looks = 0;
    else
      pause_between_looks(&looks);
    for (int i = 0; i < all && left; i++)
      if (segment_lost(r[i].comm)) return -1;
  }
  return 0;
}
