"""The network below a process group: which address is taken, whether it can be reached, and which host is to blame."""
