/* The grammar of FAKE_FAULT: point:action[@condition]..., separated by commas (README.md, "Faults"). */
#define _GNU_SOURCE
#include "fault_language.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
  const char *name;
  enum fault_action action;
  int number;
} ACTIONS[] = {
    /* number: 0 takes none, 1 needs one */
    {"hang", FAULT_HANG, 0},   {"hang-gil", FAULT_HANG_GIL, 0}, {"spin", FAULT_SPIN, 0},   {"error", FAULT_ERROR, 1},
    {"wrong", FAULT_WRONG, 0}, {"oom", FAULT_OOM, 0},           {"abort", FAULT_ABORT, 0}, {"segv", FAULT_SEGV, 0},
    {"kill", FAULT_KILL, 0},   {"exit", FAULT_EXIT, 1},         {"delay", FAULT_DELAY, 1}, {"async", FAULT_ASYNC, 1},
};

static const char *const POINTS[] = {
    /* NCCL, at the call */ "getid",
    "init",
    "initdone",
    "split",
    "asyncerror",
    "finalize",
    "destroy",
    "commabort",
    /* NCCL, at the call; without "call_": when it runs on its stream */
    "call_allreduce",
    "call_broadcast",
    "call_reduce",
    "call_allgather",
    "call_reducescatter",
    "call_alltoall",
    "call_gather",
    "call_scatter",
    "call_send",
    "call_recv",
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "reducescatter",
    "alltoall",
    "gather",
    "scatter",
    "send",
    "recv",
    "coll",
    "p2p",
    /* CUDA */ "getdevicecount",
    "setdevice",
    "getdeviceproperties",
    "getattribute",
    "malloc",
    "free",
    "hostalloc",
    "memgetinfo",
    "memcpy",
    "memset",
    "launch",
    "streamcreate",
    "streamsync",
    "streamquery",
    "eventcreate",
    "eventrecord",
    "eventquery",
    "eventsync",
    "devsync",
    /* NVML */ "nvmlinit",
    "nvmlhandle",
};

static int known_point(const char *text) {
  for (size_t i = 0; i < sizeof POINTS / sizeof *POINTS; i++)
    if (!strcmp(POINTS[i], text)) return 1;
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
  if (*end == 'K') {
    *out <<= 10;
    end++;
  } else if (*end == 'M') {
    *out <<= 20;
    end++;
  }
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
  if (*end == '+') {
    visit->high = INT64_MAX;
    end++;
  } else if (*end == '-')
    visit->high = strtoll(end + 1, &end, 10);
  return *end || visit->high < visit->low ? -1 : 0;
}

static int parse_condition(char *text, struct entry *e) {
  int found;
  long long number;
  if (!strncmp(text, "notrank", 7)) {
    text += 7 + (text[7] == '=');
    e->not_rank = atoi(text);
    return whole_number(text, &number);
  }
  if ((found = parse_range(text, "rank", &e->rank))) return found < 0 ? -1 : 0;
  if ((found = parse_range(text, "world", &e->world))) return found < 0 ? -1 : 0;
  if ((found = parse_range(text, "bytes", &e->bytes))) return found < 0 ? -1 : 0;
  if (!strncmp(text, "host", 4)) {
    snprintf(e->node, sizeof e->node, "%s", text + 4 + (text[4] == '='));
    return *e->node ? 0 : -1;
  }
  if (!strncmp(text, "gpu=", 4)) {
    if (whole_number(text + 4, &number)) return -1;
    e->gpu = (int)number;
    return 0;
  }
  if (!strncmp(text, "pair=", 5)) return parse_pair(text + 5, e, 1);
  if (!strncmp(text, "gpupair=", 8)) return parse_pair(text + 8, e, 2);
  if (!strncmp(text, "with=", 5)) return parse_setting(text + 5, e, 1);
  if (!strncmp(text, "without=", 8)) return parse_setting(text + 8, e, 0);
  if (!strcmp(text, "shared")) {
    e->shared = 1;
    return 0;
  }
  if (!strcmp(text, "chatty")) {
    e->fault.chatty = 1;
    return 0;
  }
  return -1;
}

static int parse_entry(char *text, struct entry *e, char *why, int bytes) {
  memset(e, 0, sizeof *e);
  e->not_rank = e->gpu = -1;
  e->key = 14695981039346656037ull; /* FNV-1a, so that a shared counter belongs to this very text */
  for (const char *c = text; *c; c++) e->key = (e->key ^ (unsigned char)*c) * 1099511628211ull;
  char *save = NULL, *colon = strchr(text, ':');
  if (!colon || colon == text) return fail(why, bytes, "a fault is point:action", text);
  for (char *c = colon; *c; c++)
    if (*c == '#') *c = '@'; /* "#2" is a condition like the others */
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

int faults_parse(const char *text, struct entry *out, char *why, int bytes) {
  char *copy = strdup(text ? text : ""), *save = NULL;
  int n = 0;
  for (char *t = strtok_r(copy, ", \n", &save); t; t = strtok_r(NULL, ", \n", &save)) {
    if (n == MAX_FAULTS) {
      n = fail(why, bytes, "more than 64 faults", t);
      break;
    }
    if (parse_entry(t, &out[n], why, bytes)) {
      n = -1;
      break;
    }
    n++;
  }
  free(copy);
  return n;
}
