"""`baton …`, the command line."""

import os

# gRPC otherwise writes of every connection that ends to stderr. It looks when it is
# imported, which is why this is here; whoever has set it, for debugging, keeps it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
