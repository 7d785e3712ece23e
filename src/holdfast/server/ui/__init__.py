"""The dashboard: pages under /ui/, rendered on the server from the same handles as REST."""
