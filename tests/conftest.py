"""For all tests: how many threads work, and that those without work wait asleep.

By default OpenMP's threads spin, and two of them beside another process on two cores make a test up
to four times as slow. With several workers (pytest -n 2) each has one thread. The variables count
when torch is imported, which is after this file; the processes that a test starts inherit them.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
