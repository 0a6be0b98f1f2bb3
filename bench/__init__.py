"""Where every figure in the README comes from."""
