"""Stand-in for a Ray agent that this cluster does not use. Exits with its node.

It is run by its path, without site-packages, so that it starts at once.
"""

import os
import time

if __name__ == "__main__":
    node = os.getppid()
    while os.getppid() == node:
        time.sleep(1)
