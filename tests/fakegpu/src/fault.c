/* Decides whether a fault of FAKE_FAULT strikes at a site, and does what needs no knowledge of the place. */
#define _GNU_SOURCE
#include "fault_language.h"
#include "node.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct entry entries[MAX_FAULTS];
static int entry_count = -1; /* -1: FAKE_FAULT not read yet */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void load(const char *text) { /* lock held */
  char why[256];
  int n = faults_parse(text, entries, why, sizeof why);
  if (n < 0) { /* a test that believes in a fault that is not there would pass for nothing */
    fprintf(stderr, "fakegpu: FAKE_FAULT is not understood: %s\n", why);
    _exit(97);
  }
  entry_count = n;
}

void fakegpu_set_faults(const char *text) {
  pthread_mutex_lock(&lock);
  load(text ? text : getenv("FAKE_FAULT"));
  pthread_mutex_unlock(&lock);
}

int fakegpu_check_faults(const char *text, char *why, int bytes) {
  struct entry *scratch = calloc(MAX_FAULTS, sizeof *scratch);
  int n = faults_parse(text, scratch, why, bytes);
  free(scratch);
  return n < 0 ? -1 : 0;
}

struct fault_site fault_site_at(const char *point) {
  struct fault_site site = {.point = point, .rank = -1, .world = -1, .bytes = -1, .gpu = -1, .peer = -1};
  return site;
}

static int within(const struct range *range, long long value) {
  return !range->set || (value >= 0 && value >= range->low && value <= range->high);
}

static int settings_hold(const struct entry *e) {
  for (int i = 0; i < e->settings; i++) {
    const char *value = getenv(e->setting[i].name);
    int set = value && (!e->setting[i].has_value || !strcmp(value, e->setting[i].value));
    if (set != e->setting[i].wanted) return 0;
  }
  return 1;
}

static int pair_holds(const struct entry *e, const struct fault_site *site) {
  if (e->pair_kind == 0) return 1;
  if (e->pair_kind == 1) {
    if (site->peer >= 0)
      return (site->rank == e->pair[0] && site->peer == e->pair[1]) ||
             (site->rank == e->pair[1] && site->peer == e->pair[0]);
    return site->has_rank && site->has_rank(site->comm, e->pair[0]) && site->has_rank(site->comm, e->pair[1]) &&
           (site->rank == e->pair[0] || site->rank == e->pair[1]);
  }
  int mine = 0;
  for (int i = 0; i < 2; i++) {
    const char *node = e->pair_node[i][0] ? e->pair_node[i] : NULL;
    if (!site->has_gpu || !site->has_gpu(site->comm, node, e->pair[i])) return 0;
    mine |= site->gpu == e->pair[i] && (!node || !strcmp(node, node_name()));
  }
  return mine;
}

static int from_environment(const char *name) {
  const char *value = getenv(name);
  return value && *value ? atoi(value) : -1;
}

static int conditions_hold(const struct entry *e, const struct fault_site *site, int rank, int world) {
  return within(&e->rank, rank) && within(&e->world, world) && within(&e->bytes, site->bytes) &&
         (e->not_rank < 0 || (rank >= 0 && rank != e->not_rank)) && (e->gpu < 0 || site->gpu == e->gpu) &&
         (!e->node[0] || !strcmp(e->node, node_name())) && settings_hold(e) && pair_holds(e, site);
}

/* The file `struck` in the folder of FAKE_CUDA_STATE is as old as the first fault that struck: measurements begin there. */
static void stamp(void) {
  const char *state = getenv("FAKE_CUDA_STATE");
  char path[512];
  if (!state || snprintf(path, sizeof path, "%s/struck", state) >= (int)sizeof path) return;
  int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
  if (fd >= 0) close(fd);
}

int fault_strikes(const struct fault_site *site, struct fault *struck) {
  if (entry_count == 0) return 0;
  pthread_mutex_lock(&lock);
  if (entry_count < 0) load(getenv("FAKE_FAULT"));
  int rank = site->rank >= 0 ? site->rank : from_environment("RANK");
  int world = site->world >= 0 ? site->world : from_environment("WORLD_SIZE");
  int hit = 0;
  for (int i = 0; i < entry_count && !hit; i++) {
    struct entry *e = &entries[i];
    if (strcmp(e->point, site->point) || (site->only_pairs && !e->pair_kind) || !conditions_hold(e, site, rank, world))
      continue;
    long visit = e->shared ? node_count(e->key * 31 + (uint64_t)(rank + 2)) : ++e->seen;
    if (e->visit.set && (visit < e->visit.low || visit > e->visit.high)) continue;
    *struck = e->fault;
    hit = 1;
  }
  pthread_mutex_unlock(&lock);
  if (hit) {
    stamp();
    node_trace("fault at %s on rank %d: action %d number %ld", site->point, rank, struck->action, struck->number);
  }
  return hit;
}

static void hold_the_gil(void) { /* as a C extension that blocks without releasing it */
  int (*ensure)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  if (ensure) ensure();
  for (;;) pause();
}

void fault_act(const struct fault *fault) {
  switch (fault->action) {
    case FAULT_DELAY: usleep((useconds_t)fault->number * 1000); break;
    case FAULT_HANG:
      for (;;) pause();
    case FAULT_SPIN:
      for (volatile long turns = 0;; turns++) continue;
    case FAULT_HANG_GIL: hold_the_gil(); break;
    case FAULT_EXIT: _exit((int)fault->number);
    case FAULT_ABORT: abort();
    case FAULT_KILL: kill(getpid(), SIGKILL); break;
    case FAULT_SEGV: *(volatile int *)NULL = 0; break;
    default: break;
  }
}

/* A forked child reads FAKE_FAULT again: its parent may have set it between the fork server's start and now. */
static void in_the_child(void) {
  entry_count = -1;
  pthread_mutex_init(&lock, NULL);
}
__attribute__((constructor)) static void watch_for_forks(void) { pthread_atfork(NULL, NULL, in_the_child); }
