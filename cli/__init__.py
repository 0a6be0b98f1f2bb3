"""`baton …`, the command line."""

import os

# Else gRPC logs every closed connection to stderr. It reads this when it is imported. A value set
# for debugging is kept.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
