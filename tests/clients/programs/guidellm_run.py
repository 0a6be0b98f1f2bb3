# pip: guidellm
# borrow: torch
"""guidellm's load of chats, streamed and whole. Prints an answer a line."""

import json
import os
import subprocess
import sys
from pathlib import Path

address, model = sys.argv[1:3]
row = {"prompt": "What is the capital of France?"}
Path("questions.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
for stream in (True, False):
    server = {"kind": "openai_http", "target": address, "model": model, "stream": stream}
    server["extras"] = {"body": {"temperature": 0, "max_completion_tokens": 40}}
    options = {
        "backend": server,
        "profile": {"kind": "concurrent", "streams": 2},
        "constraint": {"kind": "max_requests", "count": 4},
        "data": {"kind": "json_file", "path": "questions.jsonl"},
        "output": {"kind": "json", "path": "report.json"},
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", json.dumps(value))]
    subprocess.run(
        [Path(sys.executable).with_name("guidellm"), "run", *flags, "--disable-console"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=sys.stderr,
        check=True,
    )
    (benchmark,) = json.loads(Path("report.json").read_text())["benchmarks"]
    assert not benchmark["requests"]["errored"]
    for request in benchmark["requests"]["successful"]:
        assert request["output_tokens"] == 8, request
        print(request["output"])
