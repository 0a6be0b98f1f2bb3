"""Moves pages between pools. Knows no engine."""
