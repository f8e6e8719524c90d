"""Connections: ZeroMQ channels, bulk transfers, the key-value service, HTTP."""
