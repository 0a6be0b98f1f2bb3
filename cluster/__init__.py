"""Ray: actors, pools, membership. The only `import ray`."""

import os

# Ray otherwise takes a SIGTERM for a crash and prints every thread's stack before it lets
# us stop in order. It looks when it is imported, which is why this is here.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
