"""Measures requests: keeps a ledger of each, and makes metrics, trends and spans of them."""
