/* A fault as parsed from FAKE_FAULT: what happens, where, and all the conditions on it. */
#pragma once
#include "fault.h"

#define MAX_FAULTS 64
#define MAX_SETTINGS 4

struct range {
  long long low, high;
  int set;
};
struct entry {
  char point[32], node[64];
  struct fault fault;
  struct range rank, world, bytes, visit;
  int not_rank, gpu, pair[2], shared;
  char pair_node[2][64];
  int pair_kind; /* 0 none, 1 ranks, 2 GPUs */
  struct {
    char name[64], value[64];
    int wanted, has_value;
  } setting[MAX_SETTINGS];
  int settings;
  uint64_t key; /* of the shared visit counter */
  long seen;
};

/* Fills `out`, room for MAX_FAULTS, from `text`; their number, or -1 and the reason in `why`. */
int faults_parse(const char *text, struct entry *out, char *why, int why_bytes);
