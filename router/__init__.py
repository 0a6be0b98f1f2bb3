"""The front door: edges, text, policy, dispatch. No torch."""
