"""What both phases share: a process with an event loop, an engine thread and a transfer thread."""
