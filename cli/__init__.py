"""`baton …`, the command line."""

import os

# Keeps gRPC from logging every closed connection to stderr. gRPC reads this when it is imported. A
# value set for debugging is kept.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
