/* Parses FAKE_FAULT and decides whether a fault strikes at a site. */
#define _GNU_SOURCE
#include "fault.h"
#include "node.h"
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_FAULTS 64
#define MAX_SETTINGS 4

struct range { long long low, high; int set; };
struct entry {
  char point[32], node[64];
  struct fault fault;
  struct range rank, world, bytes, visit;
  int not_rank, gpu, pair[2], shared;
  char pair_node[2][64];
  int pair_kind;                       /* 0 none, 1 ranks, 2 GPUs */
  struct { char name[64], value[64]; int wanted, has_value; } setting[MAX_SETTINGS];
  int settings;
  uint64_t key;                        /* of the shared visit counter */
  long seen;
};

static struct entry entries[MAX_FAULTS];
static int entry_count = -1; /* -1: FAKE_FAULT not read yet */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const struct { const char *name; enum fault_action action; int number; } ACTIONS[] = {
  /* number: 0 takes none, 1 needs one */
  {"hang", FAULT_HANG, 0}, {"hang-gil", FAULT_HANG_GIL, 0}, {"spin", FAULT_SPIN, 0}, {"error", FAULT_ERROR, 1},
  {"wrong", FAULT_WRONG, 0}, {"oom", FAULT_OOM, 0}, {"abort", FAULT_ABORT, 0}, {"segv", FAULT_SEGV, 0},
  {"kill", FAULT_KILL, 0}, {"exit", FAULT_EXIT, 1}, {"delay", FAULT_DELAY, 1}, {"async", FAULT_ASYNC, 1},
};

static const char *const POINTS[] = {
  /* NCCL, at the call */ "getid", "init", "initdone", "split", "asyncerror", "finalize", "destroy", "commabort",
  /* NCCL, at the call; without "call_": when it runs on its stream */
  "call_allreduce", "call_broadcast", "call_reduce", "call_allgather", "call_reducescatter", "call_alltoall", "call_gather",
  "call_scatter", "call_send", "call_recv", "allreduce", "broadcast", "reduce", "allgather", "reducescatter", "alltoall",
  "gather", "scatter", "send", "recv", "coll", "p2p",
  /* CUDA */ "getdevicecount", "setdevice", "getdeviceproperties", "getattribute", "malloc", "free", "hostalloc", "memgetinfo",
  "memcpy", "memset", "launch", "streamcreate", "streamsync", "streamquery", "eventcreate", "eventrecord", "eventquery",
  "eventsync", "devsync",
  /* NVML */ "nvmlinit", "nvmlhandle",
};

static int known_point(const char *text) {
  for (size_t i = 0; i < sizeof POINTS / sizeof *POINTS; i++) if (!strcmp(POINTS[i], text)) return 1;
  return 0;
}

static int fail(char *why, int bytes, const char *what, const char *text) {
  if (why) snprintf(why, bytes, "%s: '%s'", what, text);
  return -1;
}

static int whole_number(const char *text, long long *out) { /* 17, 4K, 1M */
  char *end;
  *out = strtoll(text, &end, 10);
  if (end == text) return -1;
  if (*end == 'K') { *out <<= 10; end++; }
  else if (*end == 'M') { *out <<= 20; end++; }
  return *end ? -1 : 0;
}

static int parse_action(char *text, struct fault *fault, char *why, int bytes) {
  long long number = 0;
  char *equals = strchr(text, '=');
  if (!strncmp(text, "cuda", 4) && !whole_number(text + 4, &number)) {
    fault->action = FAULT_CUDA;
    fault->number = (long)number;
    return 0;
  }
  if (!strncmp(text, "preset=", 7)) {
    fault->action = FAULT_PRESET;
    if (!text[7] || strlen(text + 7) >= sizeof fault->preset) return fail(why, bytes, "no such preset", text + 7);
    strcpy(fault->preset, text + 7);
    return 0;
  }
  if (equals) *equals = 0;
  for (size_t i = 0; i < sizeof ACTIONS / sizeof *ACTIONS; i++) {
    if (strcmp(ACTIONS[i].name, text)) continue;
    if (ACTIONS[i].number != !!equals) return fail(why, bytes, "action with a missing or needless '=N'", text);
    if (equals && whole_number(equals + 1, &number)) return fail(why, bytes, "not a number", equals + 1);
    fault->action = ACTIONS[i].action;
    fault->number = (long)number;
    return 0;
  }
  return fail(why, bytes, "unknown action", text);
}

