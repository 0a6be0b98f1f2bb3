"""Measures requests: ledgers while they run; metrics, trends and spans from them."""
