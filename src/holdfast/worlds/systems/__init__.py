"""Systems that a world can roll back; each module needs only the client of its own system."""
