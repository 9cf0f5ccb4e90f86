"""The double: the real torch NCCL code between processes of a machine without a GPU (README.md)."""
