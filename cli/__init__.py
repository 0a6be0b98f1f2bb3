"""`baton …`, the command line."""
