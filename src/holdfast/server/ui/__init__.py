"""The dashboard: pages for people under /ui/, made on the server from the same handles as REST."""