/* "rank1", "rank=1", "world>=4", "bytes<=64K" -> 1 when `text` is about `name`, -1 when its number is bad */
static int parse_range(const char *text, const char *name, struct range *range) {
  size_t length = strlen(name);
  long long number;
  if (strncmp(text, name, length)) return 0;
  const char *rest = text + length;
  int at_least = !strncmp(rest, ">=", 2), at_most = !strncmp(rest, "<=", 2);
  rest += at_least || at_most ? 2 : *rest == '=';
  if (whole_number(rest, &number)) return -1;
  range->set = 1;
  range->low = at_most ? -1 : number;
  range->high = at_least ? INT64_MAX : number;
  return 1;
}

static int parse_end(const char *text, int *index, char *node) { /* "1" or "hostB/1" */
  const char *slash = strrchr(text, '/');
  long long number;
  if (slash) snprintf(node, 64, "%.*s", (int)(slash - text), text);
  if (whole_number(slash ? slash + 1 : text, &number)) return -1;
  *index = (int)number;
  return 0;
}

static int parse_pair(char *text, struct entry *e, int kind) {
  char *dash = strrchr(text, '-');
  if (!dash) return -1;
  *dash = 0;
  e->pair_kind = kind;
  return parse_end(text, &e->pair[0], e->pair_node[0]) || parse_end(dash + 1, &e->pair[1], e->pair_node[1]) ? -1 : 0;
}

static int parse_setting(char *text, struct entry *e, int wanted) {
  if (e->settings == MAX_SETTINGS || !*text) return -1;
  char *equals = strchr(text, '=');
  if (equals) *equals = 0;
  snprintf(e->setting[e->settings].name, 64, "%s", text);
  snprintf(e->setting[e->settings].value, 64, "%s", equals ? equals + 1 : "");
  e->setting[e->settings].has_value = !!equals;
  e->setting[e->settings++].wanted = wanted;
  return 0;
}

static int parse_visit(const char *text, struct range *visit) { /* "3", "3+", "3-5" */
  char *end;
  visit->set = 1;
  visit->low = visit->high = strtoll(text, &end, 10);
  if (end == text || visit->low < 1) return -1;
  if (*end == '+') { visit->high = INT64_MAX; end++; }
  else if (*end == '-') visit->high = strtoll(end + 1, &end, 10);
  return *end || visit->high < visit->low ? -1 : 0;
}

static int parse_condition(char *text, struct entry *e) {
  int found;
  long long number;
  if (!strncmp(text, "notrank", 7)) { text += 7 + (text[7] == '='); e->not_rank = atoi(text); return whole_number(text, &number); }
  if ((found = parse_range(text, "rank", &e->rank))) return found < 0 ? -1 : 0;
  if ((found = parse_range(text, "world", &e->world))) return found < 0 ? -1 : 0;
  if ((found = parse_range(text, "bytes", &e->bytes))) return found < 0 ? -1 : 0;
  if (!strncmp(text, "host", 4)) { snprintf(e->node, sizeof e->node, "%s", text + 4 + (text[4] == '=')); return *e->node ? 0 : -1; }
  if (!strncmp(text, "gpu=", 4)) { if (whole_number(text + 4, &number)) return -1; e->gpu = (int)number; return 0; }
  if (!strncmp(text, "pair=", 5)) return parse_pair(text + 5, e, 1);
  if (!strncmp(text, "gpupair=", 8)) return parse_pair(text + 8, e, 2);
  if (!strncmp(text, "with=", 5)) return parse_setting(text + 5, e, 1);
  if (!strncmp(text, "without=", 8)) return parse_setting(text + 8, e, 0);
  if (!strcmp(text, "shared")) { e->shared = 1; return 0; }
  if (!strcmp(text, "chatty")) { e->fault.chatty = 1; return 0; }
  return -1;
}

