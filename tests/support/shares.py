"""Distributes tests over the processes that share the suite."""

from __future__ import annotations

from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

RAY = ("test_ray", "test_serve", "test_scale")
"""Who looks for a Ray on this machine must find only its own."""

EMBEDDED = ("test_bad_input", "test_embedded_texts", "test_examples", "test_http")
EMBEDDED += ("test_logprobs_of_answers", "test_messages", "test_open_inference_answers")
EMBEDDED += ("test_overload", "test_requests", "test_response_cache", "test_responses")
EMBEDDED += ("test_resumed_streams", "test_sent_fields", "test_several_answers")
EMBEDDED += ("test_structured", "test_timing", "test_tokens_embedded", "test_tools")
"""Who shares the clusters of the embedded model and of its first layers."""

ONCE = ("test_compile", "test_quality", "test_wheel")
"""What their tests share takes long to make."""


class Shares(LoadScopeScheduling):
    """Tests of a file that shares clusters or the like stay together; all others go to a free
    process."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        if path.parent.name != "cluster" and path.stem not in ONCE:
            return nodeid
        groups = {"ray": RAY, "embedded": EMBEDDED}
        return next((name for name, files in groups.items() if path.stem in files), path.stem)

    def _reschedule(self, node: WorkerController) -> None:
        """Without the units that have ended, which would be counted after every test."""
        units = self.assigned_work[node]
        for scope in [scope for scope, tests in units.items() if all(tests.values())]:
            del units[scope]
        super()._reschedule(node)
