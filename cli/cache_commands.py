"""`baton cache`: the response cache."""

from __future__ import annotations

import typer
from typer import Option

from baton import Client
from baton.cli.terminal import Address, AsJson, console, grid, print_json, print_result
from baton.cli.views import time_text
from baton.connection import DEFAULT_ADDRESS
from baton.v1 import cluster_pb2

VERIFIED = ("refused", "false refused", "right refused")
"""Columns about verified hits that a verification would have refused."""

cache = typer.Typer(help="Manage the response cache.", no_args_is_help=True)


@cache.command()
def clear(
    tenant: str | None = Option(
        None, metavar="NAME", help="Only answers to requests with this API key. (default: all)"
    ),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Delete cached answers: those in Redis, or else in the router's memory."""
    with Client(address) as client:
        deleted = client.clear_responses(tenant)
    whose = "" if tenant is None else f" of {tenant}"
    print_result({"responses": deleted}, f"{deleted} responses{whose} deleted", as_json)


@cache.command()
def report(
    false_hits: float = Option(
        0.01, min=0.0001, max=1.0, help="Propose a similarity for this share of false hits."
    ),
    same_answer: float = Option(
        0.9, min=0.01, max=1.0, help="Minimum similarity of two answers that say the same."
    ),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Print what the semantic cache would have answered (cache.semantic: shadow)."""
    with Client(address) as client:
        found = client.semantic_report(false_hits, same_answer)
    if as_json:
        print_json(found)
    else:
        _print_report(found, false_hits)


def _print_report(found: cluster_pb2.SemanticReportResponse, false_hits: float) -> None:
    verified = any(each.verified_hits for each in found.thresholds)
    columns = ("hits", "other text", "false", "saved", "tokens", *(VERIFIED if verified else ()))
    table = grid("least similarity", right=columns)
    for each in found.thresholds:
        table.add_row(f"{each.similarity:.2f}", *_cells(each)[: len(columns)])
    console().print(f"{found.requests} requests were compared with earlier ones", table, sep="\n")
    least = found.proposed if found.HasField("proposed") else None
    _print_proposal("hits", least, false_hits)
    if verified:
        least = found.proposed_verified if found.HasField("proposed_verified") else None
        _print_proposal("verified hits", least, false_hits)


def _print_proposal(
    of_what: str, least: cluster_pb2.SemanticThreshold | None, false_hits: float
) -> None:
    if least is None:
        console().print(f"no similarity is known to have at most {false_hits:.2%} false {of_what}")
        return
    counts = f"{least.false_hits} of {least.hits} {of_what} are false"
    console().print(f"proposed: cache.semantic_similarity: {least.similarity:.4f} ({counts})")


def _cells(each: cluster_pb2.SemanticThreshold) -> tuple[str, ...]:
    def share(part: int) -> str:
        return f"{part / each.hits:.1%}" if each.hits else "-"

    tokens = each.prompt_tokens + each.completion_tokens
    shares = share(each.different_hits), share(each.false_hits)
    refused = f"{each.refused_hits} of {each.verified_hits}"
    right = each.refused_hits - each.refused_false_hits
    sums = time_text(each.seconds), str(tokens)
    return str(each.hits), *shares, *sums, refused, str(each.refused_false_hits), str(right)