static int parse_entry(char *text, struct entry *e, char *why, int bytes) {
  memset(e, 0, sizeof *e);
  e->not_rank = e->gpu = -1;
  e->key = 14695981039346656037ull; /* FNV-1a, so that a shared counter belongs to this very text */
  for (const char *c = text; *c; c++) e->key = (e->key ^ (unsigned char)*c) * 1099511628211ull;
  char *save = NULL, *colon = strchr(text, ':');
  if (!colon || colon == text) return fail(why, bytes, "a fault is point:action", text);
  for (char *c = colon; *c; c++) if (*c == '#') *c = '@'; /* "#2" is a condition like the others */
  *colon = 0;
  if (!known_point(text)) return fail(why, bytes, "unknown point", text);
  snprintf(e->point, sizeof e->point, "%s", text);
  char *token = strtok_r(colon + 1, "@", &save);
  if (!token) return fail(why, bytes, "a fault is point:action", text);
  if (parse_action(token, &e->fault, why, bytes)) return -1;
  while ((token = strtok_r(NULL, "@", &save))) {
    int bad = token[0] >= '0' && token[0] <= '9' ? parse_visit(token, &e->visit) : parse_condition(token, e);
    if (bad) return fail(why, bytes, "unknown or malformed condition", token);
  }
  if (e->shared && !getenv("FAKE_CUDA_STATE")) return fail(why, bytes, "@shared needs FAKE_CUDA_STATE", text);
  return 0;
}

static int parse(const char *text, struct entry *out, char *why, int bytes) {
  char *copy = strdup(text ? text : ""), *save = NULL;
  int n = 0;
  for (char *t = strtok_r(copy, ", \n", &save); t; t = strtok_r(NULL, ", \n", &save)) {
    if (n == MAX_FAULTS) { n = fail(why, bytes, "more than 64 faults", t); break; }
    if (parse_entry(t, &out[n], why, bytes)) { n = -1; break; }
    n++;
  }
  free(copy);
  return n;
}

static void load(const char *text) { /* lock held */
  char why[256];
  int n = parse(text, entries, why, sizeof why);
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
  int n = parse(text, scratch, why, bytes);
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
      return (site->rank == e->pair[0] && site->peer == e->pair[1]) || (site->rank == e->pair[1] && site->peer == e->pair[0]);
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

int fault_strikes(const struct fault_site *site, struct fault *struck) {
  if (entry_count == 0) return 0;
  pthread_mutex_lock(&lock);
  if (entry_count < 0) load(getenv("FAKE_FAULT"));
  int rank = site->rank >= 0 ? site->rank : from_environment("RANK");
  int world = site->world >= 0 ? site->world : from_environment("WORLD_SIZE");
  int hit = 0;
  for (int i = 0; i < entry_count && !hit; i++) {
    struct entry *e = &entries[i];
    if (strcmp(e->point, site->point) || (site->only_pairs && !e->pair_kind) || !conditions_hold(e, site, rank, world)) continue;
    long visit = e->shared ? node_count(e->key * 31 + (uint64_t)(rank + 2)) : ++e->seen;
    if (e->visit.set && (visit < e->visit.low || visit > e->visit.high)) continue;
    *struck = e->fault;
    hit = 1;
  }
  pthread_mutex_unlock(&lock);
  if (hit) node_trace("fault at %s on rank %d: action %d number %ld", site->point, rank, struck->action, struck->number);
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
    case FAULT_HANG: for (;;) pause();
    case FAULT_SPIN: for (volatile long turns = 0;; turns++) continue;
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
