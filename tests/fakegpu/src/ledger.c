/* The file in which the processes of a node note what GPU memory they hold: the double's place of the kernel driver. */
#define _GNU_SOURCE
#include "node.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_PROCESSES 512 /* more than the test machine can run at once */
#define MAX_COUNTERS 256

struct process {
  _Atomic int pid;
  _Atomic uint64_t started;              /* clock ticks since boot, from /proc: tells a reused pid from the old one */
  _Atomic uint64_t context[MAX_DEVICES]; /* 1: this process has used the GPU */
  _Atomic int64_t bytes[MAX_DEVICES];
};
struct ledger { /* all zero is an empty ledger */
  struct process process[MAX_PROCESSES];
  struct {
    _Atomic uint64_t key;
    _Atomic long count;
  } counter[MAX_COUNTERS];
};

static struct ledger *ledger;
static struct process *own;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int open_file(void) {
  char path[512], folder[256];
  const char *state = getenv("FAKE_CUDA_STATE");
  if (state)
    snprintf(folder, sizeof folder, "%s", state);
  else
    snprintf(folder, sizeof folder, "/tmp/fakegpu-%d", (int)getuid());
  mkdir(folder, 0700);
  snprintf(path, sizeof path, "%s/%s.ledger", folder, node_name());
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(struct ledger))) {
    fprintf(stderr, "fakegpu: cannot keep the ledger %s: %s\n", path, strerror(errno));
    _exit(97);
  }
  return fd;
}

static struct ledger *opened(void) { /* lock held */
  if (ledger) return ledger;
  int fd = open_file(); /* not kept: a program may close descriptors it does not know */
  ledger = mmap(NULL, sizeof(struct ledger), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return ledger;
}

/* Keeps the node's other processes out until the descriptor is closed, also by our death. */
static int keep_others_out(void) {
  int fd = open_file();
  flock(fd, LOCK_EX);
  return fd;
}

/* When `pid` started, 0 when it is gone. A zombie is gone: the driver frees its memory when it exits. */
static uint64_t start_of(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  char *after = strrchr(text, ')'); /* the name in parentheses may hold anything */
  unsigned long long started = 0;
  char state = 0;
  if (after)
    sscanf(after + 2, "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
           &started);
  return state == 'Z' || state == 'X' ? 0 : started;
}

static int alive(struct process *p) {
  int pid = atomic_load(&p->pid);
  if (!pid) return 0;
  if (start_of(pid) == atomic_load(&p->started)) return 1;
  atomic_compare_exchange_strong(&p->pid, &pid, 0); /* so that nobody need look into /proc for it again */
  return 0;
}

static struct process *own_entry(void) { /* lock held */
  if (own) return own;
  struct ledger *l = opened();
  int fd = keep_others_out();
  for (int i = 0; i < MAX_PROCESSES && !own; i++) {
    struct process *p = &l->process[i];
    if (alive(p)) continue;
    for (int gpu = 0; gpu < MAX_DEVICES; gpu++) {
      p->bytes[gpu] = 0;
      p->context[gpu] = 0;
    }
    p->started = start_of(getpid());
    p->pid = getpid();
    own = p;
  }
  close(fd);
  return own;
}

int node_hold(int gpu, long long change_bytes) {
  pthread_mutex_lock(&lock);
  struct process *p = own_entry();
  if (p) {
    atomic_store(&p->context[gpu], 1);
    atomic_fetch_add(&p->bytes[gpu], change_bytes);
  }
  pthread_mutex_unlock(&lock);
  return p ? 0 : -1;
}

int node_holders(int gpu, struct holder *out, int max) {
  int n = 0;
  pthread_mutex_lock(&lock);
  struct ledger *l = opened();
  for (int i = 0; i < MAX_PROCESSES && n < max; i++) {
    struct process *p = &l->process[i];
    if (!atomic_load(&p->pid) || !atomic_load(&p->context[gpu]) || !alive(p)) continue;
    int64_t bytes = atomic_load(&p->bytes[gpu]);
    out[n].pid = p->pid;
    out[n++].bytes = bytes > 0 ? (uint64_t)bytes : 0;
  }
  pthread_mutex_unlock(&lock);
  return n;
}

uint64_t node_used_bytes(int gpu) {
  struct holder holders[MAX_PROCESSES];
  int n = node_holders(gpu, holders, MAX_PROCESSES);
  uint64_t used = 0;
  for (int i = 0; i < n; i++) used += holders[i].bytes;
  return used;
}

long node_count(uint64_t key) {
  long count = 0;
  pthread_mutex_lock(&lock);
  struct ledger *l = opened();
  int fd = keep_others_out();
  for (int i = 0; i < MAX_COUNTERS; i++) {
    if (atomic_load(&l->counter[i].key) && atomic_load(&l->counter[i].key) != key) continue;
    atomic_store(&l->counter[i].key, key);
    count = atomic_fetch_add(&l->counter[i].count, 1) + 1;
    break;
  }
  close(fd);
  pthread_mutex_unlock(&lock);
  return count;
}

static void in_the_child(void) { /* the parent's entry stays the parent's, and the child may be put on another node */
  if (ledger) munmap(ledger, sizeof *ledger);
  ledger = NULL;
  own = NULL;
  pthread_mutex_init(&lock, NULL);
}
__attribute__((constructor)) static void watch_for_forks(void) { pthread_atfork(NULL, NULL, in_the_child); }
