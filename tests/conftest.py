"""What every test needs."""

import os
import signal

# torch's store asks a name server for whoever connects. One that drops a query holds it for glibc's 5 s (resolv.conf(5)), past
# the short deadlines of these tests; one second is not. Read by glibc once per process, so before anything is resolved.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

# Whoever starts the tests in the background of a script has SIGINT ignored by the shell, and so has every process under test,
# some of which are sent it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
