"""What processes report as metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(address: str, name: str) -> Iterator[Sample]:
    """The values of a metric, one for each set of labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        text = response.read().decode()
    for family in text_string_to_metric_families(text):
        yield from (sample for sample in family.samples if sample.name == name)


def total(address: str, name: str, **labels: str) -> float:
    """The sum of a metric's values that have these labels, among others."""
    return sum(
        sample.value for sample in samples(address, name) if labels.items() <= sample.labels.items()
    )
