"""Sockets and nothing of policies: reading requests, relaying answers, turning errors into responses."""
