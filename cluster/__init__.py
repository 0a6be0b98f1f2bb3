"""Ray: actors, pools, membership. The only `import ray`."""

import os

# Otherwise Ray takes a SIGTERM for a crash and prints every thread's stack before an orderly
# stop. Ray reads the variable at import, so it is set here.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
