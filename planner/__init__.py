"""How many workers of each role there should be, and what would happen if there were: pure
decisions, and a simulator to try them on."""
