"""A small shop with ten bugs, and the world that finds them."""
