/* The shared memory of a communicator: how ranks meet in it, wait for one another in it, and leave it. */
#define _GNU_SOURCE
#include "nccl_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
static size_t header_bytes(void) { return (sizeof(struct segment) + PAGE - 1) & ~(PAGE - 1); }

void pause_between_looks(int *looks) { /* quick at first, then easy on a machine with fewer cores than ranks */
  int n = ++*looks;
  if (n < 50) {
    sched_yield();
    return;
  }
  struct timespec t = {0, n < 2000 ? 50000 : 500000};
  nanosleep(&t, NULL);
}

/* NCCL over sockets sees a dead peer, over shared memory it does not: FAKE_NCCL_PEER_DEATH=remote plays the former. */
static int peer_died(ncclComm_t c) {
  const char *mode = getenv("FAKE_NCCL_PEER_DEATH");
  if (!mode || strcmp(mode, "remote") || !c->segment) return 0;
  for (int i = 0; i < c->size; i++) {
    struct member *m = &c->segment->member[i];
    if (!atomic_load(&m->attached) || atomic_load(&m->gone) || kill(m->pid, 0) == 0 || errno != ESRCH) continue;
    if (c->state != ncclRemoteError)
      nccl_warn(c, "misc/socket.cc:49", "socketProgress: Connection closed by remote peer %s<%d>", m->node, 30000 + i);
    c->state = ncclRemoteError;
    return 1;
  }
  return 0;
}

int segment_lost(ncclComm_t c) {
  static __thread int looks;
  return c->aborted || runtime_poisoned() || (++looks % 64 == 0 && peer_died(c));
}

static int map(ncclComm_t c) {
  const char *folder = getenv("FAKE_NCCL_SHM");
  c->stage_bytes =
      c->size <= 8 ? 1u << 20 : 1u << 18; /* few rounds for large tensors, yet 64 ranks stay below 100 MiB */
  c->mapped_bytes =
      header_bytes() + c->stage_bytes * (size_t)c->size + sizeof(struct channel) * (size_t)c->size * (size_t)c->size;
  snprintf(c->path, sizeof c->path, "%s/%s", folder ? folder : "/dev/shm", c->name);
  int fd = open(c->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return -1;
  struct stat status;
  if (fstat(fd, &status) || ((size_t)status.st_size < c->mapped_bytes && ftruncate(fd, (off_t)c->mapped_bytes))) {
    close(fd);
    return -1;
  }
  char *m = mmap(NULL, c->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (m == MAP_FAILED) return -1;
  c->segment = (struct segment *)m;
  c->staging = m + header_bytes();
  c->channels = (struct channel *)(c->staging + c->stage_bytes * (size_t)c->size);
  return 0;
}

int segment_attach(ncclComm_t c) {
  if (map(c)) return -1;
  struct member *me = &c->segment->member[c->rank];
  me->pid = getpid();
  me->gpu = c->gpu;
  snprintf(me->node, sizeof me->node, "%s", node_name());
  atomic_store(&me->attached, 1);
  for (int looks = 0;;) {
    int n = 0;
    for (int i = 0; i < c->size; i++) n += atomic_load(&c->segment->member[i].attached);
    if (n == c->size) break;
    if (segment_lost(c)) return c->state == ncclRemoteError ? 2 : 1;
    pause_between_looks(&looks);
  }
  unlink(c->path); /* all have it mapped: from here on no death leaves a file. Before, it does, as with NCCL */
  c->attached = 1;
  return 0;
}

void segment_detach(ncclComm_t c) {
  if (!c->segment) return;
  atomic_store(&c->segment->member[c->rank].gone, 1);
  int done = 1;
  for (int i = 0; i < c->size; i++)
    done &= atomic_load(&c->segment->member[i].gone) || !atomic_load(&c->segment->member[i].attached);
  if (done) unlink(c->path);
  if (!runtime_poisoned()) { /* in a lost context a stream may still be about to look at it */
    munmap(c->segment, c->mapped_bytes);
    c->segment = NULL;
  }
}

int segment_barrier(ncclComm_t c) {
  struct segment *s = c->segment;
  unsigned generation = atomic_load(&s->barrier_generation);
  if (atomic_fetch_add(&s->barrier_waiting, 1) == c->size - 1) {
    atomic_store(&s->barrier_waiting, 0);
    atomic_fetch_add(&s->barrier_generation, 1);
    return 0;
  }
  for (int looks = 0; atomic_load(&s->barrier_generation) == generation; pause_between_looks(&looks))
    if (segment_lost(c)) return -1;
  return 0;
}

char *segment_stage(ncclComm_t c, int rank) { return c->staging + c->stage_bytes * (size_t)rank; }
struct channel *segment_channel(ncclComm_t c, int from, int to) {
  return &c->channels[(size_t)from * (size_t)c->size + (size_t)to];
}
