"""The workers that a router knows: links, health, membership, and the controller."""
