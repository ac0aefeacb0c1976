"""For all tests: threads that wait for work do so asleep.

By default OpenMP's threads spin, and two of them beside another process on two cores make a test up
to four times as slow. The variable counts when torch is imported, which is after this file; the
processes that a test starts inherit it.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
