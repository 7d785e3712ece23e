"""Tools that break databases on purpose, for tests of Holdfast and of agents built on it."""
