"""What the whole suite relies on."""

from __future__ import annotations

import signal

# A suite that a shell started in the background inherits an ignored Ctrl-C, and so would the
# processes it starts. Several tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
