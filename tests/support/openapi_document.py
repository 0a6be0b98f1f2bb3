"""The OpenAPI document of an edge without models."""

from __future__ import annotations

import functools
import json
from typing import Any
from unittest.mock import Mock

from prometheus_client import CollectorRegistry

from baton.core.config import RouterConfig
from baton.router.edges.auth import KeyRing
from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.http.http_app import HttpApp
from baton.router.requests.serving import Activity
from baton.router.served_models import ServedModels


@functools.cache
def document() -> Any:
    context = EdgeContext(ServedModels(), Activity(RouterConfig()), KeyRing(""), 1)
    return json.loads(HttpApp(context, Mock(), CollectorRegistry(), Mock()).document)
