# pip: aiperf
"""aiperf's load of streamed chats, with the server's metrics. Prints an answer a line."""

import json
import subprocess
import sys
from pathlib import Path

address, model, _, tokenizer = sys.argv[1:]
Path("questions.jsonl").write_text('{"text": "What is the capital of France?"}\n' * 4)
command = [
    *(str(Path(sys.executable).with_name("aiperf")), "profile"),
    *("--model", model, "--url", address, "--tokenizer", tokenizer),
    *("--endpoint-type", "chat", "--streaming"),
    *("--input-file", "questions.jsonl", "--custom-dataset-type", "single_turn"),
    *("--request-count", "4", "--concurrency", "2", "--extra-inputs", "temperature:0"),
    *("--ui", "none", "--export-level", "raw", "--output-artifact-dir", "report"),
]
subprocess.run(command, stdout=sys.stderr, check=True)
report = json.loads(Path("report/profile_export_aiperf.json").read_text())
assert (report["request_count"]["avg"], report["error_summary"]) == (4, []), report
assert report["usage_completion_tokens"]["min"] == 8, report
assert "baton_active_requests" in Path("report/server_metrics_export.csv").read_text()
for line in Path("report/profile_export_raw.jsonl").read_text().splitlines():
    packets = [packet for each in json.loads(line)["responses"] for packet in each["packets"]]
    assert packets.pop()["value"] == "[DONE]"
    choices = [json.loads(packet["value"])["choices"] for packet in packets]
    print("".join(one["delta"].get("content", "") for each in choices for one in each))
