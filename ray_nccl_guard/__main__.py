"""`python -m ray_nccl_guard`: the command line without an installed script."""

from ray_nccl_guard.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
