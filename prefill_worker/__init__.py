"""Phase one: computes prompts, pushes their pages, emits token #1."""
