"""The server: REST, WebSocket and server-sent events over one store."""
